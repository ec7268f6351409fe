"""Log of a run's operations in their order: calls of the native core, device memory, small files and other ranks.

Two versions of infinity with equal logs move the same bytes in the same order. The logging functions are installed at
the boundaries (native classes, torch.distributed, small files, the space that leases come from), so the log does not
depend on the callers inside infinity. The lines of the log have the words of the design instead of class names.

[Note: the same log each time] The progress of native threads and other ranks is visible only through `done`. In a
logged run, `done` waits and returns true, so that code that depends on the answer of `done` always behaves the same.
The result of `withdraw` depends on which jobs have begun. Therefore `withdraw` waits for all of its jobs.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from infinity import _native
from infinity.base.timeline import JobTag
from infinity.io import atomic_file
from infinity.ranks.collective_queue import OperationFuture
from infinity.tiers.slab import Slab, SlabLease

PATIENCE_S = 20.0
OF_A_RUN = {"run", "life", "created", "members"}
"""Keys of documents that differ in each run."""
STATES = ("weight", "residual", "exp_avg", "exp_avg_sq", "grad")
PLAIN = ("numel", "weight_dtype", "master", "moments", "grad_dtype", "whole", "arithmetic", "unit", "speculative")


class Log:
    """Lines of the log by the thread that made the call. The key is "" for the main thread, and the thread's name for
    another thread.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}
        self._made: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def add(self, text: str) -> None:
        thread = threading.current_thread()
        name = "" if thread is threading.main_thread() else thread.name.rstrip("0123456789-_")
        self._lines.setdefault(name, []).append(text)

    def remember(self, made: Any, text: str) -> None:
        self._made[made] = text

    def told(self, made: Any) -> str:
        if made is None:
            return "-"
        return self._made.get(made) or f"memory {_nbytes(made)}"

    def lines(self) -> list[str]:
        return [f"{name}: {line}" if name else line for name in sorted(self._lines) for line in self._lines[name]]


@contextmanager
def logged() -> Iterator[Log]:
    """Log all operations within the context."""
    log = Log()
    with pytest.MonkeyPatch.context() as patch, atomic_file.observed(_small_files(log)):
        _follow_futures(patch)
        _follow_engine(patch, log)
        _follow_updates(patch, log)
        _follow_device(patch, log)
        _follow_ranks(patch, log)
        yield log


def _nbytes(buffer: Any) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).nbytes)


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _follow_futures(patch: pytest.MonkeyPatch) -> None:
    wait = _native.IOFuture.wait
    patch.setattr(_native.IOFuture, "done", lambda future: bool(wait(future, PATIENCE_S)))


def _follow_engine(patch: pytest.MonkeyPatch, log: Log) -> None:
    def follow(name: str) -> None:
        call = getattr(_native.IOEngine, name)

        def called(engine: Any, file: Any, offset: int, memory: Any, io_class: str = "weights", **options: Any) -> Any:
            after = " after" if options.get("after") is not None else ""
            log.add(f"{name} {io_class} at {offset}, {_nbytes(memory)} bytes{after}")
            return call(engine, file, offset, memory, io_class, **options)

        patch.setattr(_native.IOEngine, name, called)

    follow("read")
    follow("write")
    _announce(patch, log, _native.IOEngine, "sync", lambda *_: "sync")


def _announce(patch: pytest.MonkeyPatch, log: Log, owner: Any, name: str, text: Callable[..., str]) -> None:
    call = getattr(owner, name)

    def called(*args: Any, **options: Any) -> Any:
        log.add(text(*args, **options))
        return call(*args, **options)

    patch.setattr(owner, name, called)


def _remember(patch: pytest.MonkeyPatch, log: Log, name: str, text: Callable[..., str]) -> None:
    """Log the arguments with which objects of a native class are made."""
    original = getattr(_native, name)

    def make(*args: Any, **options: Any) -> Any:
        made = original(*args, **options)
        log.remember(made, text(*args, **options))
        return made

    for attribute in dir(original):
        if isinstance(original.__dict__.get(attribute), staticmethod):
            setattr(make, attribute, getattr(original, attribute))
    patch.setattr(_native, name, make)


def _stream(memory: Any = None, file: Any = None, offset: int = 0, to: int | None = None, *, source: Any = None) -> str:
    parts = [] if memory is None else [f"memory {_nbytes(memory)}"]
    parts += [] if source is None else [f"from memory {_nbytes(source)}"]
    parts += [] if file is None else [f"{offset}" if to is None else f"{offset} to {to}"]
    return "+".join(parts)


