"""Worker process of one contender of bench/gpu_step.py: torch with an fp32 master, or infinity with the job's config.

A turn has warm-up steps, then measured steps, then one step under torch.profiler. The measured time includes the wait
for all pending work. Everything runs on the job's device.
"""

from __future__ import annotations

import gc
import gzip
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers.protocol import Contender, serve
from peers.workload import Job, Workload

import infinity
from infinity.tiers.slots import SlabSlot

_TRACE_BYTES_MAX = 10 << 20


class MasterAdamW:
    """AdamW over fp32 copies of bf16 weights, with clipping by the global norm.

    torch needs these copies for the same arithmetic as infinity. States take 2 + 4 + 8 bytes per parameter; gradients
    take 2 bytes, and 4 bytes during the step.
    """

    def __init__(self, model: torch.nn.Module, work: Workload) -> None:
        self._weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [weight.detach().float() for weight in self._weights]
        self._max_grad_norm = work.max_grad_norm
        self._adamw = torch.optim.AdamW(
            self._masters, lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay, fused=True
        )

    def step(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm)
        self._adamw.step()
        self._adamw.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)


@dataclass
class SlotWaits:
    """GPU time spent on waits for the weights of slots, measured by events on the stream before and after each wait."""

    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]

    @classmethod
    def install(cls) -> SlotWaits | None:
        """From now on, measure the time of every wait for a slot. Returns None if there is no GPU."""
        if not torch.cuda.is_available():
            return None
        waits, wait = cls([]), SlabSlot.wait

        def timed(slot: SlabSlot) -> None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            wait(slot)
            after.record()
            waits.pairs.append((before, after))

        SlabSlot.wait = timed  # type: ignore[method-assign]
        return waits

    def take_seconds(self) -> float:
        """Return the seconds since the previous call. The GPU must have reached the last event."""
        seconds = sum(before.elapsed_time(after) for before, after in self.pairs) / 1e3
        self.pairs.clear()
        return seconds


@dataclass
class Measured(Contender):
    """A contender and the data that its turn needs."""

    job: Job = field(default_factory=lambda: Job(Workload()))
    waits: SlotWaits | None = None

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.job.options["device"]).type == "cuda"


def setup(job: Job) -> Measured:
    """Build the model on its device and its optimizer. Options: device, config (None: torch), warmups, steps, trace."""
    device = torch.device(job.options["device"])
    with device:
        model = job.workload.build_model()
    tokens = job.workload.build_batch().to(device)
    made = _torch(model, tokens, job) if job.options["config"] is None else _infinity(model, tokens, job)
    made.facts |= {
        "numel": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name(device) if made.on_gpu else "cpu",
        "torch": torch.__version__,
        "slot_waits": "not obtainable" if made.waits is None else "timed",
    }
    gc.collect()
    if made.on_gpu:
        torch.cuda.empty_cache()
    return made


def _torch(model: Any, tokens: torch.Tensor, job: Job) -> Measured:
    optim = MasterAdamW(model, job.workload)

    def step() -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optim.step()
        return loss.detach()

    def settle() -> None:
        if tokens.is_cuda:
            torch.cuda.synchronize()

    return Measured(step, settle, job=job)


def _infinity(model: Any, tokens: torch.Tensor, job: Job) -> Measured:
    work, config = job.workload, dict(job.options["config"])
    waits = SlotWaits.install() if tokens.is_cuda else None
    if job.swap_dir:
        config["nvme"] = {"paths": [job.swap_dir]}
    model = infinity.offload(model, config, device=tokens.device)
    optim = infinity.AdamW(
        model.parameters(),
        lr=work.lr,
        betas=work.betas,
        eps=work.eps,
        weight_decay=work.weight_decay,
        max_grad_norm=work.max_grad_norm,
    )
    counted = infinity.statistics(model)
    facts = {"plan": counted.plan.describe(), "engine": counted.engine, "arena_bytes": counted.arena_bytes}

    def step() -> Any:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    def settle() -> None:
        infinity.synchronize(model)
        if tokens.is_cuda:
            torch.cuda.synchronize()

    return Measured(
        step,
        settle,
        facts=facts | {"slot_bytes": counted.slot_bytes},
        counters=lambda: _counters(infinity.statistics(model)),
        close=lambda: infinity.close(model),
        job=job,
        waits=waits,
    )


def turn(contender: Contender) -> dict[str, Any]:
    """Run warm-up steps, measured steps and one traced step."""
    if not isinstance(contender, Measured):
        raise AssertionError("not one of ours")
    options, waits, on_gpu = contender.job.options, contender.waits, contender.on_gpu
    for _ in range(options["warmups"]):
        contender.step()
    contender.settle()
    if waits is not None:
        waits.take_seconds()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before, steps = contender.counters(), options["steps"]
    losses, returned = [], []
    began = time.perf_counter()
    for _ in range(steps):
        losses.append(contender.step())
        returned.append(time.perf_counter())
    contender.settle()
    seconds = (time.perf_counter() - began) / steps
    after = contender.counters()
    found: dict[str, Any] = {
        "seconds": seconds,
        "returned_s": [round(at - began, 4) for at in returned],
        "losses": [float(loss) for loss in losses],
        "counters": {key: (value - before[key]) / steps for key, value in after.items()},
    }
    if waits is not None:
        found["gpu_idle_at_slots_s"] = waits.take_seconds() / steps
    if on_gpu:
        found["max_memory_reserved"] = torch.cuda.max_memory_reserved()
        found["max_memory_allocated"] = torch.cuda.max_memory_allocated()
    if options["trace"]:
        found["trace"] = _trace(contender, Path(options["trace"]), on_gpu=on_gpu)
    return found


def _counters(statistics: infinity.Statistics) -> dict[str, float]:
    """Return the seconds and moved bytes of the run so far, by name."""
    return {
        "read_bytes_moved": statistics.read_bytes,
        "written_bytes_moved": statistics.written_bytes,
        "fetch_wait_s": statistics.fetch_wait_s,
        "gradient_s": statistics.gradient_s,
        "update_s": statistics.update_s,
        "adam_s": statistics.adam_s,
        "io_busy_s": statistics.io_busy_s,
    }


def _trace(contender: Contender, path: Path, *, on_gpu: bool) -> dict[str, Any]:
    """Trace one step with torch.profiler to `path` (.json.gz); return the figures of the GPU, or why there are none."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        began = time.perf_counter()
        with torch.profiler.profile(activities=activities) as profile:
            contender.step()
            contender.settle()
        seconds = time.perf_counter() - began
        profile.export_chrome_trace(str(path))
        found: dict[str, Any] = {"seconds": seconds, "bytes": path.stat().st_size}
        if on_gpu:
            found |= _busy(path)
        if found["bytes"] > _TRACE_BYTES_MAX:
            path.unlink()
            found["dropped"] = f"larger than {_TRACE_BYTES_MAX >> 20} MiB"
        else:
            found["file"] = path.name
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _busy(path: Path) -> dict[str, float]:
    """Return the seconds of a trace in which a kernel ran, and in which a copy ran; overlapping kernels (or copies)
    count once."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds = {"kernel": "kernels_s", "gpu_memcpy": "copies_s"}
    return {
        name: covered([(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == kind]) / 1e6
        for kind, name in kinds.items()
    }


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    total, end = 0.0, float("-inf")
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


if __name__ == "__main__":
    serve(setup, turn)
