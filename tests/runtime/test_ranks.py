"""Several ranks train the bits that one process trains with all their micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.workers import run
from tests.runtime.over_ranks import (
    TIERS,
    alone,
    on_rank,
    require_equal,
    train,
)

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("overlap", ["off", "auto"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
@pytest.mark.parametrize("recomputed", [False, True])
def test_ranks_train_the_bits_of_one_process(
    tmp_path: Path,
    tiers: dict[str, Any],
    ranks: int,
    micro: int,
    dtype: str,
    moments: str,
    overlap: str,
    max_grad_norm: float | None,
    recomputed: bool,
) -> None:
    config = tiers | {"moments": moments, "overlap": overlap}
    model = {"recomputed": recomputed}
    require_equal(tmp_path, config, micro, ranks, dtype=dtype, max_grad_norm=max_grad_norm, model=model)


@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
@pytest.mark.parametrize("options", [{"max_grad_norm": 0.01}, {"dtype": "bfloat16"}])
def test_one_rank_goes_the_way_of_several_to_the_same_bits(tmp_path: Path, tiers: Any, options: dict[str, Any]) -> None:
    expected = train(str(tmp_path / "one"), tiers, 2, 1, **options)
    assert run(1, alone, str(tmp_path / "all"), tiers, 2, options) == [expected]


@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
def test_a_parameter_that_some_batches_use_is_trained_as_in_one_process(tmp_path: Path, tiers: Any) -> None:
    require_equal(tmp_path, tiers, 2, 3, some=True, max_grad_norm=0.05)


@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_set_to_none_by_hand_are_gone(tmp_path: Path, micro: int) -> None:
    require_equal(tmp_path, TIERS[3], micro, 2, cleared=True, some=True, steps=4)


@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
def test_evaluations_and_gradients_that_are_dropped_change_nothing(tmp_path: Path, tiers: Any) -> None:
    expected = train(str(tmp_path / "one"), tiers, 1, 2, disturbed=True)
    for found in run(2, on_rank, str(tmp_path / "all"), tiers, 1, 2, {"disturbed": True}):
        assert found[1:] == expected[1:]


@pytest.mark.parametrize("micro", [1, 2])
def test_gradients_that_spill_are_added_in_the_store_of_their_owner(tmp_path: Path, micro: int) -> None:
    require_equal(tmp_path, TIERS[3] | {"gradients": "nvme"}, micro, 3)


def test_a_frozen_block_is_gathered_and_not_exchanged(tmp_path: Path) -> None:
    require_equal(tmp_path, TIERS[3], 1, 2, model={"frozen": True})


@pytest.mark.parametrize("host", ["24MiB", "256MiB"])
def test_slots_of_two_blocks_do(tmp_path: Path, host: str) -> None:
    require_equal(tmp_path, TIERS[3] | {"memory": {"host": host, "device": "4MiB"}}, 1, 2, steps=4)


# What is not the same on all ranks
