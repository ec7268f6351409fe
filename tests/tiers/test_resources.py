"""Resources that exist once per model are made completely, as the layout says, or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.io.store import SwapStore
from infinity.tiers import resources
from tests.sim.fixtures import Simulate
from tests.sim.queues import LAZY


def test_threads_that_cannot_be_started_are_an_error_with_the_fix(
    swap_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EAGAIN, "cannot start 2 threads", "")

    with monkeypatch.context() as patched:
        patched.setattr(_native, "ThreadPool", refuse)
        with pytest.raises(infinity.ConfigError, match="2 threads cannot be started .Resource.*Lower update.threads"):
            infinity.offload(nn.Linear(8, 8), swap_config())
    infinity.close(infinity.offload(nn.Linear(8, 8), swap_config()))


@pytest.mark.parametrize(
    ("tier", "given"),
    [
        ("nvme", {"gradients": "nvme", "commit_every": 1, "keep": 2}),
        ("nvme", {"overlap": "off"}),
        ("host", {"commit_every": 1}),
        ("host", {}),
    ],
)
def test_what_is_opened_is_what_was_laid_out(offload: Any, tier: str, given: dict[str, Any]) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.Linear(64, 32)) for _ in range(3))
    model[1][0].weight.requires_grad_(False)
    opened = registry.coordinator_of(offload(model, tier, **given)).resources
    layout = opened.plan.layout
    planned = {
        (unit.local.name, index, name): (state.offsets, state.nbytes)
        for unit in layout.units
        for index, (group, gradient) in enumerate(zip(unit.groups, unit.gradients, strict=True))
        for name, state in {"weight": group.weight, **group.states, "grad": gradient}.items()
        if state.offsets
    }
    found = {(each.unit, each.group, each.state): (each.offsets, each.nbytes) for each in opened.extents()}
    assert found == planned
    assert (opened.store is not None) == (layout.swap.nbytes > 0) == bool(planned)
    assert opened.arena.nbytes == layout.arena.nbytes
    assert opened.arena.free_bytes == layout.arena.transfers
    assert opened.resting.nbytes == layout.arena.homes_and_shadows


@pytest.mark.parametrize(("device", "disks", "expected"), [(1, 0, 1), (-1, 2, 2), (0, -1, 0)])
def test_memory_and_threads_are_at_the_node_of_the_device_else_of_the_disks(
    device: int, disks: int, expected: int, simulate: Simulate, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a device uses crosses its bus in each pass; states are read and written once a step."""
    nodes: list[int] = []
    arena, pool = resources.PinnedArena, _native.ThreadPool

    def open_arena(nbytes: int, *, numa_node: int = -1) -> Any:
        nodes.append(numa_node)
        return arena(nbytes)

    def open_pool(threads: int, *, numa_node: int, nice: int) -> Any:
        nodes.append(numa_node)
        return pool(threads, nice=nice)

    simulate(LAZY).numa_node = device
    monkeypatch.setattr(SwapStore, "numa_node", disks)
    monkeypatch.setattr(resources, "PinnedArena", open_arena)
    monkeypatch.setattr(_native, "ThreadPool", open_pool)
    offload(nn.Linear(8, 8), "nvme")
    assert nodes == [expected, expected]
