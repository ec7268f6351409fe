"""What the GPU's side of the seam keeps, waits for and gives back, told on an imitated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.tiers.accelerator import CudaDevice
from infinity.tiers.slots import CudaSlots
from tests.conftest import states_of, weights_of
from tests.imitation import Event, Imitation, Stream, imitate

TIGHT = {"device": "40KiB", "host": "64MiB"}


class Blocks(nn.Module):
    """Eight blocks of 8 KiB in bf16, reduced to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x.float() ** 2).mean()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Imitation:
    return imitate(monkeypatch)


@pytest.fixture
def slots(offload: Any, gpu: Imitation) -> Callable[..., CudaSlots]:
    """The slots of a model on an imitated GPU, none of which is taken."""

    def make(weights: str) -> CudaSlots:
        model = offload(Blocks().bfloat16(), weights=weights, optimizer="host", memory=TIGHT)
        found = registry.coordinator_of(model).room._slots
        assert isinstance(found, CudaSlots)
        return found

    return make


def train(model: nn.Module, micro_batches: int = 1) -> list[float]:
    batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    optim, losses = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0), []
    for _ in range(4):
        for _ in range(micro_batches):
            loss = model(batch)
            loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("weights", "optimizer", "micro_batches", "gradients"),
    [
        ("host", "host", 1, "host"),
        ("host", "host", 2, "nvme"),
        ("host", "nvme", 2, "host"),
        ("host", "nvme", 1, "nvme"),
        ("nvme", "nvme", 1, "host"),
        ("nvme", "nvme", 2, "nvme"),
    ],
)
def test_the_way_over_a_gpu_ends_in_the_cpus_bits(
    weights: str, optimizer: str, micro_batches: int, gradients: str, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []
    for imitated in (False, True):
        if imitated:
            imitate(monkeypatch)
        torch.manual_seed(0)
        model = Blocks().bfloat16()
        model = offload(model, weights=weights, optimizer=optimizer, gradients=gradients, memory=TIGHT)
        losses = train(model, micro_batches)
        assert registry.coordinator_of(model).resources.plan.budgets.limits.shares_memory is not imitated
        results.append((losses, weights_of(model), states_of(model)))
        infinity.close(model)
    assert results[1][0] == results[0][0]
    for now, expected in zip(results[1][1:], results[0][1:], strict=True):
        assert now.keys() == expected.keys()
        assert all(torch.equal(now[name], expected[name]) for name in expected)


def test_a_stream_waits_for_an_upload_once_and_is_recorded_where_it_did_not_allocate(gpu: Imitation) -> None:
    slot = gpu.device().upload(torch.zeros(4096, dtype=torch.uint8), lambda: None)
    gpu.waits.clear(), gpu.recorded.clear()
    slot.wait()
    slot.wait()
    assert [stream for stream, _ in gpu.waits] == [gpu.default]
    assert gpu.recorded == []
    side = Stream(gpu)
    with torch.cuda.stream(side):
        slot.wait()
        slot.wait()
    assert [stream for stream, _ in gpu.waits] == [gpu.default, side]
    assert gpu.recorded == [(slot.tensor.data_ptr(), side)]


def test_another_stream_that_asks_for_weights_waits_for_their_upload(offload: Any, gpu: Imitation) -> None:
    model = offload(Blocks().bfloat16(), "host", memory=TIGHT | {"device": "1MiB"})
    coordinator = registry.coordinator_of(model)
    coordinator.acquire(3)
    coordinator.release(3)
    gpu.waits.clear()
    side = Stream(gpu)
    with torch.cuda.stream(side):
        coordinator.require(3)
    assert [stream for stream, _ in gpu.waits] == [side]


def test_uploads_of_weights_in_ram_are_forgotten_once_they_are_complete(offload: Any, gpu: Imitation) -> None:
    model = offload(Blocks().bfloat16(), "host", memory=TIGHT)
    device = registry.coordinator_of(model).resources.device
    assert isinstance(device, CudaDevice)
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(4, 64).bfloat16())
    assert len(device._pending) <= gpu.lag + 1


@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_no_memory_on_the_gpu_leaks_nothing(weights: str, slots: Callable[..., CudaSlots], gpu: Imitation) -> None:
    pool = slots(weights)
    homes, arena = [unit.weights for unit in pool._resources.units], pool._resources.arena
    free_bytes, arena_bytes = pool._free_bytes, arena.free_bytes
    gpu.out_of_memory = 1

    def bring() -> None:
        fetch = pool.start(homes[0], {})
        assert fetch is not None
        fetch.wait()
        fetch.advance()  # leaves a failure to finish()
        pool.free(fetch.finish())

    with pytest.raises(torch.OutOfMemoryError):
        bring()
    assert (pool._free_bytes, arena.free_bytes) == (free_bytes, arena_bytes)
    bring()


@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_training_goes_on_after_the_gpu_had_no_memory(weights: str, offload: Any, gpu: Imitation) -> None:
    model = offload(Blocks().bfloat16(), weights=weights, optimizer="host", memory=TIGHT)
    gpu.out_of_memory = 1
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(4, 64).bfloat16())
    train(model)
    coordinator = registry.coordinator_of(model)
    coordinator.resources.device.synchronize_uploads()
    pool = coordinator.room._slots
    assert isinstance(pool, CudaSlots)
    fetched = sum(unit.unit.weight_bytes for unit in coordinator.units if unit.weights.slot or unit.weights.fetch)
    assert pool._free_bytes + fetched == coordinator.resources.plan.budgets.slot_bytes


def test_closing_waits_for_copies_before_the_memory_goes(
    offload: Any, gpu: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = offload(Blocks().bfloat16(), "nvme", memory=TIGHT)
    device = registry.coordinator_of(model).resources.device
    assert isinstance(device, CudaDevice)
    loss = model(torch.randn(4, 64).bfloat16())
    assert device._pending
    uploads = [event for event, _ in device._pending]
    downs: list[Event] = []
    monkeypatch.setattr(Stream, "record_event", _noting(Stream.record_event, device._down, downs))
    del loss
    infinity.close(model)
    assert all(event.waited for event in uploads)
    assert downs[-1].waited


def _noting(record: Callable[..., Event], of: Any, into: list[Event]) -> Callable[..., Event]:
    def noted(stream: Stream, event: Event | None = None) -> Event:
        event = record(stream, event)
        if stream is of:
            into.append(event)
        return event

    return noted


def test_time_without_work_is_counted_once_the_gpu_has_passed_it(gpu: Imitation) -> None:
    device = gpu.device()
    device.idle_begins()
    for _ in range(6):
        gpu.default.record_event()
    device.idle_ends()
    assert device.idle_s == 0.0  # it is behind
    for _ in range(gpu.lag):
        gpu.default.record_event()
    assert device.idle_s == pytest.approx(7e-3)


def test_what_an_exception_left_open_is_not_counted(gpu: Imitation) -> None:
    device = gpu.device()
    device.idle_begins()  # and something is raised
    for _ in range(100):
        gpu.default.record_event()
    device.idle_begins()
    device.idle_ends()
    for _ in range(gpu.lag):
        gpu.default.record_event()
    assert device.idle_s == pytest.approx(1e-3)


def test_a_gpu_that_waits_for_weights_says_so(offload: Any, gpu: Imitation) -> None:
    model = offload(Blocks().bfloat16(), "nvme", memory=TIGHT)
    train(model)
    assert infinity.statistics(model).device_idle_s > 0
