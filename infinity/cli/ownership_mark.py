"""Marks that say which run a directory beside an output belongs to.

The mark is a file in the directory that names the run. A run never replaces or removes files in a directory without its
own mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from infinity import files
from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.job import RunOrigin
from infinity.config import SwapConfig
from infinity.errors import ConfigError, printable
from infinity.io import atomic_file
from infinity.io.schema import DiskRecord, Name

_NAME = "run.infinity"
_BYTES_MAX = 64 << 10


class _OwnershipMark(DiskRecord):
    """The content of a mark.

    Attributes:
        run: id of the run that the directory belongs to.
        swap: the first of the run's nvme.paths; '-' if the run has none.
    """

    run: Name
    swap: Name


@dataclass(frozen=True)
class DirectoryOwner:
    """A run as the owner of directories.

    Attributes:
        run: id of the run (job.RunOrigin.run).
        swap: the first of the run's nvme.paths; '-' if the run has none.
        begins_anew: whether the user asked to resume a run, but no generation was durable yet, so that the run begins
            at step 0. Such a run also owns the directories of an earlier run with the same `swap`.
    """

    run: str
    swap: str
    begins_anew: bool

    @classmethod
    def of(cls, options: FinetuneOptions, config: SwapConfig, origin: RunOrigin, *, resumes: bool) -> DirectoryOwner:
        swap = str(config.nvme.paths[0].expanduser().absolute()) if config.nvme.paths else "-"
        return cls(origin.run, swap, options.resume is not None and not resumes)

    def require(self, directory: Path, what: str, instead: str) -> None:
        """Check that a directory is missing, empty, or owned by this run.

        Args:
            directory: the directory.
            what: description of the directory's content, for the error message.
            instead: option that chooses another directory, for the error message.

        Raises:
            ConfigError: the directory is not empty, and not owned by this run.
        """
        if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
            return
        mark = _mark_in(directory)
        ours = mark is not None and (mark.run == self.run or (self.begins_anew and mark.swap == self.swap))
        if not ours:
            raise ConfigError(
                f"{printable(directory)}, for {what}, is not empty, and was not made by this run: choose another "
                f"{instead}, or remove the directory"
            )

    def make(self, directory: Path) -> None:
        """Create the directory, and write this run's mark into it.

        Raises:
            OSError, InfinityError: the directory cannot be created, or the mark cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        found = _mark_in(directory)
        if found is None or found.run != self.run:
            mark = _OwnershipMark(run=self.run, swap=self.swap)
            atomic_file.write_file(directory / _NAME, [mark.model_dump_json().encode()])


def _mark_in(directory: Path) -> _OwnershipMark | None:
    try:
        return _OwnershipMark.model_validate_json(files.read_regular(directory / _NAME, _BYTES_MAX))
    except (OSError, ValidationError):
        return None
