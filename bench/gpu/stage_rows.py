"""Stage 8: steps of Llama shapes that people fine-tune, with all states in RAM, and their share of the bound.

For comparison, torch in device memory and FSDP2 with its shards in host memory are measured, too.

The bound of a step is the longer of two times, the time of computing and the time of the update. The time of computing
assumes the rate that torch reaches in device memory (row "3.2 B, torch"); with recomputation a forward counts twice.
The time of the update assumes the rate that all cores reach while nothing else runs (stage 5). A step that clips its
gradients cannot update during its backward. The bound of such a step is either the time of computing, or the time of
the update plus three quarters of the time of computing (recomputation and backward), whichever is longer.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.process import Worker, WorkerError
from peers.workload import Job, Workload

from gpu.record import Options, Record, run
from gpu.steps import LLAMA, model_flops

B3 = replace(LLAMA, layers=28, hidden=3072, heads=24)
B8 = replace(B3, layers=32, hidden=4096, intermediate=14336, heads=32, tied=False)
_RAM = {"vertical": True, "weights": "host", "optimizer": "host", "activations": "recompute", "commit_every": 0}
_AUTO = {"vertical": True, "activations": "recompute", "commit_every": 0}  # some units stay on the device
_ONE = {"weights": "host", "optimizer": "host", "recompute": "blocks", "commit_every": 0}
_NF4 = {"weights": "host", "frozen": "nf4", "activations": "recompute", "commit_every": 0}
_LEAST_S = 25.0
"""Seconds that a model needs before its first row is measured."""


@dataclass(frozen=True)
class Model:
    """A model whose rows are measured in one process.

    Attributes:
        adam: stage 5's name for the format of the model's update; '': almost nothing is updated.
        work: workload with the shape of this model.
        share: arithmetic of a step, as a share of the arithmetic of full training.
    """

    name: str
    contender: str
    work: Workload
    rows: tuple[dict[str, Any], ...]
    config: dict[str, Any] | None = None
    adam: str = ""
    share: float = 1.0


def row(name: str, micro_batches: int = 1, *, clipped: bool = True, **more: Any) -> dict[str, Any]:
    """Return a row. Args: clipped: whether every step is clipped, by a maximum norm that all gradients exceed."""
    return {"name": name, "micro_batches": micro_batches, "max_grad_norm": 1e-6 if clipped else None} | more


MODELS = (
    Model("3.2 B, torch", "torch", B3, (row("8,192 tokens, clipped"),)),
    Model(
        "3.2 B",
        "infinity",
        B3,
        (
            row("8,192 tokens, unclipped", clipped=False, warmups=10),
            row("8,192 tokens, unclipped, during backward", clipped=False, overlap="during_backward"),
            row("8,192 tokens, unclipped, before forward", clipped=False, overlap="before_forward"),
            row("8,192 tokens, clipped", warmups=4),
            row("32,768 tokens, clipped", 4),
            row("32,768 tokens, unclipped", 4, clipped=False, overlap="during_backward"),
        ),
        _RAM,
        "split16",
    ),
    Model("3.2 B, FSDP2", "fsdp2", B3, (row("8,192 tokens, clipped", warmups=1, steps=2),)),
    Model(
        "8.0 B, int8",
        "infinity",
        B8,
        (
            row("8,192 tokens, unclipped", clipped=False, warmups=8),
            row("8,192 tokens, unclipped, during backward", clipped=False, overlap="during_backward"),
            row("8,192 tokens, unclipped, before forward", clipped=False, overlap="before_forward"),
            row("8,192 tokens, clipped", warmups=4),
            row("32,768 tokens, clipped", 4, steps=2),
            row("32,768 tokens, unclipped", 4, clipped=False, overlap="during_backward", steps=2),
        ),
        _RAM | {"moments": "int8"},
        "int8",
    ),
    Model(
        "8.0 B, some units on the device",
        "infinity",
        B8,
        (
            row("8,192 tokens, unclipped", clipped=False, warmups=8),
            row("8,192 tokens, clipped", warmups=4),
            row("32,768 tokens, clipped", 4, steps=2),
        ),
        _AUTO,
        "split16",
    ),
    Model(
        "3.2 B, some units on the device",
        "infinity",
        B3,
        (
            row("8,192 tokens, unclipped", clipped=False, warmups=8),
            row("8,192 tokens, clipped", warmups=4, profiled=True),
        ),
        _AUTO,
        "split16",
    ),
    *(
        Model(
            f"3.2 B, activations: {where}",
            "infinity",
            replace(B3, batch=1, tokens=32768),
            (row("one sequence of 32,768 tokens, clipped", steps=2),),
            _ONE | {"activations": where},
            "split16",
        )
        for where in ("keep", "host")
    ),
    Model("8.0 B, LoRA in device memory", "torch", replace(B8, lora=16), (row("8,192 tokens, clipped"),), share=0.75),
    Model("8.0 B, LoRA on NF4", "infinity", replace(B8, lora=16), (row("8,192 tokens, clipped"),), _NF4, share=0.75),
)


def stage(record: Record, options: Options) -> None:
    """Run the stage.

    Settings: `device`; `models`, names of the models to run; `rows`, names of their rows; `shape`, fields of every
    Workload; `tflops`, the rate that torch reaches, for runs that do not measure its row.
    """
    options.work.mkdir(parents=True, exist_ok=True)
    chosen, shape = options.settings.get("models"), options.settings.get("shape", {})
    rates = _adam_rates(options)
    record.note("adam_gparam_per_s", rates)
    flops_per_s: float | None = options.settings.get("tflops", 0.0) * 1e12 or None
    for model in MODELS:
        if chosen is not None and model.name not in chosen:
            continue
        wanted = options.settings.get("rows", [each["name"] for each in model.rows])
        rows = tuple(each for each in model.rows if each["name"] in wanted)
        model = replace(model, work=replace(model.work, **shape), rows=rows)
        if record.left_s < _LEAST_S:
            record.skip(model.name, f"{record.left_s:.0f} s of the stage are left")
            continue
        measured = _measure(model, options, record.left_s - 3)
        for each in ({"name": "ready"}, *model.rows):
            found = record.measure(f"{model.name}, {each['name']}", "noted", functools.partial(next, measured))
            if found is None:
                break
            if each["name"] == "ready":
                numel = found["numel"]
                continue
            flops = _flops(model, each, numel)
            if model.contender == "torch":
                flops_per_s = flops / found["seconds"]
            said = {"tokens_per_s": round(_tokens(model, each) / found["seconds"])}
            said["tflops"] = round(flops / found["seconds"] / 1e12, 1)
            if flops_per_s:
                bound = _bound(model, each, numel, flops / flops_per_s, rates)
                said |= {"bound_s": round(bound, 3), "of_bound": round(bound / found["seconds"], 3)}
            record.note(f"{model.name}, {each['name']}: rates", said)
        measured.close()


def _adam_rates(options: Options) -> dict[str, float]:
    """Return the rates in Gparam/s that stage 5 measured, by the format's name in Model.adam."""
    rows = options.found.get("host", {}).get("adam", {}).get("rows", {})
    found = {name: each["gparam_per_s"] for name, each in rows.items()}
    kinds = {"split16": "split16, fp32 moments", "int8": "int8 moments"}
    return {kind: rate for kind, said in kinds.items() for name, rate in found.items() if said in name}


