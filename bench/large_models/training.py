"""`infinity finetune` on a model larger than its memory: budgets from the limit, the run, and its result."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.report import machine_facts
from peers.workload import Workload

from large_models.cgroup import Usage, run_limited
from large_models.checkpoint import make_checkpoint, shape_of, tensor_bytes

INTERPRETER_BYTES = 500_000_000
"""Memory of Python with torch, transformers and the other imports of `infinity finetune`; a little more than was
measured."""
_USABLE = 0.9
"""Usable share of the limit.

The remainder is for the page cache and the kernel's own pages, without which everything is slow.
"""
_DEVICE_SHARE = 0.2
_BLOCKS_ON_DEVICE = 5
_LOGITS_BYTES = 14
"""Bytes of the logits in bf16 and fp32 and of their gradients, per token and word of the vocabulary."""
_LAYER_BYTES = 40
"""Bytes of the activations of the recomputed layer, per token and element of the hidden state."""
_DISK_BYTES = 20
"""Bytes of disk per parameter: checkpoint 2, weights and states 12, spilled gradients 2, output 2, and some room."""
_FROZEN_DISK_BYTES = 5
"""Bytes of disk per parameter if only adapters are trained: checkpoint 2, weights 2, and some room."""


@dataclass(frozen=True)
class Training:
    """Settings of a run.

    Attributes:
        parameters: smallest number of parameters; see `shape_of`.
        limit_bytes: memory limit of the control group.
        optimizer, gradients, overlap, frozen: options of the swap config; weights are on NVMe.
        lora: rank of the adapters that are trained; 0: no adapters, the model is trained.
        experts: experts of each layer; 0: a Llama.
        dtype: dtype of the weights, an option of `infinity finetune`.
        fp8: whether the checkpoint is in FP8.
    """

    parameters: float
    limit_bytes: int
    steps: int
    batch: int
    tokens: int
    optimizer: str
    gradients: str
    overlap: str
    lora: int = 0
    frozen: str = "auto"
    experts: int = 0
    dtype: str = "bf16"
    fp8: bool = False

    @property
    def workload(self) -> Workload:
        return shape_of(self.parameters, self.batch, self.tokens, self.experts)


class TrainingError(RuntimeError):
    """The run failed; the message says how, and ends with the last lines of the run's log."""


def budgets(work: Workload, limit_bytes: int) -> tuple[int, int]:
    """Return memory.device and memory.host for a run whose process has a memory limit of `limit_bytes`.

    The memory of the interpreter is subtracted from the limit first.

    On the CPU both halves are RAM. One half of memory.device is for the weights of a few blocks, the other half for
    activations.

    Raises:
        ValueError: the limit is too small; the message names the smallest limit.
    """
    usable = usable_bytes(limit_bytes)
    rows = work.batch * work.tokens
    activations = rows * (2 * work.layers * work.hidden + _LAYER_BYTES * work.hidden + _LOGITS_BYTES * work.vocabulary)
    block = 0 if work.experts else 2 * work.numel // work.layers  # a few experts are small
    device = max(int(usable * _DEVICE_SHARE), _BLOCKS_ON_DEVICE * block, 2 * activations)
    if device > usable // 2:
        least = int((2 * device + INTERPRETER_BYTES) / _USABLE)
        raise ValueError(f"a limit of {limit_bytes / 1e9:.2f} GB is too small for this model: {least / 1e9:.2f} GB")
    return device, usable - device


def usable_bytes(limit_bytes: int) -> int:
    """Return how many bytes of a limit the budgets may use."""
    return int(_USABLE * limit_bytes) - INTERPRETER_BYTES


def limit_in_proportion(limit_bytes: int, parameters: int, largest: int) -> int:
    """Return the limit that gives a model the same number of usable bytes per parameter as the largest model."""
    return int((usable_bytes(limit_bytes) * parameters / largest + INTERPRETER_BYTES) / _USABLE)


def swap_config(training: Training, swap: Path) -> dict[str, Any]:
    device, host = budgets(training.workload, training.limit_bytes)
    return {
        "weights": "nvme",
        "optimizer": training.optimizer,
        "gradients": training.gradients,
        "activations": "recompute",
        "overlap": training.overlap,
        "frozen": training.frozen,
        "memory": {"device": device, "host": host},
        "nvme": {"paths": [str(swap)]},
        "commit_every": 0,
    }


