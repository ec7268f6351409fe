"""Log of the memory that torch's operations use, as far as a simulated device knows the memory.

A dispatch mode logs, before each operation of aten, the memory that the operation reads and writes. Memory in a slab,
such as slots and the ring, is used on the thread's stream; pinned memory is used by the host. A mode belongs to one
thread. torch passes it to the autograd engine's threads together with the graph; in a simulation, every thread that
starts, runs a module, calls backward or computes sums of squares also gets the mode.

Undeclared uses are detected. An undeclared write is detected by comparison with the simulation's copy of the slab
(SimAccelerator.require_told). An undeclared read in a slab that is shut ends the process (slab.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from infinity.units.resident_gradients import ResidentSums
from tests.sim.accelerator import SimAccelerator

_METADATA = {
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("set_", "resize_", "is_same_size", "_has_compatible_shallow_copy_type", "record_stream"),
    )
}
"""Operations that use a tensor's shape but not its values."""
_PERHAPS_COPIES = {f"aten::{name}" for name in ("reshape", "contiguous", "to", "flatten", "_reshape_copy")}
"""Operations that return an alias or a copy."""

Used = tuple[int, int, bool]
"""Address, number of bytes, and whether these bytes are written."""


class _Plan:
    """Arguments that an operation writes to.

    Attributes:
        touches: whether the operation accesses values; False: the operation only makes a view or reads shapes.
    """

    def __init__(self, operation: Any) -> None:
        schema = operation._schema
        self.writes = [
            argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
        ]
        self.names = {argument.name: index for index, argument in enumerate(schema.arguments)}
        aliases = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        views = aliases and not any(self.writes) and schema.name not in _PERHAPS_COPIES
        self.touches = not (views or schema.name in _METADATA or torch.Tag.inplace_view in operation.tags)


_plans: dict[Any, _Plan] = {}


class Watch(TorchDispatchMode):
    """Watch of one thread."""

    def __init__(self, sim: SimAccelerator) -> None:
        super().__init__()
        self.sim = sim

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's wrapper of the method below for torch.compile would cost as much as the method."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan = _plans.get(func)
        if plan is None:
            plan = _plans[func] = _Plan(func)
        if plan.touches:
            self.sim.kernel_runs()
        with torch._C.DisableTorchFunctionSubclass():  # torch's own dispatch has already happened
            used = list(self._used(plan, args, kwargs)) if plan.touches else []
            if not used:
                return func(*args, **kwargs)
            with self.sim.used(used, str(func)):
                return func(*args, **kwargs)

    def _used(self, plan: _Plan, args: Any, kwargs: Any) -> Iterator[Used]:
        for argument, write in zip(args, plan.writes, strict=False):
            yield from self._within(argument, write)
        for name, argument in kwargs.items():
            yield from self._within(argument, plan.writes[plan.names[name]])

    def _within(self, argument: Any, write: bool) -> Iterator[Used]:
        if isinstance(argument, torch.Tensor):
            where = extent_of(argument)
            if where is not None and self.sim.knows(where[0]):
                yield *where, write
        elif isinstance(argument, (list, tuple)):
            for each in argument:
                yield from self._within(each, write)


def extent_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the address and bytes from the first element to the last; None for a tensor without memory."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu" or not tensor.numel():
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # tensors of torch.compile and torch.func
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return address, (last + 1) * tensor.element_size()


@contextmanager
def watched(sim: SimAccelerator) -> Iterator[None]:
    """Log the operations of this thread within the context, unless the thread's operations are logged already."""
    modes = _get_current_dispatch_mode_stack()
    with ExitStack() as entered:
        if not any(isinstance(mode, Watch) and mode.sim is sim for mode in modes):
            entered.enter_context(Watch(sim))
        yield


def watch_every_thread(monkeypatch: pytest.MonkeyPatch, sim: SimAccelerator) -> None:
    """Watch every thread that starts from now on, and every module call and backward pass."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with watched(sim):
                return function(*args, **kwargs)

        return call

    start = threading.Thread.start

    def watched_start(thread: threading.Thread) -> None:
        monkeypatch.setattr(thread, "run", within(thread.run), raising=False)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", watched_start)
    monkeypatch.setattr(torch.autograd, "backward", within(torch.autograd.backward))
    monkeypatch.setattr(torch.autograd, "grad", within(torch.autograd.grad))
    monkeypatch.setattr(nn.Module, "__call__", within(nn.Module.__call__))
    # torch switches the modes off while it calls this through a gradient handle
    monkeypatch.setattr(ResidentSums, "compute", within(ResidentSums.compute))
