"""infinity's ModelResources, opened with the simulated engine, pool, pipeline and device.

Homes, arena, slab, queues and the window of gradients are objects of infinity's classes. The arena is a range of
addresses that nothing ever touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from infinity import _native
from infinity.config import NvmeConfig
from infinity.io.store import SwapStore
from infinity.plan.plan import Plan
from infinity.ranks.world import SingleProcessWorld
from infinity.tiers import resources
from infinity.tiers.resources import ModelResources
from infinity.tiers.weights_memory import RankResources
from simulation.disk import Disk
from simulation.gpu import Gpu
from simulation.native import Pool

FILE = "the swap file"


class Store(SwapStore):
    """A store without files."""

    file = FILE  # type: ignore[assignment]

    def __init__(self, paths: Sequence[Path], nbytes: int, engine: Any, **_: object) -> None:
        self.engine = engine
        self._step = 0

    numa_node = -1

    def is_scratch(self, path: str, offset: int) -> bool:
        return False


def open_resources(plan: Plan, disk: Disk, pool: Pool, pipeline: object, gpu: Gpu | None) -> ModelResources:
    opened = {
        "open_accelerator": lambda device: gpu,
        "open_engine": lambda config, faults: disk,
        "SwapStore": Store,
    }
    with ExitStack() as patches:
        for name, value in opened.items():
            patches.enter_context(mock.patch.object(resources, name, value))
        patches.enter_context(mock.patch.object(_native, "ThreadPool", return_value=pool))
        patches.enter_context(mock.patch.object(_native, "UpdatePipeline", return_value=pipeline))
        return ModelResources(
            plan, NvmeConfig(), torch.device("cpu") if gpu is None else gpu.device, RankResources(SingleProcessWorld())
        )
