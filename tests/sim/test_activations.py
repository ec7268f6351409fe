"""Activations in RAM and on NVMe on the simulated device: each use of memory is in order, whatever the schedule."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests import sampling
from tests.sim.queues import EAGER, LAZY, Policy, random_policy
from tests.sim.test_schedules import Case, on_the_cpu, simulated, train

POLICIES = [LAZY, EAGER, *(random_policy(sampling.SEED + index) for index in range(sampling.number(2, 20)))]
PLAIN = Case(
    tiers=("host", "host"),
    dtype=torch.bfloat16,
    micro_batches=2,
    overlap="before_forward",
    clipping="never",
    gradients="host",
    commit_every=0,
    moments="fp32",
    recompute="no",
    device="roomy",
    habit="plain",
    resident="none",
    activations="nvme",
)


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("device", ["tight", "roomy"])
@pytest.mark.parametrize("habit", ["plain", "fails"])
@pytest.mark.parametrize("where", ["nvme", "host"])
def test_activations_move_in_order(where: str, habit: str, device: str, policy: Policy, tmp_path: Path) -> None:
    case = PLAIN._replace(activations=where, habit=habit, device=device)
    expected = on_the_cpu(case)
    with simulated(policy) as simulation:
        sim = simulation.sim
        on_another_stream = functools.partial(sim.on, sim.stream("another compute stream"))
        found = train(case, tmp_path / "sim", lambda model: sim.counts["bytes down"], on_another_stream)
    assert found.losses == expected.losses
    assert [name for name in expected.weights if not torch.equal(found.weights[name], expected.weights[name])] == []
    assert found.seen > 0
