"""Rate of the update alone, and at the same time as other work that a training step does on the machine.

The other work consists of threads that keep a core busy, like the threads that feed the device, and of copies between
host and device. The rates show which kind of work takes cores or memory bandwidth from the update.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from infinity import _native
from infinity.base.accelerator import TorchAccelerator
from infinity.plan.adam_rate import AdamBuffers, StateFormat, measure

_ROUNDS = 15
_FORMS = {
    "split16, fp32 moments": StateFormat("bf16", "split16", "fp32", "bf16"),
    "split16, int8 moments": StateFormat("bf16", "split16", "int8", "bf16"),
}
_BUSY = "print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy with processes of the usual priority."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            if process.stdout is None:
                raise AssertionError("a process without a pipe")
            stack.enter_context(process.stdout)
            process.stdout.readline()
        yield


@contextlib.contextmanager
def repeated(call: Callable[[], Any]) -> Iterator[None]:
    """Repeat a call in another thread."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            call()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def rates(numel: int, cores: int, copy: Callable[[], Any] | None) -> dict[str, dict[str, Any]]:
    """Return the rates by form of the states and by situation.

    Args:
        numel: parameters of the update.
        cores: number of threads of the update, unless the situation has its own number.
        copy: function that copies in both directions for a moment; None without a device.

    Returns:
        For each situation, Gparam/s of the update and GB/s of a pass over memory with almost no arithmetic; and the
        Gelem/s of the pass over gradients that have landed.
    """
    memory, isa, nice = AdamBuffers(numel), _native.select_isa(), TorchAccelerator.nice
    usual, level = _native.ThreadPool(cores, nice=nice), _native.ThreadPool(cores)
    fewer = _native.ThreadPool(max(cores - 2, 1), nice=nice)
    situations: dict[str, tuple[_native.ThreadPool, Callable[[], AbstractContextManager[None]]]] = {
        "alone": (usual, contextlib.nullcontext),
        "alone, same priority": (level, contextlib.nullcontext),
        "alone, two threads fewer": (fewer, contextlib.nullcontext),
        "1 core busy": (usual, lambda: busy(1)),
        "2 cores busy": (usual, lambda: busy(2)),
        "2 cores busy, same priority": (level, lambda: busy(2)),
        "2 cores busy, two threads fewer": (fewer, lambda: busy(2)),
        "4 cores busy": (usual, lambda: busy(4)),
    }
    if copy is not None:
        situations["copies both ways"] = (usual, lambda: repeated(copy))
    found: dict[str, dict[str, Any]] = {}
    for name, form in _FORMS.items():
        found[name] = {}
        for situation, (pool, beside) in situations.items():
            with beside():
                each = measure(memory, form, isa, pool, _ROUNDS)
            found[name][situation] = [round(each.parameters_per_s / 1e9, 2), round(each.bound / 1e9, 1)]
        found[name]["sums of squares"] = _sums(memory, usual, isa)
    return found


def _sums(memory: AdamBuffers, pool: _native.ThreadPool, isa: str) -> float:
    """Return the rate, in Gelem/s, of the pass over gradients that have landed."""
    took = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        _native.sums_of_squares(memory.view("g", memory.numel * 2), "bf16", pool=pool, isa=isa)
        took.append(time.perf_counter() - began)
    return round(memory.numel / statistics.median(took) / 1e9, 2)
