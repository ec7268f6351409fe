"""Possible states of the disk after a power cut, computed from a run's journal and a moment in this journal.

[Note: what a power cut may leave]
Only confirmed operations are certain:
* A write to a swap file, if it had ended before an fdatasync of that file began. The fdatasync must have succeeded, and
  the run must have waited for the fdatasync before the cut. Otherwise the fdatasync might have taken longer on another
  disk.
* The content of a small file, if an fsync of the file ended before the cut.
* A name in a directory, if the name was made or removed before an fsync of that directory began, and the fsync ended
  before the cut.
Every other operation that had begun before the cut may be on the disk completely, in part, or not at all, independently
and in any order. Of an uncertain write, any subset of its sectors or pages may be on the disk. An uncertain small file
may have any length up to its full length, with zeros from any offset on. Each name may refer to any content that it had
since it was last certain.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.job import ACT, AWAITED, LIFE, PROMISE, RECORD, kind_of

PAGE_BYTES = 4096
NEVER = 1 << 62


@dataclass(frozen=True)
class Record:
    """One record of the journal; `at` is its index.

    Attributes:
        letter: kind of the record; see job.py and csrc/aio/backend.hpp.
        path, target: paths of a small file.
        moment: "begin rename", …
    """

    at: int
    letter: bytes
    number: int
    result: int
    offset: int
    data: bytes
    moment: str
    path: Path
    target: Path


def read_journal(path: Path) -> list[Record]:
    blob, at, records = path.read_bytes(), 0, []
    while at < len(blob):
        letter, number, result, offset, data_bytes, path_bytes = RECORD.unpack_from(blob, at)
        at += RECORD.size
        names, at = blob[at : at + path_bytes].decode(), at + path_bytes
        data, at = blob[at : at + data_bytes], at + data_bytes
        moment, name, target = names.split("\0") if letter == ACT else ("", names, "")
        records.append(Record(len(records), letter, number, result, offset, data, moment, Path(name), Path(target)))
    return records


@dataclass
class Write:
    """A write. `ended` is the index of the record that says that the write has ended."""

    offset: int
    data: bytes
    ended: int = NEVER


@dataclass
class Content:
    """Content of a small file. `certain`: whether an fsync of the file has ended."""

    data: bytes = b""
    certain: bool = False


@dataclass
class Name:
    """Contents that a name referred to, oldest first: a file's content, or None for no file.

    Each content has the index of the record that ended the operation by which the name got this content. The first
    content is certain. An fsync of the directory removes older contents from `past`.
    """

    past: list[tuple[Content | None, int]] = field(default_factory=lambda: [(None, -1)])

    @property
    def now(self) -> Content | None:
        return self.past[-1][0]

    def become(self, content: Content | None) -> None:
        self.past.append((content, NEVER))

    def end(self, at: int) -> None:
        self.past[-1] = (self.past[-1][0], at)

    def synced(self, since: int) -> None:
        """Apply an fsync of the directory that began at record `since` and has ended."""
        certain = max(index for index, (_, ended) in enumerate(self.past) if ended < since)
        del self.past[:certain]


class Moment:
    """The certain operations and the begun operations when the first `cut` records of the journal had been written.

    Attributes:
        promised: the newest generation that the run considered durable.
        begun: the newest generation that may be on the disk.
    """

    def __init__(self, records: list[Record], cut: int, sizes: dict[Path, int]) -> None:
        self.promised = self.begun = 0
        self._sizes = sizes
        self._names: dict[Path, Name] = defaultdict(Name)
        self._writes: dict[Path, list[Write]] = defaultdict(list)
        # for each swap file, the record at which the last sync began
        self._synced: dict[Path, int] = defaultdict(lambda: -1)
        # the same for a sync that has ended, but for which the run has not waited yet
        self._ended: dict[Path, int] = {}
        self._open: dict[tuple[bytes, int], Write | int] = {}
        # The directories of the store, and the checkpoint folders.
        self._directories = {path.parent for path in sizes}
        self._directories |= {record.target.parent for record in records if kind_of(record.target) == "marker"}
        for path in self._directories:
            self._names[path].become(Content(certain=True))  # the directory was made before all other files
            self._names[path].end(-1)
        for record in records[:cut]:
            self._take(record)

    def _take(self, record: Record) -> None:
        if record.letter == ACT:
            self._act(record)
        elif record.letter == PROMISE:
            self.promised = max(self.promised, record.number)
        elif record.letter == AWAITED:
            self._synced.update(self._ended)
        elif record.letter == LIFE:
            # Operations that a killed process left pending stay uncertain until their range is overwritten.
            self._open.clear()
            self._ended.clear()
        elif record.letter == b"W":
            write = Write(record.offset, record.data)
            self._writes[record.path].append(write)
            self._open[b"w", record.number] = write
        elif record.letter == b"S":
            self._open[b"s", record.number] = record.at
        else:
            self._end(record, self._open.pop((record.letter, record.number)))

    def _end(self, record: Record, begun: Write | int) -> None:
        if isinstance(begun, Write):
            begun.ended = record.at
        elif record.result == 0:
            self._ended[record.path] = begun

    def _act(self, record: Record) -> None:
        when, _, what = record.moment.partition(" ")
        handle = {"create": self._create, "write": self._write, "fsync": self._fsync, "rename": self._rename}
        handle.get(what, self._unlink)(record, when == "begin")

    def _create(self, record: Record, begins: bool) -> None:
        name = self._names[record.path]
        if begins:
            name.become(Content())
        else:
            name.end(record.at)

    def _write(self, record: Record, begins: bool) -> None:
        content = self._names[record.path].now
        if begins and content is not None:
            content.data = record.data

    def _rename(self, record: Record, begins: bool) -> None:
        source, target = self._names[record.path], self._names[record.target]
        if begins:
            target.become(source.now)
            source.become(None)
            if kind_of(record.target) == "manifest":
                self.begun = max(self.begun, int(record.target.name.split("-")[1][:12]))
        else:
            target.end(record.at)
            source.end(record.at)

    def _unlink(self, record: Record, begins: bool) -> None:
        name = self._names[record.path]
        if begins:
            name.become(None)
            return
        name.end(record.at)
        if record.path in self._sizes:  # a new swap file is created immediately
            name.become(Content(certain=True))
            name.end(record.at)

    def _fsync(self, record: Record, begins: bool) -> None:
        if begins:
            self._open[b"f", 0] = record.at
            return
        began = self._open.pop((b"f", 0))
        found = self._names.get(record.path)
        if found is not None and found.now is not None and record.path not in self._directories:
            found.now.certain = True
            return
        for path, name in self._names.items():
            if path.parent == record.path:
                name.synced(began)

    def image(self, chance: random.Random) -> dict[Path, bytes]:
        """Return one of the possible states of the disk: the contents of every file by path."""
        there = {path: chance.choice(name.past)[0] for path, name in self._names.items()}
        files: dict[Path, bytes] = {}
        for path, content in there.items():
            if content is None or path in self._directories or there[path.parent] is None:
                continue
            files[path] = self._swap(path, chance) if path in self._sizes else small_file(content, chance)
        return files

    def _swap(self, path: Path, chance: random.Random) -> bytes:
        size, synced = self._sizes[path], self._synced[path]
        if synced < 0:  # even the length is uncertain
            size = chance.choice([0, size, chance.randrange(size) // PAGE_BYTES * PAGE_BYTES])
        blob = bytearray(self._sizes[path])
        for write in self._writes[path]:
            for begin, end in [(0, len(write.data))] if write.ended < synced else pieces(len(write.data), chance):
                blob[write.offset + begin : write.offset + end] = write.data[begin:end]
        return bytes(blob[:size])


def small_file(content: Content, chance: random.Random) -> bytes:
    """Return a content that a small file may have after the power cut."""
    if content.certain:
        return content.data
    length = chance.choice([0, len(content.data), chance.randint(0, len(content.data))])
    written = chance.choice([length, chance.randint(0, length)])
    return content.data[:written] + bytes(length - written)


def pieces(nbytes: int, chance: random.Random) -> Iterator[tuple[int, int]]:
    """Yield the parts of a write that are on the disk after the power cut: all parts, no part, or any of the write's
    pages or sectors.
    """
    kind = chance.choice(["none", "all", "pages", "sectors"])
    if kind == "none":
        return
    piece = {"all": nbytes, "pages": PAGE_BYTES, "sectors": 512}[kind]
    for begin in range(0, nbytes, piece):
        if kind == "all" or chance.random() < 0.5:
            yield begin, min(begin + piece, nbytes)


def put(files: dict[Path, bytes], disk: Path) -> None:
    """Make `disk` contain these files and nothing else."""
    shutil.rmtree(disk)
    disk.mkdir()
    for path, data in files.items():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(data)
