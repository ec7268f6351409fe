"""Removal of the store of a run whose output is complete.

A file, the note, replaces the store. From the note, a later `--resume` knows where the output is.

[Note: the order]
The output is written to a directory beside its final place, fsynced and renamed, and the parent directory is fsynced
(checkpoint/atomic_directory.py). After that the note is written and fsynced. The store is removed last. After a crash
before the removal, both the output and the store exist. If the note also exists, the next --resume removes the store.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from infinity import files
from infinity.checkpoint.save_adapters import CONFIG_NAME as ADAPTERS_NAME
from infinity.cli.suggested_command import command
from infinity.errors import InfinityError, ResumeError, printable
from infinity.io import atomic_file
from infinity.io.directory import FINISHED_NAME, generations_in, remove_store_of
from infinity.io.headers import members_of
from infinity.io.schema import Count, DiskRecord, Name, first_problem
from infinity.io.store import now
from infinity.sharded.rank_stores import remove_rank_stores, stores_of
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

_NOTE_BYTES_MAX = 64 << 10


class FinishedRunNote(DiskRecord):
    """The note that a finished run writes to the first of its nvme.paths.

    Attributes:
        run: run id of the store.
        output: directory of the complete output.
        steps: number of optimizer steps of the run.
        ended: date of the end, ISO 8601.
        epochs: number of passes over the data; None if the number of steps was given instead.
    """

    run: Name
    output: Name
    steps: Count
    ended: Name
    epochs: Count | None = None


def finish(paths: Sequence[Path], run: str, output: Path, steps: int, epochs: int | None) -> None:
    """Write the note of a run whose output is complete, and remove the run's store, or the stores of all ranks.

    A failure is printed to stderr and is not an error, because the output is complete.

    Args:
        paths: the run's nvme.paths.
        run: run id of the store.
        output: directory of the complete output.
        steps: number of optimizer steps of the run.
        epochs: number of passes over the data; None if the number of steps was given instead.
    """
    first = paths[0].expanduser()
    note = FinishedRunNote(run=run, output=str(output), steps=steps, ended=now(), epochs=epochs)
    try:
        atomic_file.write_file(first / FINISHED_NAME, [note.model_dump_json().encode()])
        freed = _remove(run, paths)
    except (InfinityError, OSError) as error:
        again = command("checkpoint", "remove", *paths)
        print(
            printable(f"warning: the finished run's store was not removed: {error} Remove it with: {again}"),
            file=sys.stderr,
        )
        return
    print(
        printable(
            f"the store in {first} is removed, {format_bytes(freed)} freed (--keep-store keeps it); its file "
            f"{FINISHED_NAME} tells a later --resume where the output is, and a new run there removes the file"
        )
    )


def _remove(run: str, paths: Sequence[Path]) -> int:
    """Remove the store of a run, or the stores of its ranks. Return the freed bytes."""
    first = paths[0].expanduser()
    of_ranks = [store.name for store in stores_of(first, run) if store != first]
    stores = [[path.expanduser() / name for path in paths] for name in of_ranks]
    there = [[part for part in parts if part.is_dir()] for parts in stores]
    return remove_rank_stores(there) + remove_store_of(run, paths)


def nothing_to_go_on_with(options: argparse.Namespace, directory: Path) -> bool:
    """Return whether --resume names a finished run for which nothing is left to do.

    If it does, print where the output of the run is, and remove the parts of the run's store that a crash has left.

    Args:
        options: options of the command line.
        directory: the first of the run's nvme.paths.

    Raises:
        ResumeError: the store is already removed, and either the options ask for more steps or another output, or the
            output is missing.
        StoreLockedError, SwapIOError: the remaining parts of the store cannot be removed.
    """
    note = _note_in(directory)
    if note is None:
        return False
    left = stores_of(directory, note.run)
    longer = options.epochs is not None and options.epochs > (note.epochs or 0)
    more = longer or (options.steps is not None and options.steps > note.steps)
    elsewhere = options.output is not None and options.output.expanduser().absolute() != Path(note.output)
    if more or elsewhere:
        if options.resume and not left:
            raise ResumeError(
                f"nothing to resume in {directory}: the run ended after step {note.steps}, and its store is removed. "
                + _result(Path(note.output))
                + " With --keep-store a run can be resumed after its end."
            )
        return False
    if not Path(note.output).is_dir():
        if left:
            return False  # the store still exists, so the output can be written again
        raise ResumeError(
            f"nothing to resume in {directory}: the run ended after step {note.steps}, its store is removed, and its "
            f"output is no longer in {note.output}."
        )
    print(
        printable(f"the run ended after step {note.steps}, and nothing is left to do. Its output is in {note.output}")
    )
    if left and not options.keep_store:
        parts = members_of(left[0])
        freed = _remove(note.run, parts if left[0] == directory else [part.parent for part in parts])
        print(printable(f"the remaining files of its store are removed, {format_bytes(freed)} freed"))
    return True


def _result(output: Path) -> str:
    if (output / ADAPTERS_NAME).is_file():
        return f"Its adapters are in {output}."
    return f"Its model is in {output}: a new run starts from it with --model."


def _note_in(directory: Path) -> FinishedRunNote | None:
    """Return the note in a directory; None if the directory has no note, or a note about another store."""
    path = directory / FINISHED_NAME
    try:
        note = FinishedRunNote.model_validate_json(files.read_regular(path, _NOTE_BYTES_MAX))
        newest = {store: next(iter(generations_in(store)), 0) for store in stores_of(directory)}
        mine = stores_of(directory, note.run)
        of_others = [store for store in newest if store not in mine and (newest[store] or store == directory)]
        further = [store for store in newest if newest[store] > note.steps]
        return None if of_others or further else note
    except FileNotFoundError:
        return None
    except ValidationError as error:
        logger.warning("%s is ignored: %s", printable(path), first_problem(error))
    except (OSError, ResumeError) as error:
        logger.warning("%s is ignored: %s", printable(path), error)
    return None