def _tokens(model: Model, each: dict[str, Any]) -> int:
    return model.work.batch * model.work.tokens * int(each["micro_batches"])


def _flops(model: Model, each: dict[str, Any], numel: int) -> float:
    """Return the floating-point operations of a step, including its recomputation."""
    again = 4 / 3 if model.work.recompute else 1.0
    return model_flops(replace(model.work, batch=model.work.batch * each["micro_batches"]), numel) * again * model.share


def _bound(model: Model, each: dict[str, Any], numel: int, compute_s: float, rates: dict[str, float]) -> float:
    update_s = numel / rates[model.adam] / 1e9 if model.adam in rates else 0.0
    if each["max_grad_norm"] is not None and model.contender == "infinity":
        return max(compute_s, 0.75 * compute_s + update_s)  # forward, recomputation and backward take 1 : 1 : 2
    return max(compute_s, update_s)


def _measure(model: Model, options: Options, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the worker's answer when the worker is ready, and after that its answer for each row."""
    ends = time.monotonic() + seconds
    job = Job(
        model.work,
        "",
        {
            "device": options.settings.get("device", "cuda"),
            "contender": model.contender,
            "config": model.config,
            "rows": model.rows,
            "warmups": options.settings.get("warmups", 2),
            "steps": options.settings.get("steps", 3),
        },
    )
    log = options.work / f"rows-{model.name.replace(' ', '-').replace(',', '')}.log"
    worker = Worker(model.name, Path(sys.executable), "gpu.row_worker", job, log, timeout_s=seconds, own_session=False)
    began = time.monotonic()
    try:
        worker.start()
        worker.wait_ready()
        yield {"seconds": round(time.monotonic() - began, 1)} | worker.facts
        for _ in model.rows:
            worker.timeout_s = max(ends - time.monotonic(), 1.0)
            yield worker.step()
    except WorkerError as error:
        worker.stop_s = 2.0  # the worker hangs or has died
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise RuntimeError(f"{error}\n{error.cause[-3000:]}") from error
    finally:
        worker.stop()


if __name__ == "__main__":
    run(stage)