def train(training: Training, scratch: Path, *, keep: bool) -> dict[str, Any]:
    """Make the checkpoint, then load, train and save under the limit.

    Args:
        training: settings of the run.
        scratch: directory for the checkpoint, the swap files and the output; only files made by this call are removed.
        keep: whether the checkpoint is kept for another run.

    Raises:
        TrainingError: the command failed.
        NoLimitError: no limit can be set.
        OSError: the disk is full, or cannot be written.
    """
    work = training.workload
    scratch.mkdir(parents=True, exist_ok=True)
    with _checkpoint(training, scratch, keep=keep) as made, _removed(scratch / f"run-{os.getpid()}") as run:
        (run / "swap.json").write_text(json.dumps(swap_config(training, run / "swap")))
        began = time.monotonic()
        with (run / "log").open("w") as log:
            usage = run_limited(_command(training, made, run), training.limit_bytes, log)
        seconds = time.monotonic() - began
        text = (run / "log").read_text(errors="replace")
        if usage.exit_code or usage.oom_kills:
            raise TrainingError(_describe_failure(usage, text))
        return {
            "training": asdict(training),
            "workload": asdict(work),
            "memory": asdict(usage),
            "budgets": dict(zip(("device", "host"), budgets(work, training.limit_bytes), strict=True)),
            "wall_s": seconds,
            "plan": plan_lines(text),
            "steps": _steps(run / "output" / "loss.csv"),
            "report": json.loads((run / "output" / "report.json").read_text()),
            "saved_bytes": tensor_bytes(run / "output"),
            "input_bytes": tensor_bytes(made / "checkpoint"),
            "machine": machine_facts(run),
        }


def _command(training: Training, made: Path, run: Path) -> list[str]:
    options = {
        "model": made / "checkpoint",
        "data": made / "text",
        "config": run / "swap.json",
        "output": run / "output",
        "steps": training.steps,
        "sequence-length": training.tokens,
        "batch-size": training.batch,
        "lr": 1e-3 if training.lora else 1e-4,
        "schedule": "constant",
        "dtype": training.dtype,
        **({"lora": training.lora} if training.lora else {}),
    }
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    given += ["--lora-experts"] if training.lora and training.experts else []
    return [sys.executable, "-m", "infinity.cli.main", "finetune", "--verbose", *given]


@contextmanager
def _checkpoint(training: Training, scratch: Path, *, keep: bool) -> Iterator[Path]:
    """Provide the directory with the checkpoint and the text; a directory that an earlier run kept is reused."""
    work = training.workload
    form = f"{f'-{work.experts}-experts' if work.experts else ''}{'-fp8' if training.fp8 else ''}"
    directory = scratch / f"input-{work.numel / 1e6:.0f}M{form}"
    _require_disk(training, scratch)
    if not directory.exists():
        print(f"making a checkpoint of {work.numel / 1e9:.2f} B parameters", flush=True)
        make_checkpoint(work, directory, fp8=training.fp8)
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _removed(directory: Path) -> Iterator[Path]:
    """Create a directory, and remove it afterwards in any case."""
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _require_disk(training: Training, scratch: Path) -> None:
    work = training.workload
    needed = (_FROZEN_DISK_BYTES if training.lora else _DISK_BYTES) * work.numel
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise OSError(
            f"{scratch} has {free / 1e9:.1f} GB free; {work.numel / 1e9:.2f} B parameters need about "
            f"{needed / 1e9:.1f} GB. Give --scratch on another disk."
        )


def _describe_failure(usage: Usage, log: str) -> str:
    last = "\n".join(log.splitlines()[-5:])
    if usage.oom_kills:
        return f"the kernel ended the run for want of memory ({usage.limit_bytes / 1e9:.2f} GB):\n{last}"
    return f"`infinity finetune` ended with code {usage.exit_code}:\n{last}"


def plan_lines(log: str) -> list[str]:
    """Return the plan from the run's log: a line `plan:`, the model, and an indented line for each decision."""
    lines = iter(log.splitlines())
    for line in lines:
        if line == "plan:":
            break
    plan = [next(lines, "")]
    for line in lines:
        if not line.startswith("  "):
            break
        plan.append(line.strip())
    return plan


def _steps(path: Path) -> list[dict[str, float]]:
    """Return the loss, learning rate, norm and seconds of every step."""
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
