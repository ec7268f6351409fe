"""Offloaded models on the simulated device: the same bits as on the CPU, and all uses are ordered."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.coordinator import registry
from tests import models, processes
from tests.conftest import Offload, require_no_leaks, weights_of
from tests.sim.accelerator import Misuse
from tests.sim.fixtures import Simulate, Simulation
from tests.sim.queues import LAZY, Policy, random_policy
from tests.sim.test_accelerator import every_policy


class Toy(nn.Module):
    """Three units, each of which may be checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        return (x * x).mean()


def train(
    offload: Offload,
    tier: str,
    *,
    steps: int = 3,
    passes: int = 1,
    reentrant: bool | None = None,
    in_a_thread: bool = False,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Return the resulting weights."""
    torch.manual_seed(0)
    model = offload(Toy(reentrant).bfloat16(), tier, **options)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    for step in range(steps):
        for index in range(passes):
            generator = torch.Generator().manual_seed(step * passes + index)
            loss = model(torch.randn(4, 32, generator=generator).bfloat16().requires_grad_())
            if in_a_thread:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if registry.coordinator_of(model).resources.device is not None:
        require_no_leaks(model)
    return weights_of(model)


def offload_alone(opened: list[nn.Module], directory: Path, model: nn.Module, tier: str, **options: Any) -> nn.Module:
    """Offload a model without the fixture `offload`, which exists once per test. The caller closes `opened`."""
    config = {"weights": tier, "optimizer": tier, "nvme": {"paths": [str(directory)]}, "commit_every": 0}
    memory = {"memory": {"device": "64MiB", "host": "512MiB"}}
    opened.append(infinity.offload(model, config | memory | options))
    return opened[-1]


TIGHT = {"device": "36KiB", "host": "512MiB"}
"""Room for the slots of two of the three units, and for the gradients' ring of one unit."""


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, torch.Tensor]]:
    """Return the weights that are trained on the CPU."""

    @functools.cache
    def trained(tier: str, **options: Any) -> dict[str, torch.Tensor]:
        opened: list[nn.Module] = []
        directory = tmp_path_factory.mktemp("plain")
        weights = train(functools.partial(offload_alone, opened, directory), tier, **options)
        infinity.close(opened[0])
        return weights

    return trained


@pytest.mark.covering(strength=1)
@every_policy
@pytest.mark.parametrize("tier", ["nvme", "host"])
@pytest.mark.parametrize("passes", [1, 2])
def test_training_ends_in_the_bits_of_the_cpu(
    simulate: Simulate, offload: Offload, plain: Callable[..., Any], policy: Policy, tier: str, passes: int
) -> None:
    expected = plain(tier, passes=passes)
    sim = simulate(policy)
    assert same(train(offload, tier, passes=passes, memory=TIGHT), expected)
    assert sim.counts["copies up"] > 3 * 3
    assert sim.counts["copies down"] > 0


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("in_a_thread", [True, False])
@every_policy
def test_checkpointing_and_a_backward_thread_are_ordered_too(
    simulate: Simulate, offload: Offload, plain: Callable[..., Any], policy: Policy, reentrant: bool, in_a_thread: bool
) -> None:
    expected = plain("nvme", reentrant=reentrant)
    simulate(policy)
    assert same(train(offload, "nvme", reentrant=reentrant, in_a_thread=in_a_thread, memory=TIGHT), expected)


@every_policy
def test_evaluation_between_steps_is_ordered(simulate: Simulate, offload: Offload, policy: Policy) -> None:
    """An evaluation copies nothing to the host that would show the progress of the device."""
    simulate(policy)
    model = offload(Toy().bfloat16(), "host", memory=TIGHT)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(4, 32).bfloat16()
    for _ in range(2):
        model(batch).backward()
        with torch.no_grad():
            model(batch)
        optimizer.step()
        optimizer.zero_grad()
    require_no_leaks(model)


