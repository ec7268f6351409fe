"""Several ranks, each with a simulated device, train to the bits of one process without a device.

The weights go up from one copy in RAM that the ranks share. Gradients come down into RAM and go to their owners there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity.sharded import rank_agreement
from tests import sampling
from tests.ranks.workers import run
from tests.runtime.over_ranks import train
from tests.sim.fixtures import Simulation
from tests.sim.queues import EAGER, LAZY, Policy, random_policy

TIERS = [
    {"weights": "host", "optimizer": "host"},
    {"weights": "host", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "host"},
]


def on_device(
    policy: Policy, folder: str, config: dict[str, Any], micro: int, ranks: int, options: dict[str, Any]
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        limits_of = rank_agreement.limits_of
        patch.setattr(rank_agreement, "limits_of", lambda *given: replace(limits_of(*given), in_place=False))
        simulation = Simulation(patch, policy)
        result = train(folder, config, micro, ranks, **options)
        simulation.finish()
        return result, dict(simulation.sim.counts)


@pytest.mark.covering(strength=1, most=6)
@pytest.mark.parametrize("policy", [LAZY, EAGER, random_policy(sampling.SEED)], ids=str)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("frozen", ["bf16", "nf4", "int8"])
@pytest.mark.parametrize("overlap", ["off", "during_backward", "auto"])
@pytest.mark.parametrize("norm", [None, 0.01])
@pytest.mark.parametrize("model", [{}, {"frozen": True}, {"twice": True, "recomputed": True}])
def test_ranks_with_devices_train_to_the_bits_of_one_process(
    tmp_path: Path,
    policy: Policy,
    tiers: dict[str, Any],
    ranks: int,
    micro: int,
    dtype: str,
    frozen: str,
    overlap: str,
    norm: float | None,
    model: dict[str, Any],
) -> None:
    config = tiers | {"overlap": overlap, "frozen": frozen if model.get("frozen") else "auto"}
    options: dict[str, Any] = {"steps": 2, "dtype": dtype, "max_grad_norm": norm, "model": model}
    memory = {"memory": {"host": f"{128 * ranks}MiB", "device": "8MiB"}}
    losses, norms, weights = train(str(tmp_path / "one"), config, micro, ranks, **options)
    found = run(ranks, on_device, policy, str(tmp_path / "all"), config | memory, micro, ranks, options)
    for rank, (result, counts) in enumerate(found):
        assert result == (losses[rank::ranks], norms, weights)
        assert counts["copies up"]
        assert counts["copies down"]
