"""Communication of ranks outside of collectives, about ranks that have arrived, failed or died.

[Note: the log]
The ranks have a common log in torch.distributed's store, separate from the process groups: a counter, and one key for
each entry. Each rank has a thread, the watch, which reads the log twice a second, and more often while another thread
waits for an entry. Only the watch calls the store, because the store may have ended or may hang. Other threads wait for
the watch for a limited time. If the watch does not answer, these threads conclude that the store does not answer.

| entry   | meaning                                                                                                   |
|---------|-----------------------------------------------------------------------------------------------------------|
| here    | the rank has come to `assemble` number `count`                                                            |
| failed  | the rank cannot continue, and why                                                                         |
| left    | the rank has closed its model                                                                             |
| call    | the rank met a problem that it cannot explain (a closed connection, a deadline): all ranks answer         |
| alive   | the answer: the rank's position in the order of its operations                                            |
| verdict | the conclusion that a rank drew from the answers to its call, or from the end of a process. All ranks     |
|         | take over the first verdict                                                                               |
| work    | the rank has begun or ended a work for which other ranks may wait                                         |
| heard   | the rank knows the failure that ends the run. The rank that hosts the store waits for this entry of all   |

A killed process writes no entry. Ranks on the same machine notice the end of the process by its process descriptor.
Ranks on other machines notice the end because the killed process does not answer a call. gloo raises an error about 20
ms after the death of a peer, but the error names an address and no rank. If the peer had forked a child process, gloo's
connections to the dead peer remain open as long as the child lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store

from infinity.errors import PeerError

POLL_S = 0.5
_HURRY_S = 0.01
_ANSWER_S = 2.0  # seconds within which a rank must answer a call
_STORE_S = 5.0  # seconds within which the store must answer if a thread waits for it
_TEXT_MAX = 2000

Trouble = Literal["connection", "deadline"]
_EQUALLY_OFTEN = (
    "All ranks must call the model and infinity's functions equally often: give each rank the same number of batches, "
    "also in an evaluation. Rank 0 can evaluate and save alone only if the ranks share all weights (weights: host, "
    "ranks.wire: auto). If a rank does something else alone for longer, raise "
    "ranks.deadline_s in the swap config. Start all ranks again, and resume from the last generation."
)
Entry = dict[str, Any]


def listed(ranks: Collection[int]) -> str:
    """Return the ranks as text: "rank 3", or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


