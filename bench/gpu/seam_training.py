"""Training on the GPU and the guarantees of the device seam: memory, events, threads, updates.

torch's own race detector, TORCH_CUDA_SANITIZER, crashes in torch's code and reports nothing, so it is not used.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from gpu.cuda import DEVICE
from infinity.coordinator import registry
from infinity.device_update.arithmetic_check import check_of
from infinity.device_update.compared_updates import StateDtypes

_MIB = 1 << 20
_WIDTH, _WIDE = 512, 4096
BLOCKS = 12
_BATCH = 8
_EXACT_WIDTH = 128


class Block(nn.Module):
    """Two square matrices: 1 MiB of bf16 weights at a width of 512."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Model of equal blocks, each of which is a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def offloaded(swap: Path, width: int = _WIDTH, **config: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return a model whose slots have room for two of its twelve blocks, its optimizer, and a batch."""
    torch.manual_seed(0)
    with torch.device(DEVICE if width == _WIDE else "cpu"):  # creating a large model is faster on the device
        model = Blocks(width).bfloat16()
    defaults = {
        "weights": "host",
        "optimizer": "host",
        "activations": "keep",
        "memory": {"device": "5MiB", "host": "512MiB"},
        "nvme": {"paths": [str(swap)]},
        "commit_every": 0,
    }
    model = infinity.offload(model, defaults | config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    batch = torch.randn(_BATCH, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    return model, optim, batch


def train(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor, steps: int, *, aside: bool
) -> list[float]:
    """Train and return the losses. `aside`: call backward from another thread."""
    losses = []
    for _ in range(steps):
        loss = model(batch)
        if aside:
            _in_thread(loss.backward)
        else:
            loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def _in_thread(work: Any) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def threads_and_tiers(steps: int = 4) -> dict[str, Any]:
    """Return the losses with the backward in this thread and in another thread, each with weights in RAM and on NVMe.

    All four lists must be equal.
    """
    found = {}
    for tier in ("host", "nvme"):
        for aside in (False, True):
            with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
                model, optim, batch = offloaded(Path(swap), weights=tier, optimizer=tier)
                found[f"{tier}, {'another' if aside else 'same'} thread"] = train(
                    model, optim, batch, steps, aside=aside
                )
                infinity.close(model)
    return found


class Scale(nn.Module):
    """One matrix. Its gradient is the `factors` argument of the forward, times the incoming gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).bfloat16())

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return x + (self.weight * factors).sum().float()


class Exact(nn.Module):
    """A chain of blocks whose gradients are the factors themselves, so that they have the same bits on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scale(_EXACT_WIDTH) for _ in range(BLOCKS))

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        x = factors.new_zeros((), dtype=torch.float32)
        for index, block in enumerate(self.blocks):
            x = block(x, factors + index)
        return x


def overlap_modes(steps: int = 4) -> dict[str, Any]:
    """Compare the weights after some steps with the CPU's, in every overlap mode, with and without clipping."""
    different, early = [], 0
    for tier in ("host", "nvme", "device"):
        for max_norm in (None, 1.0):
            on_the_cpu = "host" if tier == "device" else tier
            expected, _ = _exact_weights(on_the_cpu, max_norm, "off", steps, device="cpu")
            for overlap in ("auto", "during_backward", "before_forward", "off"):
                found, begun = _exact_weights(tier, max_norm, overlap, steps, device=DEVICE)
                early += begun
                if any(not torch.equal(found[name], weight) for name, weight in expected.items()):
                    different.append(f"{tier}, {overlap}, {'clipped' if max_norm else 'not clipped'}")
    return {"other bits": different, "early updates": early}


def _exact_weights(
    tier: str, max_norm: float | None, overlap: str, steps: int, *, device: str
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the final weights, and how many speculative updates were begun and correct."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
        config = {
            "weights": tier,
            "optimizer": tier,
            "overlap": overlap,
            "memory": {"device": "64MiB" if tier == "device" else "1MiB", "host": "256MiB"},
        }
        config |= {"nvme": {"paths": [swap]}, "commit_every": 0, "activations": "keep"}
        model = infinity.offload(Exact(), config, device=device)
        optim = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=max_norm)
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            factors = torch.randint(-8, 9, (_EXACT_WIDTH, _EXACT_WIDTH), generator=generator)
            model(factors.bfloat16().to(device)).backward()
            optim.step()
            optim.zero_grad()
        infinity.synchronize(model)
        early = infinity.statistics(model).updates.early
        coordinator, found = registry.coordinator_of(model), {}
        for unit in coordinator.units:
            with coordinator.taking([unit.full.index]):
                found |= {name: parameter.detach().cpu().clone() for name, parameter in unit.parameters.items()}
        infinity.close(model)
    return found, early


def arithmetic() -> dict[str, Any]:
    """Return the differences between the GPU's updates and the CPU's, by rule and by the dtypes of the states."""
    check, different = check_of(torch.device(DEVICE)), {}
    forms = [
        StateDtypes(torch.bfloat16, "split16", torch.bfloat16),
        StateDtypes(torch.bfloat16, "split16", torch.float32),
        StateDtypes(torch.bfloat16, "fp32", torch.bfloat16),
        StateDtypes(torch.float16, "fp32", torch.float16),
        StateDtypes(torch.float32, "weight", torch.float32),
    ]
    for rule in ("adamw", "adam", "sgd", "lion", "adagrad"):
        for form in forms:
            difference = check.verdict(rule, form).difference
            if difference is not None:
                different[f"{rule}, {form}"] = difference
    return {"other bits": different}


def host_waits(steps: int = 3) -> dict[str, float]:
    """Return how often the host waits for the GPU: in the seam (counted calls) and in torch (counted warnings)."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
        model, optim, batch = offloaded(Path(swap))
        train(model, optim, batch, 2, aside=False)
        infinity.synchronize(model)
        torch.cuda.synchronize()
        device: Any = registry.coordinator_of(model).resources.device
        waits = _Waits(device.accelerator)
        with waits, torch.no_grad():
            for _ in range(steps):
                model(batch)
        evaluated = waits.take() / steps
        with waits:
            for _ in range(steps):
                model(batch).backward()
                optim.step()
                optim.zero_grad()
        stepped = waits.take() / steps
        units = len(registry.coordinator_of(model).units)
        infinity.close(model)
    return {"in evaluation": evaluated, "in a step": stepped, "units": units}


class _Waits:
    """Context manager that counts the host's waits."""

    def __init__(self, accelerator: Any) -> None:
        self._count = 0
        self._warned: list[warnings.WarningMessage] = []
        synchronize = accelerator.synchronize

        def counted(event: Any) -> None:
            self._count += 1
            synchronize(event)

        accelerator.synchronize = counted
        self._catching = warnings.catch_warnings(record=True)

    def __enter__(self) -> None:
        self._count = 0
        self._catching = warnings.catch_warnings(record=True)
        self._warned = self._catching.__enter__() or []
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(1)

    def __exit__(self, *raised: Any) -> None:
        torch.cuda.set_sync_debug_mode(0)
        self._catching.__exit__(*raised)

    def take(self) -> int:
        """Return the number of waits since the context was entered."""
        return self._count + sum("synchronizing" in str(each.message) for each in self._warned)


def bytes_per_parameter(steps: int = 4) -> dict[str, float]:
    """Return the bytes read and written per parameter and step, with all states on NVMe and little RAM."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
        model, optim, batch = offloaded(
            Path(swap), weights="nvme", optimizer="nvme", memory={"device": "5MiB", "host": "72MiB"}
        )
        train(model, optim, batch, 2, aside=False)
        infinity.synchronize(model)
        before = infinity.statistics(model)
        train(model, optim, batch, steps, aside=False)
        infinity.synchronize(model)
        after = infinity.statistics(model)
        infinity.close(model)
    moved = steps * after.numel
    return {
        "read": round((after.read_bytes - before.read_bytes) / moved, 2),
        "of it weights": round((after.weight_bytes_read - before.weight_bytes_read) / moved, 2),
        "written": round((after.written_bytes - before.written_bytes) / moved, 2),
        "in RAM": round(after.cached_bytes / after.numel, 2),
    }


def reserved_memory(steps: int = 6) -> dict[str, float]:
    """Return the largest number of bytes that torch reserved during training, and memory.device.

    The slots have room for four of twelve blocks of 64 MiB. torch reserves memory in segments of 20 MiB and cuBLAS has
    a workspace; both are small in comparison with the slots.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
        model, optim, batch = offloaded(Path(swap), _WIDE, memory={"device": "512MiB", "host": "10GiB"})
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(model, optim, batch, steps, aside=False)
        infinity.synchronize(model)
        torch.cuda.synchronize()
        plan = infinity.statistics(model).plan
        infinity.close(model)
    return {
        "memory_device_mib": plan.budgets.limits.device / _MIB,
        "slots_mib": plan.budgets.slot_bytes / _MIB,
        "reserved_mib": (torch.cuda.max_memory_reserved() - before) / _MIB,
    }


def events_in_evaluation(passes: int = 60) -> dict[str, int]:
    """Return how many events of uploads and last uses are kept, after few and after many passes without a step."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
        model, _, batch = offloaded(Path(swap))
        device: Any = registry.coordinator_of(model).resources.device
        found = {}
        with torch.no_grad():
            for number in range(1, passes + 1):
                model(batch)
                if number in (passes // 6, passes):
                    torch.cuda.synchronize()
                    found[f"after {number}"] = len(device.uploads._reading) + len(device.slots._left)
        infinity.close(model)
    return found
