"""Random numbers of micro-batches: each has a stream of its own, so that it draws the same ones in whatever order the
micro-batches are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SEEDS = 2**63 - 1


class RandomStreams:
    """One stream of torch's random numbers for each micro-batch, on the CPU and on the device.

    torch's generator of the CPU is drawn from once for each, and goes on behind that.

    Args:
        device: that the model computes on.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        seeds = torch.randint(_SEEDS, (count,), device="cpu").tolist()
        self._generators = [_default_generator(kind) for kind in dict.fromkeys((torch.device("cpu"), device))]
        self._states = [
            [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self._generators]
            for seed in seeds
        ]

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """In this context torch draws from the stream of a micro-batch. All threads do."""
        outside = [generator.get_state() for generator in self._generators]
        self._set(self._states[index])
        try:
            yield
        finally:
            self._states[index] = [generator.get_state() for generator in self._generators]
            self._set(outside)

    @contextmanager
    def unchanged(self, index: int) -> Iterator[None]:
        """As `of`; what is drawn in this context is drawn from the stream once more afterwards."""
        before = self._states[index]
        with self.of(index):
            yield
        self._states[index] = before

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _default_generator(device: torch.device) -> Any:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    return module.default_generators[device.index]
