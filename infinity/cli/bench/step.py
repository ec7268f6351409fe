"""`infinity-bench step`: what one training step of a model costs these disks, before anything is trained."""

from __future__ import annotations

import argparse
import logging
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from infinity.access.replay import ReplayedStep, replay_step
from infinity.checkpoint.load import load_config_of, require_directory_or_id
from infinity.cli.endurance import endurance_of
from infinity.cli.planning.model import on_meta
from infinity.config import SwapConfig, load_config
from infinity.coordinator import registry
from infinity.errors import BenchError
from infinity.files import nearest
from infinity.io.directory import require_place
from infinity.io.disks import disk_under
from infinity.plan.plan import Plan
from infinity.runtime.offload import close, offload
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 2
"""The first writes the states for the first time and learns nothing; the second finds the order of a steady state."""
_FLOPS_PER_PARAMETER = {"keep": 6, "recompute": 8}
"""Per token: 2 forward, 4 backward, and 2 where the forward is done twice."""


@dataclass(frozen=True)
class StepReport:
    """A replayed step and what follows from it.

    Attributes:
        step_s, io_s: medians over the steps: from the first fetch to the last write, and of it with transfers in
            flight.
        tokens_bound: tokens per step from which on a GPU of `tflops` computes for longer than the disks move.
        written_tb: by 1,000 steps, 10^12 bytes.
        rated_tb: what the drives are rated for; None where not known.
        parameters: trained ones.
    """

    steps: int
    step_s: float
    io_s: float
    read_bytes: int
    written_bytes: int
    tflops: float
    tokens_bound: int
    written_tb: float
    rated_tb: float | None
    parameters: int

    def text(self) -> str:
        moved = self.read_bytes + self.written_bytes
        endurance = "not known; give --rated-tb (the drive's TBW)"
        if self.rated_tb is not None:
            endurance = f"{self.written_tb / self.rated_tb:.2%} of {self.rated_tb:.0f} TB rated"
        rows = [
            ("one step of I/O", f"{self.step_s:.3f} s (median of {self.steps}), transfers in flight {self.io_s:.3f} s"),
            ("read, written", f"{format_bytes(self.read_bytes)}, {format_bytes(self.written_bytes)}"),
            ("moved per parameter", f"{moved / max(self.parameters, 1):.1f} B"),
            ("rate", f"{moved / self.step_s / 1e9:.2f} GB/s"),
            (
                "the GPU is the bound",
                f"from {self.tokens_bound:,} tokens per step on, at {self.tflops:g} TFLOP/s reached",
            ),
            ("1,000 steps write", f"{self.written_tb:.2f} TB; {endurance}"),
        ]
        return "\n".join(f"{name:<22}{value}" for name, value in rows)

    def to_json(self) -> dict[str, Any]:
        return {"schema": "infinity-bench-step", "version": 1, **asdict(self)}


def run_step(options: argparse.Namespace, console: Console) -> StepReport:
    """Place the model's states as the config says, replay its steps, and report.

    Raises:
        BenchError: nothing of the model would be on NVMe.
        others: as infinity.offload.
    """
    config = load_config(options.config)
    model = _model_on_meta(options.model, options.dtype)
    device = "cpu" if options.cpu else None
    with _scratch(config) as scratch:
        return _replay(model, scratch, options, console, device)


@contextmanager
def _scratch(config: SwapConfig) -> Iterator[SwapConfig]:
    """The config with directories of its own on the same disks: those it names may hold a run's generations."""
    missing = [path for path in (each.expanduser() for each in config.nvme.paths) if not path.exists()]
    paths = [path.expanduser() / f".infinity-bench-{os.getpid()}" for path in config.nvme.paths]
    for path in missing:
        require_place(path)
        path.mkdir(mode=0o700, exist_ok=True)
    try:
        yield config.model_copy(update={"nvme": config.nvme.model_copy(update={"paths": paths})})
    finally:
        for path in missing:
            with suppress(OSError):  # not empty, or never made
                path.rmdir()


def _replay(
    model: Any, config: SwapConfig, options: argparse.Namespace, console: Console, device: str | None
) -> StepReport:
    offload(model, config, source=_constant_values(model), device=device, optimizer=options.optimizer)
    try:
        coordinator = registry.coordinator_of(model)
        plan = coordinator.resources.plan
        tiers = (plan.placement.weights.tier, plan.placement.optimizer.tier, plan.placement.gradients.tier)
        if plan.layout.swap.nbytes == 0 or (config.commit_every == "auto" and "nvme" not in tiers):
            raise BenchError(
                f"{options.config}: nothing is on NVMe (weights {plan.placement.weights.tier}, "
                f"optimizer {plan.placement.optimizer.tier})"
            )
        console.print(plan.describe(), markup=False, highlight=False)
        steps = []
        for number in range(_WARM_UP_STEPS + options.steps):
            step = replay_step(coordinator, 1 if config.vertical else options.micro_batches)
            steps.append(step)
            if number >= _WARM_UP_STEPS:
                console.print(f"step {number + 1 - _WARM_UP_STEPS} of {options.steps}: {step.seconds:.3f} s")
        return _report(steps[_WARM_UP_STEPS:], plan, options, config.nvme.paths)
    finally:
        close(model, discard=True)


def _report(steps: list[ReplayedStep], plan: Plan, options: argparse.Namespace, paths: list[Path]) -> StepReport:
    seconds = statistics.median(step.seconds for step in steps)
    flops_per_token = _FLOPS_PER_PARAMETER[plan.placement.activations] * plan.layout.numel
    written = steps[-1].written_bytes
    return StepReport(
        steps=len(steps),
        step_s=seconds,
        io_s=statistics.median(step.io_s for step in steps),
        read_bytes=steps[-1].read_bytes,
        written_bytes=written,
        tflops=options.tflops,
        tokens_bound=-int(-seconds * options.tflops * 1e12 // flops_per_token),
        written_tb=written * 1000 / 1e12,
        rated_tb=_rated_tb(paths) if options.rated_tb is None else options.rated_tb,
        parameters=plan.layout.trainable_numel,
    )


def _rated_tb(paths: list[Path]) -> float | None:
    """What all the drives are rated for, as far as their own counters tell."""
    rated: list[int] = []
    for path in paths:
        members = disk_under(nearest(path)).members
        endurance = endurance_of(members[0].name) if members else None
        if endurance is None or endurance.rated_bytes is None:
            return None
        rated.append(endurance.rated_bytes)
    return sum(rated) / 1e12


def _model_on_meta(name: str, dtype: str) -> Any:
    """The model of a checkpoint's directory, a config.json or a hub id, without its weights. Raises ModelError."""
    path = Path(name).expanduser()
    where = str(path.parent if path.name == "config.json" and path.is_file() else path if path.exists() else name)
    require_directory_or_id(where)
    return _real_buffers(on_meta(f"--model {name}", load_config_of(where), getattr(torch, dtype)))


def _real_buffers(model: torch.nn.Module) -> torch.nn.Module:
    """Nothing is computed with them: zeros will do."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return model


def _constant_values(model: torch.nn.Module) -> Callable[[str], torch.Tensor]:
    """A source that gives every parameter some value, one at a time."""
    shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}

    def value(name: str) -> torch.Tensor:
        shape, dtype = shapes[name]
        return torch.full(shape, 0.5, dtype=dtype, device="cpu")

    return value
