"""Headers. Before an operation begins, each rank sends its description of the operation, the header, and the ranks
compare the headers.

A header has a fixed length, so that one small collective exchanges the headers. All ranks see the same headers. If the
headers differ, all ranks therefore raise the same error.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from infinity.errors import PeerError
from infinity.ranks.operations import AllGather, AllToAll, CollectiveOperation, ControlMessage
from infinity.ranks.ranks import RankGroup
from infinity.ranks.watch import listed

_FORM = struct.Struct("<qqqQQqqq")
NBYTES = 128
_ADVICE = (
    "Every rank must run the same modules in the same order. Stop all ranks, and look for code that depends on the "
    "rank or on its data."
)
_GATHERS, _EXCHANGES, _IS_AT, _GATHERS_AGAIN = range(4)
_VERBS = ("gathers", "exchanges", "is at", "gathers again")
_NOUNS = ("the gather of", "the exchange of", "the agreement on", "the repeated gather of")


@dataclass(frozen=True)
class OperationHeader:
    """One rank's description of an operation.

    Attributes:
        index: number of operations that the rank has had before this operation.
        kind: kind of the operation: a gather over W, an all-to-all exchange, a ControlMessage, or a gather over G (W
            and G: see ranks.py).
        subject: number of the operation's subject (CollectiveOperation.subject).
        sent, received: digests of the sizes; for a ControlMessage, the length of the payload, and 0.
        leader: number of the first of the ranks that gather the same data.
        says: number that the rank announces with the operation (CollectiveQueue.say); the ranks do not compare it.
        place: place of the rank's pieces in memory that all ranks share; -1: they are elsewhere. It may differ.
        name: name of the subject, truncated.
    """

    index: int
    kind: int
    subject: int
    sent: int
    received: int
    leader: int
    says: int
    place: int
    name: str

    @classmethod
    def of(
        cls, operation: CollectiveOperation, index: int, gather: RankGroup, shard: RankGroup, says: int = 0
    ) -> OperationHeader:
        moved = operation.collective
        if isinstance(moved, AllGather):
            kind, group = (_GATHERS_AGAIN, gather) if moved.near else (_GATHERS, shard)
            sizes = kind, _digest(tuple(moved.slices)), 0, group.ranks[0]
        elif isinstance(moved, AllToAll):
            me = shard.ranks[shard.position]
            sent = _pairs(me, shard.ranks, tuple(moved.send_splits), True)
            sizes = _EXCHANGES, sent, _pairs(me, shard.ranks, tuple(moved.receive_splits), False), 0
        else:
            sizes = _IS_AT, len(moved.payload), 0, 0
        kind, sent, received, leader = sizes
        shared = None if isinstance(moved, ControlMessage) else moved.shared
        place = -1 if shared is None else shared.place
        return cls(index, kind, operation.subject, sent, received, leader, says, place, operation.name)

    def encode(self) -> bytes:
        numbers = self.index, self.kind, self.subject, self.sent, self.received, self.leader, self.says, self.place
        fixed = _FORM.pack(*numbers)
        return (fixed + self.name.encode()[: NBYTES - len(fixed)]).ljust(NBYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> OperationHeader:
        name = data[_FORM.size :].rstrip(b"\0").decode(errors="ignore")
        index, kind, subject, sent, received, leader, says, place = _FORM.unpack_from(data)
        return cls(index, kind, subject, sent, received, leader, says, place, name)

    @property
    def what(self) -> str:
        """The rank's activity as a predicate, for messages."""
        return f"{_VERBS[self.kind]} {self.name}"

    @property
    def noun(self) -> str:
        """Kind of the operation as a noun, for messages in which the name of the operation follows."""
        return _NOUNS[self.kind]


def require_same(headers: Sequence[OperationHeader]) -> None:
    """Raise PeerError if ranks are at different operations. `headers` has one header of each rank, in order."""
    same: dict[tuple[int, int, int], list[int]] = {}
    for rank, header in enumerate(headers):
        same.setdefault((header.index, header.kind, header.subject), []).append(rank)
    if len(same) == 1:
        return
    most = max(same.values(), key=len)  # of two sets with equally many ranks, the set with rank 0
    others = tuple(rank for rank in range(len(headers)) if rank not in most)
    first = headers[others[0]]
    raise PeerError(
        f"rank {others[0]} {first.what} while rank {most[0]} {headers[most[0]].what}"
        + (f" ({listed(others)} differ{'s' * (len(others) == 1)} from {listed(most)})" if len(headers) > 2 else ""),
        others,
        _ADVICE,
    )


def sizes_fit(headers: Sequence[OperationHeader]) -> bool:
    """Return whether the sizes that the ranks have for the same operation match each other."""
    if headers[0].kind in (_GATHERS, _GATHERS_AGAIN):
        return len({(header.leader, header.sent) for header in headers}) == len({header.leader for header in headers})
    if headers[0].kind == _EXCHANGES:
        return (sum(header.sent for header in headers) - sum(header.received for header in headers)) % 2**64 == 0
    return True


def sizes_of(operation: CollectiveOperation) -> list[list[int]]:
    """Return the sizes of an operation. The ranks send these sizes to each other if the digests of the sizes do not
    match."""
    moved = operation.collective
    if isinstance(moved, AllGather):
        return [list(moved.slices)]
    if isinstance(moved, AllToAll):
        return [list(moved.send_splits), list(moved.receive_splits)]
    return []


def misfit(headers: Sequence[OperationHeader], sizes: Sequence[list[list[int]]]) -> PeerError:
    """Return the error for sizes that do not match, the same on all ranks. `sizes` has the result of `sizes_of` on each
    rank, in order."""
    ranks, name = range(len(headers)), headers[0].name
    if headers[0].kind in (_GATHERS, _GATHERS_AGAIN):
        for a in ranks:
            for b in ranks:
                if headers[a].leader == headers[b].leader and sizes[a] != sizes[b]:
                    cause = f"rank {b} gathers {name} as slices of {sizes[b][0]} bytes, rank {a} as {sizes[a][0]}"
                    return PeerError(cause, (b,), _ADVICE)
    for a in ranks:
        for b in ranks:
            if a != b and sizes[a][0][b] != sizes[b][1][a]:
                sent, expected = sizes[a][0][b], sizes[b][1][a]
                cause = f"rank {a} sends {sent} bytes of {name} to rank {b}, which expects {expected}"
                return PeerError(cause, (a, b), _ADVICE)
    raise AssertionError("sizes whose digests differ are the same")


@lru_cache(256)
def _digest(sizes: tuple[int, ...]) -> int:
    return _short(struct.pack(f"<{len(sizes)}q", *sizes))


@lru_cache(256)
def _pairs(me: int, ranks: tuple[int, ...], sizes: tuple[int, ...], outward: bool) -> int:
    """Return the sum of the digests of (sender, receiver, bytes) over all pieces but the rank's own.

    If the sizes match, the sum over all pieces that were sent is equal to the sum over all pieces that were received.
    """
    pairs = ((me, rank, size) if outward else (rank, me, size) for rank, size in zip(ranks, sizes, strict=True))
    return sum(_short(struct.pack("<3q", *pair)) for pair in pairs if pair[0] != pair[1]) % 2**64


def _short(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
