"""Worker process for one model of stage 8; each "step" on stdin measures the next row of the job.

The model is trained by torch with all states in device memory, by FSDP2 with its shards in host memory, or by infinity.
"""

from __future__ import annotations

import bisect
import cProfile
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers.protocol import Contender, serve
from peers.workload import Job

import infinity
from gpu.step_worker import MasterAdamW
from infinity.coordinator import registry
from infinity.io.events import take
from infinity.state.training_step import BatchShape, StepFacts

_BUSIEST = 30
"""Number of functions in a profile of a step."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Rows(Contender):
    """Model of stage 8 with its rows.

    Attributes:
        rows: rows that are not measured yet: `name`, `micro_batches`, `max_grad_norm`, `overlap` (None: the plan's
            choice), `profiled` (whether the main thread's functions are timed in a further step).
        begin: function that applies the settings of a row.
        pipeline: pipeline that runs the updates and whose tiles are traced.
        phases: begin and name (forward, backward) of each phase of the steps so far.
    """

    rows: Iterator[dict[str, Any]] = dataclasses.field(default_factory=lambda: iter(()))
    begin: Callable[[dict[str, Any]], None] = lambda row: None
    pipeline: Any = None
    phases: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    job: Job | None = None


def setup(job: Job) -> Rows:
    """Build the contender. Options: device, contender (torch, fsdp2 or infinity), config, rows, warmups, steps."""
    device = torch.device(job.options["device"])
    make = {"torch": _torch, "fsdp2": _fsdp2, "infinity": _infinity}[job.options["contender"]]
    made = make(job, device)
    made.job, made.rows = job, iter(job.options["rows"])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return made


def _batches(job: Job, device: torch.device) -> list[torch.Tensor]:
    most = max(row["micro_batches"] for row in job.options["rows"])
    work = dataclasses.replace(job.workload, micro_batches=most)
    return [tokens.to(device) for tokens in work.build_batches()]


def _torch(job: Job, device: torch.device) -> Rows:
    with device:
        model = job.workload.build_model()
    optim, batches = MasterAdamW(model, job.workload), _batches(job, device)
    return _plain(model, batches, lambda row: optim.step(), device)


def _fsdp2(job: Job, device: torch.device) -> Rows:
    """Build the FSDP2 contender: fp32 weights and torch's fused AdamW in host memory, bf16 for computing."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", "tcp://127.0.0.1:29511", rank=0, world_size=1
    )
    mesh = torch.distributed.init_device_mesh(device.type, (1,))
    with device:
        model = job.workload.build_model()
    model.to("cpu").float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    work = job.workload
    optim = torch.optim.AdamW(
        model.parameters(), lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay, fused=True
    )

    def step(row: dict[str, Any]) -> None:
        if row["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), row["max_grad_norm"])
        optim.step()
        optim.zero_grad()

    return _plain(model, _batches(job, device), step, device)


def _plain(
    model: Any, batches: list[torch.Tensor], update: Callable[[dict[str, Any]], None], device: torch.device
) -> Rows:
    now: dict[str, Any] = {}
    for name, buffer in model.named_buffers():  # moves the buffers of rotary embeddings, which FSDP does not shard
        module, _, last = name.rpartition(".")
        model.get_submodule(module)._buffers[last] = buffer.to(device)

    def step() -> Any:
        total = torch.zeros((), device=device)
        for tokens in batches[: now["micro_batches"]]:
            loss = model(input_ids=tokens, labels=tokens).loss / now["micro_batches"]
            loss.backward()
            total += loss.detach()
        update(now)
        return total

    facts = {"numel": sum(parameter.numel() for parameter in model.parameters())}
    return Rows(step, lambda: _synchronize(device), facts=facts, begin=now.update)


def _step_of(job: Job) -> StepFacts:
    """Return the largest step of the rows."""
    count = max(row["micro_batches"] for row in job.options["rows"])
    together = count if job.options["config"].get("vertical") else 1
    return StepFacts(BatchShape(job.workload.batch, job.workload.tokens, together, count // together))


def _infinity(job: Job, device: torch.device) -> Rows:
    work, batches = job.workload, _batches(job, device)
    with device:
        model = work.build_model()
    numel = sum(parameter.numel() for parameter in model.parameters())
    model = infinity.offload(model, job.options["config"], device=device, tokens=_step_of(job))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = infinity.AdamW(trained, lr=work.lr, betas=work.betas, eps=work.eps, weight_decay=work.weight_decay)
    speculation = registry.coordinator_of(model).speculation_choice
    planned, now = speculation.mode, dict[str, Any]()

    def begin(row: dict[str, Any]) -> None:
        now.update(row)
        optim.max_grad_norm = row["max_grad_norm"]
        speculation.mode = row.get("overlap") or planned

    phases: list[tuple[float, str]] = []

    def enter(phase: str) -> None:
        phases.append((time.perf_counter(), phase))

    def step() -> Any:
        count = now["micro_batches"]
        enter("forward")

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss / count
            return loss

        if count == 1:
            loss = loss_of(batches[0])
            enter("backward")
            loss.backward()
            losses = [loss.detach()]
        else:
            losses = infinity.backward(model, loss_of, batches[:count])
        optim.step()
        optim.zero_grad()
        return torch.stack(losses).sum()

    def settle() -> None:
        infinity.synchronize(model)
        _synchronize(device)

    counted = infinity.statistics(model)
    return Rows(
        step,
        settle,
        facts={"numel": numel, "plan": counted.plan.describe(), "arena_bytes": counted.arena_bytes},
        counters=lambda: _counters(infinity.statistics(model)),
        close=lambda: infinity.close(model),
        begin=begin,
        pipeline=registry.coordinator_of(model).resources.pipeline,
        phases=phases,
    )


def _counters(statistics: infinity.Statistics) -> dict[str, float]:
    stalled = {f"waits_{cause}_s": seconds for cause, seconds in statistics.stall_s.items()}
    return stalled | {
        "adam_s": statistics.adam_s,
        "idle_s": statistics.device_idle_s,
        "updates_speculative": statistics.updates.early,
        "updates_undone": statistics.updates.undone,
    }


def _of_tiles(events: Any, steps: int, phases: list[tuple[float, str]]) -> dict[str, Any]:
    """Return the rate of the update while it computed, in total and by phase, and its idle seconds between its
    tiles."""
    if not len(events):
        return {}
    times, names = zip(*phases, strict=True)
    begin, end = events["begin_ns"].astype(float) / 1e9, events["end_ns"].astype(float) / 1e9
    numels, seconds = Counter[str](), Counter[str]()
    for began, ended, numel in zip(begin, end, events["numel"], strict=True):
        phase = names[max(bisect.bisect(times, began) - 1, 0)]
        numels[phase] += int(numel)
        seconds[phase] += ended - began
    gaps = sorted((float(after - before) for before, after in zip(end[:-1], begin[1:], strict=True)), reverse=True)
    return {
        "gparam_per_s": round(float(events["numel"].sum()) / float((end - begin).sum()) / 1e9, 2),
        "by_phase": {name: round(numels[name] / seconds[name] / 1e9, 2) for name in seconds},
        "phase_s": {name: round(each / steps, 3) for name, each in seconds.items()},
        "tiles": len(events) / steps,
        "gaps_s": round(sum(gaps) / steps, 3),
        "longest_s": [round(gap, 3) for gap in gaps[: 3 * steps]],
    }


def _thread_seconds() -> tuple[Counter[str], Counter[str]]:
    """Return the CPU seconds, and the seconds spent waiting for a core, of each kind of thread, by thread name.

    Threads of the same name are summed. Source: schedstat of the process's tasks; the numbers are zero if the kernel
    does not count.
    """
    used, waited = Counter[str](), Counter[str]()
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            ran_ns, waited_ns, _ = (int(word) for word in (task / "schedstat").read_text().split())
        except OSError:  # the thread has ended
            continue
        kind = "main" if int(task.name) == os.getpid() else name
        used[kind] += ran_ns / 1e9
        waited[kind] += waited_ns / 1e9
    return used, waited


def _stolen_seconds() -> float:
    """Return the seconds in which the host ran something else on this machine's cores, summed over the cores."""
    with Path("/proc/stat").open() as file:
        return int(file.readline().split()[8]) / _TICKS_PER_S


def _busiest(contender: Contender) -> list[tuple[str, int, float, float]]:
    """Return the functions in which the main thread spends most of a step: name, calls, seconds in the function itself,
    and seconds with the functions that it calls."""
    profile = cProfile.Profile()
    profile.runcall(contender.step)
    contender.settle()
    rows = sorted(profile.getstats(), key=lambda row: -row.inlinetime)
    names = [row.code if isinstance(row.code, str) else f"{row.code.co_filename}: {row.code.co_name}" for row in rows]
    return [
        (name[-70:], row.callcount, round(row.inlinetime, 4), round(row.totaltime, 4))
        for name, row in zip(names[:_BUSIEST], rows, strict=False)
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turn(contender: Contender) -> dict[str, Any]:
    """Measure the next row: warm-up steps, then measured steps.

    The measured time includes the wait for all pending work.
    """
    assert isinstance(contender, Rows)
    assert contender.job is not None
    options, row = contender.job.options, next(contender.rows)
    contender.begin(row)
    for _ in range(row.get("warmups", options["warmups"])):
        contender.step()
    contender.settle()
    if options["device"] == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pipeline = contender.pipeline
    if pipeline is not None:
        pipeline.trace(True)
        take(pipeline)
    before, steps, each = contender.counters(), row.get("steps", options["steps"]), []
    (used, waited), stolen = _thread_seconds(), _stolen_seconds()
    began = last = time.perf_counter()
    for _ in range(steps):
        loss = contender.step()
        each.append(time.perf_counter() - last)
        last = time.perf_counter()
    contender.settle()
    seconds = (time.perf_counter() - began) / steps
    counters = {name: round((value - before[name]) / steps, 4) for name, value in contender.counters().items()}
    found: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "host_s": [round(value, 3) for value in each],
        "loss": round(float(loss), 4),
    }
    now_used, now_waited = _thread_seconds()
    found["thread_s"] = {name: round(each / steps, 3) for name, each in (now_used - used).most_common(8)}
    found["thread_waits_s"] = {name: round(each / steps, 3) for name, each in (now_waited - waited).most_common(4)}
    found["stolen_s"] = round((_stolen_seconds() - stolen) / steps, 3)
    if pipeline is not None:
        found["adam"] = _of_tiles(take(pipeline).events, steps, contender.phases)
        pipeline.trace(False)
    if row.get("profiled"):
        found["busiest"] = _busiest(contender)
    if options["device"] == "cuda":
        found["device_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    return found | {name: value for name, value in counters.items() if value}


if __name__ == "__main__":
    serve(setup, turn)
