"""The host's side of the simulation: requests that native threads work on, and leased memory.

Each request is a separate actor. A request is ordered behind everything that the host did before the submission, and
behind the requests after which it must begin. The host is ordered behind a request when `done` returns true, when the
host waits for the request, or when the host drops the future of a request with memory, because this waits. This order
is known when a request is submitted, and all memory that the request may access is known, too.

A canceled request may end before the requests after which it was to begin. Therefore the end of a canceled request
orders the host behind the request's own uses, and behind nothing else.

The native classes are replaced, so the simulation does not depend on the callers inside infinity.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from infinity import _native
from infinity.io.arena import Lease
from infinity.tiers.slab import Slab, SlabLease
from tests.sim.accelerator import SimAccelerator
from tests.sim.clocks import Actor, Snapshot, place

Memory = tuple[int, int]
"""Address and number of bytes."""


def memory_of(buffer: Any) -> Memory:
    array = np.frombuffer(buffer, dtype=np.uint8)
    return int(array.ctypes.data), array.nbytes


class End:
    """End of a request, or of a milestone in the request.

    Attributes:
        canceled: whether the request was canceled, as far as the host knows.
    """

    def __init__(self, actor: Actor, snapshot: Snapshot) -> None:
        self.canceled = False
        self._snapshot = snapshot
        self._own = {actor.index: snapshot[actor.index]}

    def snapshot(self) -> Snapshot:
        return self._own if self.canceled else self._snapshot


class Requests:
    """Requests that are in flight."""

    def __init__(self, sim: SimAccelerator) -> None:
        self.sim = sim
        self._ends: weakref.WeakKeyDictionary[Any, End] = weakref.WeakKeyDictionary()
        self._milestones: weakref.WeakKeyDictionary[Any, dict[str, End]] = weakref.WeakKeyDictionary()
        self.made: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._uploads: list[tuple[int, int, Actor]] = []
        self._copying: weakref.WeakKeyDictionary[Any, Actor] = weakref.WeakKeyDictionary()
        self._failure = _native.IOFuture.failure  # the test replaces it later
        sim.requests_are_known(self._uploading)

    def begin(self, name: str, after: Iterable[Any] = ()) -> Actor:
        """Return the actor of a request that is about to be submitted."""
        with self.sim.lock:
            actor = self.sim.order.actor(name, behind=self.sim.host)
            actor.place = place()
            for future in after:
                if future is not None:
                    self._join(actor, future)
            return actor

    def use(self, actor: Actor, memory: Memory, text: str, *, write: bool) -> None:
        self.sim.uses(*memory, write=write, text=text, actor=actor)

    def submitted(self, future: Any, actor: Actor, *, has_memory: bool = True) -> Any:
        """Record that a request was submitted. All uses of the request are declared already."""
        with self.sim.lock:
            end = self._ends[future] = End(actor, self.sim.order.end(actor))
        if has_memory:
            weakref.finalize(future, self._host_knows, end)
        return future

    def canceled(self, future: Any) -> None:
        """Record that a request is to be canceled. Whether it was canceled is known when the host asks for its end."""
        with self.sim.lock:
            if future in self._ends:  # jobs that only read ahead use no memory that the simulation knows
                self._ends[future].canceled = True

    def done(self, future: Any) -> None:
        """Order the host behind a request that has ended."""
        with self.sim.lock:
            actor = self._copying.pop(future, None)
            if actor is not None:
                self._ends[future] = End(actor, self.sim.order.end(actor))
            if future in self._ends:
                failure = self._failure(future)
                self._ends[future].canceled = failure is not None and failure.kind == "canceled"
                self._host_knows(self._ends[future])

    def _host_knows(self, end: End) -> None:
        with self.sim.lock:
            self.sim.order.join(self.sim.host, end.snapshot())

    def _join(self, actor: Actor, future: Any) -> None:
        if future in self._copying:
            self.sim.order.join(actor, self.sim.order.snapshot(self._copying[future]))
        elif future in self._ends:
            self.sim.order.join(actor, self._ends[future].snapshot())

    def reaches(self, future: Any, milestones: dict[str, End]) -> None:
        self._milestones[future] = milestones

    def milestone(self, future: Any, name: str, part: Any) -> Any:
        end = self._milestones.get(future, {}).get(name)
        if end is not None:
            with self.sim.lock:
                self._ends[part] = end
        return part

    def uploads(self, begin: int, end: int, actor: Actor) -> None:
        """Record that, from now on, a native thread that copies to addresses [begin, end) copies for this actor."""
        with self.sim.lock:
            self._uploads = [each for each in self._uploads if each[1] <= begin or end <= each[0]]
            self._uploads.append((begin, end, actor))

    def copies(self, future: Any, actor: Actor) -> Any:
        """Record that a native thread copies for this actor until the host knows that the request is done."""
        with self.sim.lock:
            self._copying[future] = actor
        return future

    def _uploading(self, address: int) -> Actor | None:
        return next((actor for begin, end, actor in self._uploads if begin <= address < end), None)


def follow_the_host(monkeypatch: pytest.MonkeyPatch, sim: SimAccelerator) -> Requests:
    """Until the test ends, make each request an actor, and poison memory that is given back."""
    requests = Requests(sim)
    _follow_futures(monkeypatch, requests)
    _follow_engine(monkeypatch, requests)
    _follow_updates(monkeypatch, requests)
    _follow_native_calls(monkeypatch, requests)
    _follow_landings(monkeypatch, requests)
    _follow_uploads(monkeypatch, requests)
    _poison_what_is_given_back(monkeypatch, sim)
    return requests


def _poison_what_is_given_back(monkeypatch: pytest.MonkeyPatch, sim: SimAccelerator) -> None:
    release, give_back = Lease.release, Slab.give_back

    def released(lease: Lease) -> None:
        if lease._space._native is not None:
            sim.poison(*memory_of(lease.view()), "lease given back")
        release(lease)

    def given_back(slab: Slab, lease: SlabLease, last_uses: Iterable[Any]) -> None:
        sim.poison(lease.memory.data_ptr(), lease.nbytes)
        give_back(slab, lease, last_uses)

    monkeypatch.setattr(Lease, "release", released)
    monkeypatch.setattr(Slab, "give_back", given_back)


def _follow_futures(monkeypatch: pytest.MonkeyPatch, requests: Requests) -> None:
    done, wait, failure = _native.IOFuture.done, _native.IOFuture.wait, _native.IOFuture.failure

    def is_done(future: Any) -> bool:
        answer = bool(done(future))
        if answer:
            requests.done(future)
        return answer

    def wait_for(future: Any, timeout_s: float | None = None) -> bool:
        answer = bool(wait(future, timeout_s))
        if answer:
            requests.done(future)
        return answer

    def failure_of(future: Any) -> Any:
        answer = failure(future)
        requests.done(future)
        return answer

    monkeypatch.setattr(_native.IOFuture, "done", is_done)
    monkeypatch.setattr(_native.IOFuture, "wait", wait_for)
    monkeypatch.setattr(_native.IOFuture, "failure", failure_of)


def _follow_engine(monkeypatch: pytest.MonkeyPatch, requests: Requests) -> None:
    for name, write in (("read", True), ("write", False)):
        call = getattr(_native.IOEngine, name)

        def submit(
            engine: Any,
            file: Any,
            offset: int,
            memory: Any,
            *rest: Any,
            after: Any = None,
            call: Any = call,
            text: str = f"{name} of the store",
            write: bool = write,
            **options: Any,
        ) -> Any:
            actor = requests.begin(f"a {text}", [after])
            requests.use(actor, memory_of(memory), text, write=write)
            if after is not None:
                options["after"] = after
            return requests.submitted(call(engine, file, offset, memory, *rest, **options), actor)

        monkeypatch.setattr(_native.IOEngine, name, submit)


def _made(monkeypatch: pytest.MonkeyPatch, requests: Requests, name: str, arguments: Sequence[str]) -> None:
    """Let `requests` remember the arguments with which objects of a native class are made."""
    original = getattr(_native, name)

    def make(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        requests.made[result] = dict(zip(arguments, args, strict=False)) | options
        return result

    monkeypatch.setattr(_native, name, make)


def _follow_updates(monkeypatch: pytest.MonkeyPatch, requests: Requests) -> None:
    _made(monkeypatch, requests, "StateStream", ("memory", "file", "offset", "write_offset"))
    submit = _native.UpdatePipeline.submit

    def submitted(pipeline: Any, **options: Any) -> Any:
        actor = requests.begin("an update", [*options.get("after", ()), options.get("ahead")])
        order, kept = requests.sim.order, {}
        states = ("weight", "residual", "exp_avg", "exp_avg_sq", "grad")
        streams = {name: _stream(requests, options.get(name)) for name in states}
        for name, stream in streams.items():
            if stream.get("source") is not None:
                requests.use(actor, memory_of(stream["source"]), f"update: {name}", write=False)
            if stream.get("memory") is not None:
                requests.use(actor, memory_of(stream["memory"]), f"update: {name}", write=name != "grad")
        kept["computed"] = End(actor, order.snapshot(actor))
        for names, milestone in ((("weight",), "weights"), (states[1:4], "written")):
            for name in names:
                stream = streams[name]
                if stream.get("memory") is not None and stream.get("file") is not None:
                    requests.use(actor, memory_of(stream["memory"]), f"update: {name} to the store", write=False)
            kept[milestone] = End(actor, order.snapshot(actor))
        future = submit(pipeline, **options)
        requests.reaches(future, kept)
        return requests.submitted(future, actor)

    cancel, withdraw = _native.UpdatePipeline.cancel, _native.UpdatePipeline.withdraw

    def canceled(pipeline: Any, future: Any) -> None:
        cancel(pipeline, future)
        requests.canceled(future)

    def withdrawn(pipeline: Any, lists: Sequence[Sequence[Any]]) -> list[bool]:
        answers: list[bool] = withdraw(pipeline, lists)
        for futures, answer in zip(lists, answers, strict=True):
            for future in futures if answer else ():
                requests.canceled(future)
        return answers

    monkeypatch.setattr(_native.UpdatePipeline, "submit", submitted)
    monkeypatch.setattr(_native.UpdatePipeline, "cancel", canceled)
    monkeypatch.setattr(_native.UpdatePipeline, "withdraw", withdrawn)
    for milestone in ("computed", "weights"):
        getter = getattr(_native.UpdateFuture, milestone).fget

        def part(future: Any, getter: Any = getter, milestone: str = milestone) -> Any:
            return requests.milestone(future, milestone, getter(future))

        monkeypatch.setattr(_native.UpdateFuture, milestone, property(part))


def _stream(requests: Requests, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    made = requests.made.get(given) if type(given).__name__ == "StateStream" else None
    return {"memory": given} if made is None else made


def _follow_native_calls(monkeypatch: pytest.MonkeyPatch, requests: Requests) -> None:
    """Declare the uses of native functions that run on the host's thread."""
    sim = requests.sim

    def follow(name: str, uses: Sequence[tuple[str, int, bool]]) -> None:
        call = getattr(_native, name)

        @functools.wraps(call)
        def called(*args: Any, **options: Any) -> Any:
            for argument, index, write in uses:
                given = options.get(argument) if index >= len(args) else args[index]
                sim.uses(*memory_of(given), write=write, text=name, actor=sim.host)
            return call(*args, **options)

        monkeypatch.setattr(_native, name, called)

    follow("land_gradient", [("dst", 0, True), ("src", 2, False)])
    follow("sums_of_squares", [("data", 0, False)])
    follow("widen_in_place", [("data", 0, True)])


