"""Training tasks: Llama-like shapes as units, and the work and the device memory of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peers.workload import Workload
from transformers import LlamaForCausalLM

from infinity import _native
from infinity.state.discover import HookedModule, discover
from infinity.state.machine_rates import MachineRates
from infinity.state.model_shape import ModelShape, shape_of
from infinity.state.training_step import BatchShape, StepFacts, TrainingStep
from infinity.state.unit import Unit

SEQUENCE = 2048
SHAPES = {
    "8B": Workload(
        layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, vocabulary=128256,
        batch=4, tokens=SEQUENCE, recompute=True,
    ),
    "32B": Workload(
        layers=64, hidden=5120, intermediate=25600, heads=40, kv_heads=8, vocabulary=151936,
        batch=4, tokens=SEQUENCE, recompute=True,
    ),
    "70B": Workload(
        layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8, vocabulary=128256,
        batch=4, tokens=SEQUENCE, recompute=True,
    ),
}  # fmt: skip
"""Shapes of Llama-3-8B, Qwen3-32B and Llama-3-70B, from their published configurations."""


@dataclass(frozen=True)
class Task:
    """A workload split into units.

    Attributes:
        forward: FLOPs of each unit's forward, by index.
        backward: FLOPs of each unit's backward, including recomputation.
        shape: the sizes of the model, for the planner.
    """

    work: Workload
    units: tuple[Unit, ...]
    sites: tuple[HookedModule, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    shape: ModelShape

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def activation_bytes(self) -> int:
        """Bytes of device memory in addition to slots."""
        return self.step(None).work(recompute=self.work.recompute, vertical=False).peak_bytes

    def step(self, rates: MachineRates | None, *, clips: bool = False) -> TrainingStep:
        """Return what the planner knows about a step."""
        return TrainingStep(self.shape, StepFacts(BatchShape(self.work.batch, self.work.tokens), rates, clips))

    @property
    def flops(self) -> float:
        return sum(self.forward) + sum(self.backward)


def task_of(work: Workload, moments: _native.MomentsName) -> Task:
    """Return the units into which infinity splits a model, which is on the meta device."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(work.config(), dtype=getattr(torch, work.dtype))
    found = discover(model, moments)
    shape = shape_of(model, work.batch, work.tokens)
    tokens = work.batch * work.tokens
    forward, backward = [], []
    for unit in found.units:
        block = ".layers." in unit.name
        looked_up = unit.stays or "embed" in unit.name
        # attention has two products, and half of each is masked
        attention = 2 * work.tokens * work.hidden * tokens if block else 0
        once = 0.0 if looked_up else 2.0 * unit.numel * tokens + attention
        forward.append(once)
        backward.append((3 if block and work.recompute else 2) * once)
    return Task(work, found.units, found.sites, tuple(forward), tuple(backward), shape)
