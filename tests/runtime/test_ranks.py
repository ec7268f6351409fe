"""Several ranks train the bits that one process trains with all their micro-batches."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.coordinator import registry
from infinity.ranks import collectives
from tests.ranks.workers import run
from tests.runtime.over_ranks import (
    TIERS,
    alone,
    batch,
    digest,
    offloaded,
    on_rank,
    require_equal,
    train,
)

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

STEPS = 4


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("overlap", ["off", "before_forward", "during_backward", "auto"])
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
    require_equal(tmp_path, config, micro, ranks, steps=2, dtype=dtype, max_grad_norm=max_grad_norm, model=model)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("master", ["split16", "fp32", "none"])
def test_every_master_is_cut_over_ranks_to_the_bits_of_one_process(tmp_path: Path, master: str, ranks: int) -> None:
    config = TIERS[3] | {"master": master, "overlap": "during_backward"}
    require_equal(tmp_path, config, 1, ranks, steps=2, dtype="bfloat16", max_grad_norm=0.01)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("micro", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", ["off", "during_backward", "auto"])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_micro_batches_of_all_ranks_may_go_through_one_unit_after_the_other(
    tmp_path: Path,
    tiers: dict[str, Any],
    ranks: int,
    micro: int,
    dtype: str,
    overlap: str,
    some: bool,
    recomputed: bool,
) -> None:
    config, model = tiers | {"overlap": overlap}, {"recomputed": recomputed}
    require_equal(
        tmp_path, config, micro, ranks, dtype=dtype, max_grad_norm=0.01, some=some, vertical=True, model=model
    )


def speculating(folder: str, config: dict[str, Any], late: int, seconds: float) -> tuple[list[str], list[int], int]:
    """Train, and return the weights, the updates that had begun before each step, and how many were undone. The
    backward of rank `late` takes longer. It begins when all ranks have committed the step before."""
    model = offloaded(folder, config)
    optim = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=1)
    if dist.get_rank() == late:
        for block in model.blocks:
            block.register_full_backward_hook(lambda *_: time.sleep(seconds))
    begun, coordinator = [], registry.coordinator_of(model)
    for step in range(STEPS):
        loss = model(batch(step, dist.get_rank(), torch.float32))
        coordinator.finish_updates()
        coordinator.finish_commit()
        dist.barrier()
        loss.backward()
        begun.append(len(coordinator.update_queue.speculative))
        optim.step()
        optim.zero_grad()
    with infinity.gathered(model, model):
        weights = [digest(parameter) for parameter in model.parameters()]
    undone = coordinator.speculation_choice.counts.undone
    infinity.close(model)
    return weights, begun, undone


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("commit_every", [0, 1])
def test_updates_begin_during_backward_on_every_rank(tmp_path: Path, tiers: dict[str, Any], commit_every: int) -> None:
    folder = str(tmp_path / "swap")
    config = tiers | {"overlap": "during_backward", "commit_every": commit_every, "nvme": {"paths": [folder]}}
    (weights, first, undone), (other, second, also) = run(2, speculating, folder, config, 1, 0.0)
    assert weights == other
    assert undone == also == 0
    if commit_every:  # in a backward the ranks hear with what they exchange that all have made the last generation
        assert all(first)
        assert all(second)
    else:  # the first step expects a gradient of the other head, too; rank 1 has nothing of the heads, one slice
        assert (first[0], max(first), max(second)) == (3, 4, 3)
        assert min(first + second) >= 2, "more than one exchange was on its way when a backward had ended"


def test_a_rank_that_is_late_changes_nothing(tmp_path: Path) -> None:
    config = TIERS[3] | {"overlap": "during_backward", "commit_every": 1}
    prompt = run(2, speculating, str(tmp_path / "prompt"), config, 2, 0.0)
    late = run(2, speculating, str(tmp_path / "late"), config, 1, 0.02)
    assert len({str(weights) for weights, *_ in (*prompt, *late)}) == 1


def delayed(folder: str, config: dict[str, Any], late: int) -> Any:
    """Training in which rank `late` begins what the ranks do together some milliseconds after it could."""
    if dist.get_rank() == late:
        chance = random.Random(late)
        for name in ("begin_header", "begin_gather", "begin_all_to_all", "begin_telling"):
            begin = getattr(collectives, name)

            def slowly(*arguments: Any, begin: Any = begin) -> Any:
                time.sleep(chance.random() * 0.004)
                return begin(*arguments)

            setattr(collectives, name, slowly)
    return train(folder, config, 2, 2, max_grad_norm=0.01)


@pytest.mark.parametrize("gather", ["world", pytest.param("none", marks=pytest.mark.long)])
def test_collectives_that_one_rank_begins_late_change_nothing(tmp_path: Path, gather: str) -> None:
    memory = {"memory": {"host": "256MiB", "device": "4MiB"}}  # of both ranks: slots for two blocks
    config = TIERS[3] | memory | {"overlap": "during_backward", "commit_every": 1, "ranks": {"gather": gather}}
    found = []
    for late in (0, 1, 2):
        folder = str(tmp_path / str(late))
        found += [told[1:] for told in run(2, delayed, folder, config | {"nvme": {"paths": [folder]}}, late)]
    assert all(each == found[0] for each in found)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
@pytest.mark.parametrize("options", [{"max_grad_norm": 0.01}, {"dtype": "bfloat16"}])
def test_one_rank_goes_the_way_of_several_to_the_same_bits(tmp_path: Path, tiers: Any, options: dict[str, Any]) -> None:
    expected = train(str(tmp_path / "one"), tiers, 2, 1, **options)
    assert run(1, alone, str(tmp_path / "all"), tiers, 2, options) == [expected]


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
@pytest.mark.parametrize("overlap", ["before_forward", "during_backward"])
def test_a_parameter_that_some_batches_use_is_trained_as_in_one_process(
    tmp_path: Path, tiers: dict[str, Any], overlap: str
) -> None:
    require_equal(tmp_path, tiers | {"overlap": overlap}, 2, 3, some=True, max_grad_norm=0.05)


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("tiers", TIERS)
def test_a_block_that_is_used_twice_is_updated_with_both_gradients(tmp_path: Path, tiers: dict[str, Any]) -> None:
    require_equal(tmp_path, tiers | {"overlap": "during_backward"}, 1, 2, steps=4, model={"twice": True})


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_gradients_set_to_none_by_hand_are_gone(tmp_path: Path, micro: int) -> None:
    config = TIERS[3] | {"overlap": "during_backward"}
    require_equal(tmp_path, config, micro, 2, cleared=True, some=True, steps=4)


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("tiers", [TIERS[0], TIERS[3]])
@pytest.mark.parametrize("overlap", ["before_forward", "during_backward"])
def test_evaluations_and_gradients_that_are_dropped_change_nothing(
    tmp_path: Path, tiers: dict[str, Any], overlap: str
) -> None:
    config = tiers | {"overlap": overlap}
    expected = train(str(tmp_path / "one"), config, 1, 2, disturbed=True)
    for found in run(2, on_rank, str(tmp_path / "all"), config, 1, 2, {"disturbed": True}):
        assert found[1:] == expected[1:]


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.long), 2])
def test_gradients_that_spill_are_added_in_the_store_of_their_owner(tmp_path: Path, micro: int) -> None:
    require_equal(tmp_path, TIERS[3] | {"gradients": "nvme"}, micro, 3)


def test_a_frozen_block_is_gathered_and_not_exchanged(tmp_path: Path) -> None:
    require_equal(tmp_path, TIERS[3], 1, 2, model={"frozen": True})


@pytest.mark.parametrize("host", ["24MiB", pytest.param("256MiB", marks=pytest.mark.long)])
def test_slots_of_two_blocks_do(tmp_path: Path, host: str) -> None:
    require_equal(tmp_path, TIERS[3] | {"memory": {"host": host, "device": "4MiB"}}, 1, 2, steps=4)


# What is not the same on all ranks
