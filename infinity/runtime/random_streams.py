"""Random streams of micro-batches: each micro-batch draws the same numbers in any order of computation. A stream has
the states of four generators: torch on the CPU, torch on the device, numpy, and Python."""

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
    """Random streams of several micro-batches (see the module's docstring).

    The seed of each stream is one number that is drawn from torch's CPU generator. After the micro-batches, torch's CPU
    generator is in the state that it had after the seeds were drawn. The other generators continue as if no micro-batch
    had drawn from them.

    Args:
        device: the device that the model computes on.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        seeds = torch.randint(_SEEDS, (count,), device="cpu").tolist()
        self._generators = [_default_generator(kind) for kind in dict.fromkeys((torch.device("cpu"), device))]
        self._states = [self._begin(seed) for seed in seeds]

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """In this context, draw from the streams of a micro-batch, in all threads."""
        outside = self._now()
        self._set(self._states[index])
        try:
            yield
        finally:
            self._states[index] = self._now()
            self._set(outside)

    @contextmanager
    def unchanged(self, index: int) -> Iterator[None]:
        """In this context, draw from the streams of a micro-batch. At the end, reset the streams to their states at the
        beginning."""
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
