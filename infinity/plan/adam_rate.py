"""The rate of the optimizer's update in memory, compared with the maximum rate that the memory allows.

To measure the maximum rate, a pass with almost no arithmetic reads and writes the same streams in place. This pass runs
in the same rounds as the update, with the same instruction set and number of threads. The bytes in the results are the
bytes that the update must move.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infinity import _native
from infinity.state.dtypes import residual_itemsize

_ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
_BOUND_BYTES = 28
_STREAM_BYTES_MAX = 4  # bytes of one element


@dataclass(frozen=True)
class StateFormat:
    """A storage format of the optimizer states.

    Attributes:
        grad_size: magnitude of the gradients. The squares of gradients of magnitude 1e-22 are denormal numbers.
    """

    weight: _native.DTypeName
    master: _native.MasterName
    moments: _native.MomentsName
    grad: _native.DTypeName
    grad_size: float = 1e-2

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter that an update reads and writes back. Master and moments are on NVMe, weights in RAM."""
        moment = _native.moment_bytes(self.moments, _native.CHUNK_NUMEL) / _native.CHUNK_NUMEL
        return 2 * (residual_itemsize(self.master) + 2 * moment)

    @property
    def memory_bytes(self) -> float:
        """Bytes per parameter that an update transfers to and from memory.

        If the master is in fp32, the update writes the weight but does not read it.
        """
        weight = _ITEMSIZE[self.weight] * (1 if self.master == "fp32" else 2)
        return weight + self.state_bytes + _ITEMSIZE[self.grad]


@dataclass(frozen=True)
class AdamMeasurement:
    """Medians of the measurements over the rounds.

    Attributes:
        parameters_per_s: parameters per second of the update alone, in memory.
        bound: maximum rate of the memory in bytes per second.
        of_bound: the time in which the memory can move the same bytes, divided by the update's time. 1 means that the
            update is as fast as the memory allows.
    """

    parameters_per_s: float
    bound: float
    of_bound: float


class AdamBuffers:
    """Streams of `numel` elements.

    Each stream has its own arena with room for fp32. The stream "z" contains only zeros.
    """

    _STREAMS = ("w", "r", "m", "v", "g", "z")

    def __init__(self, numel: int) -> None:
        # If there are few elements, int8 moments are larger than fp32 moments, because int8 moments occupy complete
        # chunks.
        nbytes = max(numel * _STREAM_BYTES_MAX, _native.moment_bytes("int8", numel))
        self.numel = numel
        self._arenas = {name: _native.Arena(nbytes) for name in self._STREAMS}
        for arena in self._arenas.values():
            np.frombuffer(arena.view(0, arena.nbytes), np.uint8)[:] = 0

    def view(self, name: str, nbytes: int) -> memoryview:
        return self._arenas[name].view(0, nbytes)

    def fill_gradients(self, dtype: _native.DTypeName, size: float) -> None:
        """Fill the gradients with copies of one block of random numbers. Generating more random numbers takes long."""
        count = min(self.numel, 1 << 20)
        numbers = (np.random.default_rng(0).standard_normal(count) * size).astype(np.float32)
        kept = np.empty(count, np.float32 if dtype == "fp32" else np.uint16)
        _native.round_weights(numbers, kept, dtype)
        flat = np.frombuffer(self.view("g", self.numel * _ITEMSIZE[dtype]), kept.dtype)
        for at in range(0, self.numel, count):
            flat[at : at + count] = kept[: self.numel - at]


def measure(memory: AdamBuffers, form: StateFormat, isa: str, pool: _native.ThreadPool, rounds: int) -> AdamMeasurement:
    """Measure the update with a storage format. Each round also measures the maximum rate of the memory."""
    update = _updater(memory, form, isa, pool)
    limits, ours = [], []
    for _ in range(rounds):
        limits.append(_seconds(lambda: _bound(memory, isa, pool)) * form.memory_bytes / _BOUND_BYTES)
        ours.append(_seconds(update))
    return AdamMeasurement(
        parameters_per_s=memory.numel / statistics.median(ours),
        bound=memory.numel * form.memory_bytes / statistics.median(limits),
        of_bound=statistics.median(limit / mine for limit, mine in zip(limits, ours, strict=True)),
    )


def _bound(memory: AdamBuffers, isa: str, pool: _native.ThreadPool) -> None:
    # The pass adds zeros, so that the states do not change.
    a, b, c, d = (memory.view(name, memory.numel * 4) for name in ("w", "m", "v", "z"))
    _native.read_modify_write(a, b, c, d, pool, isa)


def _updater(memory: AdamBuffers, form: StateFormat, isa: str, pool: _native.ThreadPool) -> Callable[[], None]:
    """Return a function that does one update.

    The function has already been called once, so that the moments are stored in the format.
    """
    numel = memory.numel
    memory.fill_gradients(form.grad, form.grad_size)
    moment = _native.moment_bytes(form.moments, numel)
    rest = numel * residual_itemsize(form.master)

    def update(step: int = 2) -> None:
        finite = _native.optimizer_update(
            memory.view("w", numel * _ITEMSIZE[form.weight]),
            memory.view("r", rest) if rest else None,
            memory.view("m", moment),
            memory.view("v", moment),
            memory.view("g", numel * _ITEMSIZE[form.grad]),
            weight_dtype=form.weight,
            master=form.master,
            moments=form.moments,
            grad_dtype=form.grad,
            segments=[_native.Segment(0, numel, lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, step=step, grad_scale=0.5)],
            pool=pool,
            isa=isa,
        )
        if not finite:
            raise AssertionError(f"{form}: the states are no longer finite; the measurement is not valid")

    # Zeros are a valid state in every format.
    for name in ("w", "r", "m", "v"):
        np.frombuffer(memory.view(name, numel * _STREAM_BYTES_MAX), np.uint8)[:] = 0
    update(step=1)
    return update


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
