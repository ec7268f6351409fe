"""Scratch files: space on the disks of a store for data that belong to no generation.

A scratch file is removed from its directory as soon as it is open, so nothing of it is left when the process and its
forked children have ended, even if they are killed. The files grow in segments, each of which is striped over the
store's directories like the store itself.
"""

from __future__ import annotations

import errno
import os
import uuid
from dataclasses import dataclass

from infinity import _native
from infinity.errors import SwapIOError
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.engine import Transfer
from infinity.io.store import STRIPE_BYTES, SwapStore
from infinity.sizes import format_bytes, round_up

_SEGMENT_BYTES_MIN, _SEGMENT_BYTES_MAX = 64 << 20, 8 << 30


@dataclass(frozen=True)
class ScratchPlace:
    """Place of some data in a scratch file.

    Attributes:
        file: segment with the place.
        lease: bytes of the segment.
    """

    file: _native.File
    lease: Lease


class ScratchFiles:
    """Scratch files of one run.

    Args:
        store: store whose directories and stripes the files have.
        what: name of the data, for errors.
        io_class: priority class of the transfers.
    """

    def __init__(self, store: SwapStore, what: str, io_class: _native.IOClassName) -> None:
        self._store = store
        self._what = what
        self._io_class: _native.IOClassName = io_class
        self._segments: list[tuple[_native.File, list[_native.File], ArenaRegion]] = []

    def take(self, nbytes: int) -> ScratchPlace:
        """Return a place for `nbytes`, a multiple of 4 KiB. The files grow if they have no room.

        Raises:
            SwapIOError: a disk has no room, or a file cannot be made.
        """
        for file, _, space in self._segments:
            lease = space.try_lease(nbytes)
            if lease is not None:
                return ScratchPlace(file, lease)
        wanted = min(_SEGMENT_BYTES_MIN << len(self._segments), _SEGMENT_BYTES_MAX)
        try:
            return self._grow(nbytes, max(nbytes, wanted))
        except SwapIOError as error:
            if error.errno != errno.ENOSPC or nbytes >= wanted:
                raise
        return self._grow(nbytes, nbytes)

    def _grow(self, nbytes: int, size: int) -> ScratchPlace:
        """Make a segment of `size` bytes, and return a place of `nbytes` there."""
        size = round_up(size, STRIPE_BYTES)
        members: list[_native.File] = []
        try:
            for directory in self._store.directories:
                path = directory.path / f"scratch-{uuid.uuid4().hex}"
                members.append(_native.File(str(path), create=True, numa_node=directory.numa_node))
                os.unlink(path)
            file = members[0]
            if len(members) > 1:
                file = _native.File.striped(members, self._store.record.shares, self._store.record.stripe_bytes)
            file.preallocate(size)
        except OSError as error:
            for member in members:
                member.close()
            raise SwapIOError(
                f"reserving {format_bytes(size)}",
                path=" and ".join(str(directory.path) for directory in self._store.directories),
                state=self._what,
                nbytes=size,
                errno=error.errno or 0,
                detail=error.strerror or str(error),
            ) from error
        if self._store.checksums:
            file.keep_checksums(size)
        space = ArenaRegion(None, 0, size)
        self._segments.append((file, members, space))
        return ScratchPlace(file, space.lease(nbytes, self._what))

    def write(self, place: ScratchPlace, data: _native.Buffer, *, after: _native.IOFuture | None) -> Transfer:
        """Start to write to a place. The arguments and errors are the same as for SwapStore.write."""
        return self._of(self._store.engine.write(place.file, place.lease.offset, data, self._io_class, after=after))

    def read(self, place: ScratchPlace, into: _native.Buffer) -> Transfer:
        """Start to read what was written to a place. The arguments and errors are the same as for SwapStore.read."""
        return self._of(self._store.engine.read(place.file, place.lease.offset, into, self._io_class))

    def _of(self, future: _native.IOFuture) -> Transfer:
        return Transfer(future, state=self._what)

    def close(self) -> None:
        """Close the files, whose bytes are free then. No transfer may be in flight."""
        for file, members, _ in self._segments:
            file.close()
            for member in members:
                member.close()
        self._segments.clear()