class Clamped(nn.Linear):
    """Module whose forward writes to the weight without notice, as some modules of gemma3n do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@every_policy
def test_what_a_forward_writes_to_weights_is_ordered_before_their_update(
    simulate: Simulate, offload: Offload, policy: Policy
) -> None:
    simulate(policy)
    plain = Toy().bfloat16()
    for block in plain.blocks:
        block[0] = Clamped(32, 64).bfloat16()
    model = offload(plain, overlap="during_backward")
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 32).bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()


@every_policy
def test_weights_that_are_written_in_gathered_are_no_longer_on_their_way_up(
    simulate: Simulate, offload: Offload, policy: Policy
) -> None:
    simulate(policy)
    model = offload(Toy().bfloat16(), "host")
    with infinity.gathered(model, write=True):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    "options", [{}, {"gradients": "nvme"}, {"commit_every": 1}, {"weights": "host", "commit_every": 1}], ids=str
)
@pytest.mark.parametrize(("architecture", "device"), [("tied_llama", "800KiB"), ("mixed", "76KiB")])
def test_models_with_tied_and_mixed_weights_are_ordered(
    simulate: Simulate, offload: Offload, tmp_path: Path, architecture: str, device: str, options: dict[str, Any]
) -> None:
    def run(**more: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        made, batch = models.ARCHITECTURES[architecture]()
        model = offload(made, "nvme", **options, **more)
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        for _ in range(2):
            for _ in range(2):
                models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    plain = run(nvme={"paths": [str(tmp_path / "plain")]})
    simulate(random_policy(1))
    assert same(run(memory={"device": device, "host": "512MiB"}), plain)


def test_an_error_that_is_swallowed_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(monkeypatch, LAZY)
    with contextlib.suppress(Misuse):
        simulation.sim.synchronize(simulation.sim.event())
    with pytest.raises(Misuse, match="nobody recorded"):
        simulation.finish()


def test_a_piece_of_the_ring_that_is_not_given_back_fails_the_test(
    monkeypatch: pytest.MonkeyPatch, offload: Offload
) -> None:
    simulation = Simulation(monkeypatch, LAZY)
    model = offload(Toy().bfloat16(), "nvme")
    device = registry.coordinator_of(model).resources.device
    assert device is not None
    lease = device.ring.try_lease(64)
    infinity.close(model)
    del lease
    with pytest.raises(Misuse, match="never given back"):
        simulation.finish()


def train_shut(directory: Path) -> None:
    """Train in a separate process, on a slab whose pages are accessible only for logged uses."""
    faulthandler.enable()
    opened: list[nn.Module] = []
    simulation = Simulation(pytest.MonkeyPatch(), LAZY, shut=True)
    for reentrant in (None, True, False):
        offload = functools.partial(offload_alone, opened, directory)
        train(offload, "nvme", memory=TIGHT, passes=2, reentrant=reentrant, in_a_thread=reentrant is False)
        infinity.close(opened[-1])
    simulation.finish()
    print("all was logged")


def test_no_operation_touches_device_memory_without_being_logged(tmp_path: Path) -> None:
    """An access that is not logged would end the process."""
    done = processes.run(train_shut, tmp_path / "swap")
    assert done.stdout == "all was logged\n", done.stderr


def test_a_closed_model_that_is_referred_to_gives_the_slab_back(simulate: Simulate, offload: Offload) -> None:
    simulate()
    model = offload(Toy().bfloat16(), "host")
    model(torch.randn(4, 32).bfloat16().requires_grad_()).backward()
    device = registry.coordinator_of(model).resources.device
    assert device is not None
    slabs = [device.staying, device.slots, device.ring]
    memory = [weakref.ref(slab._memory) for slab in slabs]
    assert sum(slab._memory.numel() for slab in slabs) > 0
    infinity.close(model)
    assert [slab._memory.numel() for slab in slabs] == [0, 0, 0]
    assert [each() for each in memory] == [None] * 3


def test_in_vertical_order_every_gradient_comes_down_once(simulate: Simulate, offload: Offload) -> None:
    """Also that of a tied embedding, which the head brings first and the embedding last."""
    sim = simulate(LAZY)
    torch.manual_seed(0)
    model, batch = models.tied_llama()
    model.resize_token_embeddings(4096)  # larger than two blocks
    model = offload(model.bfloat16(), "host", vertical=True)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    groups = sum(len(unit.full.trainable_groups) for unit in registry.coordinator_of(model).units)
    for _ in range(3):
        before = sim.counts["copies down"]
        infinity.backward(model, lambda given: model(**given).loss, [batch] * 3)
        optimizer.step()
        optimizer.zero_grad()
        assert sim.counts["copies down"] - before == groups
