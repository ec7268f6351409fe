"""Directories beside an output that belong to one run: a mark in them says to which. Nothing in a directory of anybody
else is replaced or removed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from infinity import files
from infinity.cli.job import Origin
from infinity.config import SwapConfig
from infinity.errors import ConfigError, printable
from infinity.io import durable
from infinity.io.schema import Name, Record

_NAME = "run.infinity"
_BYTES_MAX = 64 << 10


class _Mark(Record):
    """Attributes:
    run: that the directory belongs to.
    swap: the first of its nvme.paths; '-' where it has none.
    """

    run: Name
    swap: Name


@dataclass(frozen=True)
class Owner:
    """A run that has such directories.

    Attributes:
        run: job.Origin.run.
        swap: the first of its nvme.paths.
        begins_anew: it was asked to go on, and nothing was durable yet: what the same command left counts as its own.
    """

    run: str
    swap: str
    begins_anew: bool

    @classmethod
    def of(cls, options: argparse.Namespace, config: SwapConfig, origin: Origin, *, resumes: bool) -> Owner:
        swap = str(config.nvme.paths[0].expanduser().absolute()) if config.nvme.paths else "-"
        return cls(origin.run, swap, options.resume is not None and not resumes)

    def require(self, directory: Path, what: str, instead: str) -> None:
        """Raises ConfigError unless the directory is missing, empty, or this run's.

        Args:
            what: is in it, for the message.
            instead: what to choose another one with.
        """
        if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
            return
        mark = _mark_in(directory)
        ours = mark is not None and (mark.run == self.run or (self.begins_anew and mark.swap == self.swap))
        if not ours:
            raise ConfigError(
                f"{printable(directory)}, for {what}, is not an empty directory, and was not made by this run: choose "
                f"another {instead}, or remove it"
            )

    def make(self, directory: Path) -> None:
        """Make the directory, and mark it. Raises OSError, InfinityError."""
        directory.mkdir(parents=True, exist_ok=True)
        found = _mark_in(directory)
        if found is None or found.run != self.run:
            mark = _Mark(run=self.run, swap=self.swap)
            durable.write_file(directory / _NAME, [mark.model_dump_json().encode()])


def _mark_in(directory: Path) -> _Mark | None:
    try:
        return _Mark.model_validate_json(files.read_regular(directory / _NAME, _BYTES_MAX))
    except (OSError, ValidationError):
        return None