def _follow_landings(monkeypatch: pytest.MonkeyPatch, requests: Requests) -> None:
    _made(monkeypatch, requests, "LandingPiece", ("target", "dtype"))
    land = _native.Landings.land
    before: weakref.WeakKeyDictionary[Any, Snapshot] = weakref.WeakKeyDictionary()  # one thread lands in order

    def landed(landings: Any, event: int, pieces: Sequence[Any]) -> Any:
        actor, sim = requests.begin("a landing"), requests.sim
        sim.order.join(actor, before.get(landings, {}))
        if event:
            known = sim.event_at(event)
            if known is None:
                raise LookupError(f"a landing waits for an event that is not there: {event:#x}")
            sim.order.join(actor, sim.recording_of(known, "a landing waits for it").snapshot)
        for piece in pieces:
            made = requests.made[piece]
            source = made.get("source")
            if source is not None:
                requests.use(actor, memory_of(source), "landing", write=False)
            requests.use(actor, memory_of(made["target"]), "landing", write=source is not None)
        future = requests.submitted(land(landings, event, pieces), actor, has_memory=bool(pieces))
        before[landings] = dict(actor.clock)
        return future

    close = _native.Landings.close

    def closed(landings: Any) -> None:
        close(landings)
        with requests.sim.lock:
            requests.sim.order.join(requests.sim.host, before.get(landings, {}))

    monkeypatch.setattr(_native.Landings, "land", landed)
    monkeypatch.setattr(_native.Landings, "close", closed)


def _follow_uploads(monkeypatch: pytest.MonkeyPatch, requests: Requests) -> None:
    _made(monkeypatch, requests, "UploadPart", ("file", "offset", "nbytes", "address"))
    upload = _native.Uploads.upload

    def uploaded(uploads: Any, parts: Sequence[Any], **options: Any) -> Any:
        made = [requests.made[part] for part in parts]
        actor = requests.begin("an upload", [part.get("after") for part in made])
        for part in made:
            requests.uploads(part["address"], part["address"] + part["nbytes"], actor)
        future = upload(uploads, parts, **options)
        return requests.copies(future, actor)

    monkeypatch.setattr(_native.Uploads, "upload", uploaded)