class PeerWatch:
    """The log as this rank has read it, and the thread that reads and writes the log.

    Args:
        store: torch.distributed's store. Either only this watch uses the object, or its calls do not block each other.
        rank: number of this rank.
        world: number of ranks.
        store_host: description of the store's host, for messages.
        store_rank: rank whose process hosts the store; None if no rank hosts it.
    """

    def __init__(self, store: Store, rank: int, world: int, store_host: str, store_rank: int | None) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._store_host, self._store_rank = store_host, store_rank
        self._changed = threading.Condition()
        self._outbox: list[Entry] = []
        self._seen = 0
        self._read_at, self._missing_since = time.monotonic(), 0.0
        self._position: tuple[int, int, str] = (0, -1, "offload")
        self._here: dict[int, dict[int, tuple[str, str]]] = {}  # by count, then by rank: name and payload
        self._alive: dict[int, tuple[int, int, str]] = {}
        self._acts = 0
        self._acts_of: dict[int, int] = {}
        self._works: list[Entry] = []
        self._left: set[int] = set()
        self._heard: set[int] = set()
        self._verdict: PeerError | None = None
        self._pids: dict[int, int] = {}  # process descriptor: rank
        self._stopping = False
        self._ended = world == 1
        self._waiting = 0  # number of threads that wait for entries of other ranks
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="infinity-watch", daemon=True)
        if world > 1:
            self._thread.start()

    @property
    def verdict(self) -> PeerError | None:
        """Failure that ends the run; None before a failure. The first verdict never changes."""
        return self._verdict

    @property
    def left(self) -> bool:
        """Whether another rank has closed its model, so that it will not join further operations."""
        return bool(self._left)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has closed its model. All earlier entries of the rank are known then."""
        return rank in self._left

    def note(self, index: int, phase: int, what: str) -> None:
        """Set this rank's position in the order of its operations. The watch sends it in the answer to a call."""
        self._position = index, phase, what

    def act(self) -> None:
        """Count an act of this rank that needs no other rank. The watch sends the number in the answer to a call."""
        self._acts += 1

    def acts_of_others(self) -> dict[int, int]:
        """Ask the other ranks how many acts they have counted. Return the numbers of the ranks that answer soon."""
        with self._changed:
            self._alive.clear()
            self._acts_of.clear()
        self.tell("call")
        self._wait_for(lambda: len(self._alive.keys() | self._left) == self._world, _ANSWER_S)
        with self._changed:
            found = {rank: acts for rank, acts in self._acts_of.items() if rank != self._rank}
            self._alive.clear()  # a rank that answered now may hang later
        return found

    def tell(self, kind: str, **entry: Any) -> None:
        """Queue an entry for the log, which the watch's thread writes."""
        with self._changed:
            self._outbox.append({"kind": kind, "rank": self._rank, **entry})
        self._wake.set()

    def announce(self, verdict: PeerError) -> None:
        """Write a verdict to the log, so that all ranks raise the error that this rank raises."""
        self.tell("verdict", text=verdict.cause[:_TEXT_MAX], ranks=verdict.ranks, advice=verdict.advice)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank cannot continue.

        Return when the other ranks can know the failure, or cannot be reached.
        """
        kind, text = type(error).__name__, str(error)
        self.tell("failed", text=f"{kind}: {text}"[:_TEXT_MAX] if text else kind, error=kind)
        self._wait_for(lambda: not self._outbox, _STORE_S)
        self._stay_until_heard()

    def works(self, at: int, within_s: float) -> list[Entry]:
        """Return the entries about works at a step, after a wait: until there is another entry, or the time is over."""
        known = len(self._works)
        self._wait_for(lambda: len(self._works) > known, within_s)
        return [entry for entry in self._works if entry["at"] == at]

    def look_at(self, pids: Mapping[int, int]) -> None:
        """Start to watch for the end of processes on this machine. `pids` has the process ids by rank."""
        for rank, pid in pids.items():
            try:
                self._pids[os.pidfd_open(pid)] = rank
            except OSError:  # the process has ended, or the system refuses: only gloo's errors and the log remain
                continue

    def assembled(self, count: int, name: str, payload: str, timeout_s: float) -> dict[int, str]:
        """Write that this rank has come to `assemble` number `count`, wait for all ranks, and return the payload of
        each rank.

        Args:
            count: number of the call of `assemble`.
            name: the activity that begins, the same on all ranks.
            payload: text for the other ranks.
            timeout_s: seconds to wait.

        Raises:
            PeerError: a rank did not come, came with another name, failed, or died.
        """
        if self._world == 1:
            return {self._rank: payload}
        self.note(-1, count, f"'{name}'")
        self.tell("here", count=count, name=name, payload=payload)
        self._wait_for(lambda: len(self._here.get(count, ())) == self._world, timeout_s)
        came = dict(self._here.get(count, {}))
        missing = tuple(rank for rank in range(self._world) if rank not in came)
        if missing and self._verdict is not None:
            raise self._verdict.again()
        if missing and (self._hangs() or self._rank in missing):
            raise self._no_store()
        if missing:
            where = "; ".join(f"rank {rank} was last seen at {self._last(rank)}" for rank in missing)
            raise PeerError(f"{listed(missing)} did not reach '{name}' within {timeout_s:g} s ({where})", missing)
        others = {rank: what for rank, (what, _) in came.items() if what != name}
        if others:
            rank, what = min(others.items())
            raise PeerError(
                f"rank {rank} is at '{what}' while rank {self._rank} is at '{name}': all ranks must do the same",
                tuple(others),
            )
        return {rank: told for rank, (_, told) in came.items()}

    def _last(self, rank: int) -> str:
        """Return the last activity that the log has of a rank."""
        counts = [count for count, came in self._here.items() if rank in came]
        return f"'{self._here[max(counts)][rank][0]}'" if counts else "the start of its process"

    def inquire(self, trouble: Trouble, what: str, detail: str) -> PeerError:
        """Find out which rank caused a problem that this rank has. This takes a few seconds at most.

        Args:
            trouble: whether a connection of gloo's broke, or a deadline passed.
            what: activity of this rank.
            detail: gloo's message, or the time that has passed.
        """
        self.tell("call")
        self._wait_for(lambda: len(self._alive.keys() | self._left) == self._world, _ANSWER_S)
        if self._verdict is None and (self._outbox or self._hangs()):  # the store may still raise an error
            self._wait_for(lambda: False, _STORE_S)
        if self._verdict is None:
            verdict = self._judge(trouble, what, detail)
            self.announce(verdict)
            self._wait_for(self._hangs, _STORE_S)  # another rank's verdict may be the first
            self._settle(verdict)
        self._stay_until_heard()
        assert self._verdict is not None
        return self._verdict

    def _wait_for(self, condition: Callable[[], bool], within_s: float) -> None:
        """Wait until a condition on the log is true. The wait also ends at a verdict, or when the watch has ended."""
        if self._world == 1:
            return
        with self._changed:
            self._waiting += 1
            self._wake.set()
            try:
                self._changed.wait_for(lambda: condition() or self._ended or self._verdict is not None, within_s)
            finally:
                self._waiting -= 1

    def _judge(self, trouble: Trouble, what: str, detail: str) -> PeerError:
        """Return the error that follows from the answers to a call."""
        if self._hangs():
            return self._no_store()
        silent = tuple(rank for rank in range(self._world) if rank not in self._alive.keys() | self._left)
        left = tuple(sorted(self._left - {self._rank}))
        if silent and trouble == "connection":
            return self._died(silent, f" ({detail})")
        if silent:
            return PeerError(
                f"{listed(silent)} did not answer while rank {self._rank} was at {what} ({detail}): the process hangs, "
                "or its machine cannot be reached",
                silent,
            )
        if left:
            return PeerError(
                f"{listed(left)} closed the model, or its script ended, while rank {self._rank} was at {what}", left
            )
        index, phase, _ = self._position
        behind = tuple(rank for rank, (i, p, _) in sorted(self._alive.items()) if (i, p) < (index, phase))
        where = "; ".join(f"rank {rank} is at {self._alive[rank][2]}" for rank in sorted(self._alive))
        if behind and trouble == "deadline":
            return PeerError(f"{listed(behind)} did not reach {what} {detail} ({where})", behind, _EQUALLY_OFTEN)
        return PeerError(f"{what} did not end, though all ranks are alive: {detail} ({where})")

    def _died(self, ranks: Collection[int], detail: str = "") -> PeerError:
        _, _, what = self._position
        return PeerError(
            f"{listed(ranks)} died while rank {self._rank} was at {what}: the process ended without an error "
            f"message{detail}. Look at the last output of that rank, and look in dmesg whether the kernel killed it "
            "because memory ran out",
            tuple(ranks),
        )

    def _no_store(self) -> PeerError:
        return PeerError(
            f"the store of torch.distributed, {self._store_host}, does not answer: the process that hosts it died, "
            "ended or hangs, or its machine cannot be reached",
            () if self._store_rank is None else (self._store_rank,),
        )

    def _hangs(self) -> bool:
        """Return whether the store has not answered for a long time."""
        return not self._ended and time.monotonic() - self._read_at > _ANSWER_S / 2 + POLL_S

    def _settle(self, verdict: PeerError) -> None:
        with self._changed:
            if self._verdict is None:
                self._verdict = verdict
            self._changed.notify_all()

    def _stay_until_heard(self) -> None:
        """In the process that hosts the store, wait until all ranks have read its failure, or that it leaves."""
        if self._store_rank != self._rank or self._world == 1:
            return
        with self._changed:
            named = set(() if self._verdict is None else self._verdict.ranks)
            gone = {self._rank} | (named - self._alive.keys())
            self._waiting += 1
            self._wake.set()
            self._changed.wait_for(
                lambda: len(self._heard | self._left | gone) == self._world or self._ended, _ANSWER_S
            )
            self._waiting -= 1

    def close(self) -> None:
        """Tell the other ranks that this rank leaves, if the store answers soon, and end the thread. A second call does
        nothing.

        The process that hosts the store may end after this call. If other ranks may still look for works in the log, it
        waits until they have read the log.
        """
        if self._stopping:
            return
        self.tell("left")
        with self._changed:
            self._changed.wait_for(lambda: not self._outbox or self._ended, 2 * POLL_S)
        if self._works:
            self._stay_until_heard()
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * POLL_S)
        if not self._thread.is_alive():
            for descriptor in self._pids:
                os.close(descriptor)
            self._pids.clear()

    # Methods of the watch's thread.

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._write()
                self._read()
            except Exception:
                ended = self._who_ended()
                self._settle(self._died(ended) if ended else self._no_store())
                break
            if self._verdict is None and self._who_ended():
                self._judge_ended()
            self._wake.wait(_HURRY_S if self._waiting else POLL_S)
            self._wake.clear()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _write(self) -> None:
        while self._outbox:
            entry = self._outbox[0]
            self._store.set(f"entry/{self._store.add('entries', 1)}", json.dumps(entry))
            with self._changed:
                del self._outbox[0]
                self._changed.notify_all()

    def _read(self) -> None:
        """Read the new entries of the log, up to the first entry that is counted but not yet written.

        If this entry is not written after some time, it is skipped, because its rank died after counting the entry and
        before writing it.
        """
        count, now = self._store.add("entries", 0), time.monotonic()
        while self._seen < count:
            key = f"entry/{self._seen + 1}"
            if self._store.check([key]):
                self._take(json.loads(self._store.get(key)))
            elif (self._missing_since or now) > now - _ANSWER_S:
                self._missing_since = self._missing_since or now
                break
            self._seen, self._missing_since = self._seen + 1, 0.0
        with self._changed:
            self._read_at = time.monotonic()
            self._changed.notify_all()

    def _take(self, entry: Entry) -> None:
        """Process one entry of the log, in the log's order."""
        rank, kind = entry["rank"], entry["kind"]
        with self._changed:
            if kind == "here":
                self._here.setdefault(entry["count"], {})[rank] = entry["name"], entry["payload"]
            elif kind == "left":
                self._left.add(rank)
            elif kind == "alive":
                self._alive[rank] = entry["index"], entry["phase"], entry["text"]
                self._acts_of[rank] = entry["acts"]
            elif kind == "heard":
                self._heard.add(rank)
            elif kind == "work":
                self._works.append(entry)
        if kind == "call":
            index, phase, what = self._position
            self.tell("alive", index=index, phase=phase, text=what, acts=self._acts)
        elif kind == "failed" and rank != self._rank:
            self._settle(PeerError(f"rank {rank} failed: {entry['text']}", (rank,), kind=entry["error"]))
            self.tell("heard")
        elif kind == "verdict":
            self._settle(PeerError(entry["text"], tuple(entry["ranks"]), entry["advice"]))
            self.tell("heard")
        elif kind == "left" and rank == self._store_rank != self._rank:
            self.tell("heard")

    def _who_ended(self) -> set[int]:
        """Return the ranks of this machine whose processes ended without a `left` entry in the log.

        If the process that hosts the store is among them, return this rank only: without the store, the other ranks can
        write no entry before they end, too.
        """
        poll = select.poll()
        for descriptor in self._pids:
            poll.register(descriptor, select.POLLIN)
        ended = {self._pids[descriptor] for descriptor, _ in poll.poll(0)} - self._left
        return ended if self._store_rank not in ended else ended & {self._store_rank}

    def _judge_ended(self) -> None:
        with contextlib.suppress(Exception):  # the store may have ended with these processes
            self._read()  # read the entries that these processes wrote before they ended
        ended = self._who_ended()
        if ended and self._verdict is None:
            verdict = self._died(ended)
            self.announce(verdict)  # before this process ends, too, and looks to the other ranks as if it had died
            self.tell("heard")
            with contextlib.suppress(Exception):
                self._write()
            self._settle(verdict)


def private(store: Store, prefix: str) -> PrefixStore:
    """Return the store with a separate connection, if this torch can make one.

    A call that blocks on the first connection does not block the second.
    """
    clone = getattr(store, "clone", None)  # since torch 2.8
    return PrefixStore(prefix, clone() if clone is not None else store)
