"""Random numbers of micro-batches: each has streams of its own, so that it draws the same ones in whatever order the
micro-batches are computed: from torch on the CPU and on the device, from numpy, and from Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_SEEDS = 2**63 - 1
_States = tuple[list[torch.Tensor], Any, Any]


class RandomStreams:
    """See the top of the file. torch's generator of the CPU is drawn from once for each micro-batch, and goes on behind
    that; the others go on as if no micro-batch had drawn.

    Args:
        device: that the model computes on.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        seeds = torch.randint(_SEEDS, (count,), device="cpu").tolist()
        self._generators = [_default_generator(kind) for kind in dict.fromkeys((torch.device("cpu"), device))]
        self._states = [self._begin(seed) for seed in seeds]

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """In this context torch draws from the stream of a micro-batch. All threads do."""
        outside = self._now()
        self._set(self._states[index])
        try:
            yield
        finally:
            self._states[index] = self._now()
            self._set(outside)

    @contextmanager
    def unchanged(self, index: int) -> Iterator[None]:
        """As `of`; what is drawn in this context is drawn from the stream once more afterwards."""
        before = self._states[index]
        with self.of(index):
            yield
        self._states[index] = before

    def _begin(self, seed: int) -> _States:
        of_torch = [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self._generators]
        return of_torch, np.random.RandomState(seed % 2**32).get_state(legacy=False), random.Random(seed).getstate()

    def _now(self) -> _States:
        of_torch = [generator.get_state() for generator in self._generators]
        return of_torch, np.random.get_state(legacy=False), random.getstate()

    def _set(self, states: _States) -> None:
        of_torch, of_numpy, of_python = states
        for generator, state in zip(self._generators, of_torch, strict=True):
            generator.set_state(state)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _default_generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    return module.default_generators[device.index]