def _follow_updates(patch: pytest.MonkeyPatch, log: Log) -> None:
    def segment(begin: int, end: int, **rule: Any) -> str:
        return f"[{begin}, {end}) {json.dumps(rule, sort_keys=True)}"

    def stream(memory: Any = None, file: Any = None, offset: int = 0, write_offset: Any = None, **more: Any) -> str:
        return _stream(memory, file, offset, write_offset, **more)

    def job(what: str, options: dict[str, Any]) -> str:
        tag = JobTag.unpack(options.get("tag", 0))
        lines = [f"{what} step {tag.step} unit {tag.unit} group {tag.group}"]
        lines += [f"{name} {options[name]}" for name in PLAIN if name in options]
        lines += [f"{name} at {log.told(options[name])}" for name in STATES if options.get(name) is not None]
        lines += [f"segments {_sum('; '.join(map(log.told, options.get('segments', ()))).encode())}"]
        lines += ["read ahead"] if options.get("ahead") is not None else []
        lines += [f"after {len(options['after'])}"] if options.get("after") else []
        return ", ".join(lines)

    move = _native.Segment.at

    def moved(given: Any, begin: int, end: int, **rule: Any) -> Any:
        made = move(given, begin, end, **rule)
        log.remember(made, f"{segment(begin, end, **rule)} of {log.told(given)}")
        return made

    patch.setattr(_native.Segment, "at", moved)
    _remember(patch, log, "StateStream", stream)
    _remember(patch, log, "Segment", segment)
    pipeline = _native.UpdatePipeline
    _announce(patch, log, pipeline, "submit", lambda _, **options: job("update", options))
    _announce(patch, log, pipeline, "read_ahead", lambda _, **options: job("read ahead", options))
    _announce(patch, log, pipeline, "lend", lambda _, memory: f"lend {_nbytes(memory)} bytes to updates")
    _announce(patch, log, pipeline, "reclaim", lambda _, memory: f"reclaim {_nbytes(memory)} bytes")
    _announce(patch, log, pipeline, "cancel", lambda _, update: "cancel an update")
    withdraw = pipeline.withdraw

    def withdrawn(self: Any, lists: Sequence[Sequence[Any]]) -> list[bool]:
        for future in [future for each in lists for future in each]:
            future.wait(PATIENCE_S)
        taken = withdraw(self, lists)
        log.add(f"withdraw {list(map(len, lists))}: {taken}")
        return taken

    patch.setattr(pipeline, "withdraw", withdrawn)
    for name in ("land_gradient", "sums_of_squares", "widen_in_place", "decode_weights", "encode_weights"):
        _announce(patch, log, _native, name, lambda memory, *_, name=name, **__: f"{name}, {_nbytes(memory)} bytes")


def _follow_device(patch: pytest.MonkeyPatch, log: Log) -> None:
    """Log leases and returns of slots in the slab. On the device `cpu`, slots are in the arena, and leases of the arena
    are not logged.
    """

    def piece(target: Any, dtype: str, *, source: Any = None, add: bool = False, first: int = 0, **_: Any) -> str:
        return f"{dtype} {_nbytes(target)}{' +=' if add else ' =' if source is not None else ''} from {first}"

    def part(file: Any, offset: int, nbytes: int, address: int, **_: Any) -> str:
        return f"{offset}, {nbytes} bytes"

    _remember(patch, log, "LandingPiece", piece)
    _remember(patch, log, "UploadPart", part)
    landed = _native.Landings
    _announce(patch, log, landed, "land", lambda _, event, pieces: f"land {'; '.join(map(log.told, pieces))}")
    sent = _native.Uploads
    _announce(patch, log, sent, "upload", lambda _, parts, **__: f"upload {'; '.join(map(log.told, parts))}")
    _announce(patch, log, sent, "cancel", lambda *_: "cancel an upload")
    lease = Slab.try_lease

    def leased(slab: Slab, nbytes: int, **options: Any) -> SlabLease | None:
        found = lease(slab, nbytes, **options)
        log.add(f"lease {nbytes} bytes of the device: {'none' if found is None else found.lease.offset}")
        return found

    patch.setattr(Slab, "try_lease", leased)
    _announce(patch, log, Slab, "give_back", lambda _, given, __: f"give back {given.nbytes} at {given.lease.offset}")


def _follow_ranks(patch: pytest.MonkeyPatch, log: Log) -> None:
    patch.setattr(OperationFuture, "done", lambda ticket: ticket.wait(PATIENCE_S))

    def tensors(given: Sequence[Any]) -> str:
        flat = [each for one in given for each in (one if isinstance(one, list) else [one])]
        return ", ".join(str(each.numel()) for each in flat if isinstance(each, torch.Tensor))

    for name in ("broadcast", "all_to_all_single", "all_gather", "all_reduce", "barrier"):
        _announce(patch, log, dist, name, lambda *given, name=name, **_: f"{name} {tensors(given)}")


def _small_files(log: Log) -> atomic_file.Observer:
    def observe(act: str, path: Path, target: Path | None, data: bytes) -> None:
        if act.startswith("begin"):
            text = f" {_sum(_same_each_time(data))}" if data else ""
            log.add(f"{act.removeprefix('begin ')} {path.name}{text}{'' if target is None else f' to {target.name}'}")

    return observe


def _same_each_time(document: bytes) -> bytes:
    """Return a document (infinity/io/document.py) without the keys that differ in each run. Other data is returned
    unchanged.
    """
    first, _, rest = document.partition(b"\n")
    if not first.startswith(b'{"infinity"'):
        return document
    json_bytes = json.loads(first)["json_bytes"]
    value = json.loads(rest[:json_bytes], object_hook=lambda given: {k: given[k] for k in given if k not in OF_A_RUN})
    return json.dumps(value).encode() + rest[json_bytes:]
