"""The simulated device as native threads see it: functions with cudart's signatures, which use the same queues."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from infinity.base.accelerator import DeviceFunctionTable
from tests.sim.clocks import Actor

if TYPE_CHECKING:
    from tests.sim.accelerator import SimAccelerator
    from tests.sim.queues import SimEvent, SimStream

PARK_S = 0.002
"""Seconds for which a native thread lets other threads run before the native thread itself runs the operations for
which it waits.
"""
_OUT_OF_MEMORY, _INVALID, _INVALID_HANDLE = 2, 1, 400  # cudart's error numbers
_pointer, _int, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class _Gate:
    def __init__(self, sim: SimAccelerator) -> None:
        self._sim = sim
        self._threads: dict[int, Actor] = {}
        self.callbacks = {
            "enter": ctypes.CFUNCTYPE(_int, _int)(lambda device: 0),
            "copy": ctypes.CFUNCTYPE(_int, _pointer, _pointer, _size, _int, _pointer)(self._copy),
            "record": ctypes.CFUNCTYPE(_int, _pointer, _pointer)(self._record),
            "wait": ctypes.CFUNCTYPE(_int, _pointer, _pointer, ctypes.c_uint)(self._wait),
            "synchronize": ctypes.CFUNCTYPE(_int, _pointer)(self._synchronize),
        }

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        def copy() -> int:
            if self._sim.exhausted():
                return _OUT_OF_MEMORY
            on, actor = self._stream(stream), self._actor(to)
            if self._sim.request_of is not None:  # the memory was just read from the store
                self._sim.uses(source, nbytes, write=True, text="read of the store, to be copied", actor=actor)
            self._sim.queue_copy(to, source, nbytes, on, actor)
            return 0

        return self._call(copy)

    def _record(self, event: int, stream: int) -> int:
        def record() -> int:
            self._sim.queue_record(self._event(event), self._stream(stream), self._actor())
            return 0

        return self._call(record)

    def _wait(self, stream: int, event: int, flags: int) -> int:
        def wait() -> int:
            self._sim.queue_wait(self._stream(stream), self._event(event), self._actor())
            return 0

        return self._call(wait)

    def _synchronize(self, event: int) -> int:
        def synchronize() -> int:
            sim = self._sim
            recording = sim.recording_of(self._event(event), "a native thread waits for it")
            actor = self._actor()
            sim.counts["native synchronize"] += 1
            if not recording.done and sim.policy.when != "eager":
                sim.park(recording, PARK_S)
            sim.force(recording)
            sim.order.join(actor, recording.snapshot)
            return 0

        return self._call(synchronize)

    def _call(self, what: Callable[[], int]) -> int:
        """Call a function of the gate, and keep its errors for the test. After an error, the native thread continues,
        unless the thread named an unknown handle.
        """
        with self._sim.lock:
            if self._sim.policy.when == "random":
                self._sim.run_some()
            try:
                return what()
            except LookupError as error:
                self._sim.errors.append(error)
                return _INVALID_HANDLE
            except AssertionError:
                return 0  # `found` has kept the error already
            except Exception as error:
                self._sim.errors.append(error)
                return _INVALID

    def _actor(self, address: int = 0) -> Actor:
        """Return the actor that calls the gate. If there is an address, return the actor of the copy that writes to
        this address.
        """
        sim = self._sim
        if sys._getframe(3).f_back is not None:  # native code that Python called
            return sim.host
        ident = threading.get_ident()
        if ident not in self._threads:
            self._threads[ident] = sim.order.actor(f"native thread {len(self._threads)}")
        thread = self._threads[ident]
        if sim.request_of is None:
            sim.order.join(thread, sim.order.snapshot(sim.host))
            return thread
        request = sim.request_of(address)
        if request is None:
            return thread
        sim.order.join(request, sim.order.snapshot(thread))
        sim.order.join(thread, sim.order.snapshot(request))
        return request

    def _stream(self, handle: int) -> SimStream:
        stream = self._sim.stream_at(handle)
        if stream is None:
            raise LookupError(f"no stream has the handle {handle:#x}")
        return stream

    def _event(self, handle: int) -> SimEvent:
        event = self._sim.event_at(handle)
        if event is None:
            raise LookupError(f"no event has the handle {handle:#x}, or it was dropped while native code used it")
        return event


def open_gate(sim: SimAccelerator) -> DeviceFunctionTable:
    """Open a gate, whose functions call into Python and take the GIL."""
    callbacks = _Gate(sim).callbacks
    addresses = {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in callbacks.items()}
    return DeviceFunctionTable(**addresses, keep=callbacks)
