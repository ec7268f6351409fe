"""A device runtime in Python: its functions are ctypes callbacks, which any native thread may call."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable

from infinity import _native


class Runtime:
    """Fake runtime whose streams are queues. Queued work runs as late as possible, when a later event is waited for.

    Attributes:
        calls: names of the calls so far, each name with the handles of its call.
        refuse: the errors of calls that do not run; the key is the number of the call, counted from 0.
        synchronizing: function that is called before each wait for an event, with the event.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.refuse: dict[int, int] = {}
        self.synchronizing: Callable[[int], None] = lambda event: None
        self.threads: set[int] = set()
        self._lock = threading.Lock()
        self._streams: dict[int, deque[tuple[Callable[[], object], int, int]]] = defaultdict(deque)
        self._recorded: dict[int, int] = defaultdict(int)
        self._reached: dict[int, int] = defaultdict(int)
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._callbacks = {
            "enter": ctypes.CFUNCTYPE(number, number)(self._enter),
            "copy": ctypes.CFUNCTYPE(number, pointer, pointer, size, number, pointer)(self._copy),
            "record": ctypes.CFUNCTYPE(number, pointer, pointer)(self._record),
            "wait": ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.c_uint)(self._wait),
            "synchronize": ctypes.CFUNCTYPE(number, pointer)(self._synchronize),
        }

    def gate(self) -> _native.DeviceGate:
        addresses = {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in self._callbacks.items()}
        return _native.DeviceGate(0, **addresses, keep=self._callbacks)

    def launch(self, stream: int, work: Callable[[], object]) -> None:
        """Queue the host's work on a stream."""
        with self._lock:
            self._streams[stream].append((work, 0, 0))

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self._queue_record(event, stream)

    def queued(self) -> int:
        with self._lock:
            return sum(map(len, self._streams.values()))

    def reach(self, event: int) -> bool:
        """Run the work that the event waits for. Returns False if the event would never be reached."""
        with self._lock:
            turn = self._recorded[event]
            while self._reached[event] < turn:
                if not any(self._run(queue) for queue in list(self._streams.values())):
                    return False
            return True

    def _run(self, queue: deque[tuple[Callable[[], object], int, int]]) -> bool:
        if not queue or self._reached[queue[0][1]] < queue[0][2]:
            return False
        queue.popleft()[0]()
        return True

    def _queue_record(self, event: int, stream: int) -> None:
        self._recorded[event] += 1
        turn = self._recorded[event]
        self._streams[stream].append((lambda: self._reached.__setitem__(event, turn), 0, 0))

    def _called(self, name: str, first: int | None, second: int | None = 0) -> int:
        self.threads.add(threading.get_ident())
        with self._lock:
            self.calls.append((name, first or 0, second or 0))
            return self.refuse.get(len(self.calls) - 1, 0)

    def _enter(self, device: int) -> int:
        return self._called("enter", device)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int | None) -> int:
        assert kind == 4
        if error := self._called("copy", to, stream):
            return error
        self.launch(stream or 0, lambda: ctypes.memmove(to, source, nbytes))
        return 0

    def _record(self, event: int, stream: int | None) -> int:
        if error := self._called("record", event, stream):
            return error
        self.record(event, stream or 0)
        return 0

    def _wait(self, stream: int | None, event: int, flags: int) -> int:
        assert flags == 0
        if error := self._called("wait", stream, event):
            return error
        with self._lock:
            self._streams[stream or 0].append((lambda: None, event, self._recorded[event]))
        return 0

    def _synchronize(self, event: int) -> int:
        if error := self._called("synchronize", event):
            return error
        self.synchronizing(event)
        return 0 if self.reach(event) else -1
