"""Models that are not a sequence of equal blocks, on the simulated device with the smallest possible device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.sizes import parse_bytes
from tests.conftest import Offload, require_no_leaks, weights_of
from tests.models import ARCHITECTURES, loss_of
from tests.sim.fixtures import Simulate
from tests.sim.queues import LAZY, Policy, random_policy

STEPS = 4


def train(offload: Offload, name: str, tier: str, *, passes: int = 1, **config: Any) -> dict[str, torch.Tensor]:
    """Return the resulting weights, and the losses of evaluations between the steps."""
    torch.manual_seed(0)
    model, batch = ARCHITECTURES[name]()
    model = offload(model.train(), tier, **config)
    optimizer, losses = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), []
    for _ in range(STEPS):
        for _ in range(passes):
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(model, batch))
    require_no_leaks(model)
    return weights_of(model) | {"losses": torch.stack(losses)}


def least_device_bytes(offload: Offload, name: str, tier: str) -> int:
    with pytest.raises(infinity.PlanError, match="memory.device") as caught:
        offload(ARCHITECTURES[name]()[0], tier, memory={"device": "64KiB", "host": "512MiB"})
    return parse_bytes(str(caught.value).split("memory.device to ")[1].split()[0].rstrip("."))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("policy", [LAZY, random_policy(0)], ids=["lazy", "random"])
@pytest.mark.parametrize("tier", ["nvme", "host"])
@pytest.mark.parametrize(
    ("name", "activations"), [("t5", "recompute"), ("t5", "keep"), ("mixtral", "recompute"), ("tied_llama", "keep")]
)
def test_the_least_device_memory_is_enough(
    simulate: Simulate, offload: Offload, tmp_path: Path, policy: Policy, name: str, activations: str, tier: str
) -> None:
    """One of t5's units stays on the device while the model runs, its tied unit is used at both ends, and only few
    experts of a mixture see a batch."""
    config = {"activations": activations}
    plain = train(offload, name, tier, nvme={"paths": [str(tmp_path / "plain")]}, **config)
    simulate(policy)
    memory = {"device": least_device_bytes(offload, name, tier), "host": "512MiB"}
    assert same(train(offload, name, tier, memory=memory, **config), plain)
