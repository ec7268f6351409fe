"""Several ranks tile a layer that none of them has room for, all alike, and train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.workers import run
from tests.runtime.over_ranks import TIERS, on_rank, train

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("tiers", TIERS[1::2])
def test_ranks_tile_alike_and_end_in_the_bits_of_one_process(tiers: dict[str, Any], tmp_path: Path) -> None:
    ranks, micro = 2, 2
    here = {**tiers, "weights": "nvme", "memory": {"host": "256MiB", "device": "512KiB"}}
    losses, norms, weights = train(str(tmp_path / "one"), here, micro, ranks, steps=2)
    assert any("infinity_tile" in name for name in weights)
    there = {**tiers, "memory": {"host": "256MiB", "device": f"{512 * ranks}KiB"}, "ranks": {"wire": "gloo"}}
    told = run(ranks, on_rank, str(tmp_path / "all"), there, micro, ranks, {"steps": 2})
    for rank, (mine, same, found) in enumerate(told):
        assert mine == losses[rank::ranks]
        assert same == norms
        assert found == weights
