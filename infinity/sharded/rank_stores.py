"""Stores of several ranks. Each rank has its own store, in its own directory in each path of nvme.paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from infinity.errors import ResumeError, StoreNotEmptyError
from infinity.io import atomic_file
from infinity.io.directory import (
    HEADER_NAME,
    ReadDirectory,
    SwapDirectory,
    entries_of,
    generations_in,
    parts_text,
    pinned_in,
    remove_store,
    ways_on,
)
from infinity.io.generation_pins import pins_text, read_pins
from infinity.io.headers import header_in, members_of
from infinity.io.manifest import read_header
from infinity.io.rank_paths import NAME, is_rank_path, place_of
from infinity.ranks.paths import rank_path, rank_paths


def counts_in(path: Path) -> list[int]:
    """Return the number of ranks of each run that has stores in a path of nvme.paths, ascending; 1 for a single
    process.

    Raises:
        SwapIOError: the directory cannot be read.
    """
    return sorted({count for _, count in _stores_in(path)})


def steps_of(path: Path, count: int) -> set[int]:
    """Return the steps of the generations that all of `count` ranks have in a path of nvme.paths.

    Raises:
        SwapIOError: a directory cannot be read.
    """
    return set.intersection(*(set(generations_in(each)) for each in rank_paths(path, count)))


def furthest_in(path: Path) -> int:
    """Return the number of ranks of the run with the newest generation in a path of nvme.paths; 1 when there is none.

    Raises:
        SwapIOError: a directory cannot be read.
    """
    steps = {count: max(steps_of(path, count), default=-1) for count in counts_in(path)}
    return max(steps, key=lambda count: (steps[count], -count), default=1)


def stores_in(paths: Sequence[Path], count: int | None = None) -> list[list[Path]]:
    """Return the directories of each store in `paths`.

    Args:
        paths: all of nvme.paths, or the first.
        count: number of ranks of the run; 1: a single process; None: the run with the newest generation.

    Raises:
        ResumeError: a header cannot be read.
        SwapIOError: a directory cannot be read.
    """
    count = furthest_in(paths[0]) if count is None else count
    if count > 1:
        return [[rank_path(path, rank, count) for path in paths] for rank in range(count)]
    return [members_of(paths[0]) if len(paths) == 1 else list(paths)]


def clear_others(paths: Iterable[Path], count: int) -> None:
    """Remove the stores of runs with another number of ranks from nvme.paths.

    If a run can be resumed from any store in nvme.paths, with any number of ranks, nothing is removed.

    Raises:
        StoreNotEmptyError: a run can be resumed from a store; nothing was removed.
        StoreLockedError: a run uses a store.
        SwapIOError: a store cannot be removed.
    """
    places = [path for path in paths if path.is_dir()]
    _require_none_to_resume(places, count)
    others = [entry for path in places for entry, its in _stores_in(path) if its != count]
    for entry in others:
        directory = SwapDirectory(entry, create=False)
        try:
            directory.require_replaceable()
            directory.make_room()
        finally:
            directory.close()
        _remove_directory(entry)
    for path in places:
        # the ranks' stores need this directory, and the removal of a store may have removed it
        path.mkdir(mode=0o700, exist_ok=True)


def require_free(paths: Iterable[Path]) -> None:
    """Check that a new run of one process can use these nvme.paths. Nothing is changed.

    Raises:
        StoreNotEmptyError: a run can be resumed from a store in nvme.paths.
        StoreLockedError: a run uses a store.
        SwapIOError: a directory cannot be read.
    """
    places = [path for path in paths if path.is_dir()]
    for path in places:
        with closing(ReadDirectory(path)) as directory:
            directory.require_replaceable()
    _require_none_to_resume(places, 1)


def _require_none_to_resume(places: Iterable[Path], count: int) -> None:
    """Check that no run can be resumed from a store, except from the store of a single process if `count` is 1.

    Args:
        places: all of nvme.paths that exist.
        count: number of ranks of the new run.

    Raises:
        StoreNotEmptyError: a run can be resumed from a store.
        SwapIOError: a directory cannot be read.
    """
    for path in places:
        for entry, its in _stores_in(path):
            if its == count == 1:
                continue  # a store of this number of ranks is refused or replaced when it is opened
            if generations_in(entry) or pinned_in(entry):
                folders = any(pinned_in(each) for each, _ in _stores_in(path))
                raise StoreNotEmptyError(
                    f"{path} holds the checkpoint of an earlier run of {ranks_text(its)}. "
                    f"{ways_on(path, folders=folders)} To start over: give this run another directory in nvme.paths, "
                    f"or remove the old one with `infinity checkpoint remove {parts_text(path)}`."
                )


def clear_leftovers(paths: Sequence[Path], count: int) -> None:
    """Remove the stores of other numbers of ranks that are incomplete after an interrupted removal. Stores from which a
    run can be resumed are kept.

    Args:
        paths: all of nvme.paths. The first path has the manifests of the generations.
        count: number of ranks of this run.

    Raises:
        StoreLockedError: a run uses a store.
        SwapIOError: a file cannot be removed.
    """
    first = paths[0]
    left = [
        entry.relative_to(first)
        for entry, its in _stores_in(first)
        if its != count and not generations_in(entry) and not pinned_in(entry)
    ]
    remove_rank_stores([part for path in paths if (part := path / name).is_dir()] for name in left)


def _remove_directory(path: Path) -> None:
    """Remove a rank's directory, unless it has files of other owners."""
    if is_rank_path(path):
        with suppress(OSError):
            path.rmdir()


def stores_of(path: Path, run: str | None = None) -> list[Path]:
    """Return the directories of the stores in a path of nvme.paths.

    The store of a single process is in the path itself. With several ranks, the store of each rank is in a directory in
    the path.

    Args:
        path: one of nvme.paths.
        run: run whose stores are returned; None: return all stores.

    Raises:
        SwapIOError: the directory cannot be read.
        ResumeError: with `run`, a header cannot be read.
    """
    return [entry for entry, _ in _stores_in(path) if run is None or read_header(entry / HEADER_NAME).run == run]


def parts_of(paths: Sequence[Path], store: Path) -> list[Path]:
    """Return all directories of a store.

    Args:
        paths: the paths that the user has named: all of nvme.paths, or the first.
        store: the store's directory in the first path, or the first path itself.

    Raises:
        ResumeError: the errors of members_of.
    """
    return members_of(store) if len(paths) == 1 else [path / store.relative_to(paths[0]) for path in paths]


def remove_rank_stores(stores: Iterable[Sequence[Path]], before: Callable[[Path], None] = lambda _: None) -> int:
    """Remove the stores of several ranks, and the directories of these stores.

    The manifests of the first store are removed first, durably. After that the ranks have no generation from which a
    run can be resumed.

    Args:
        stores: the directories of each store.
        before: function that is called with the first directory of each store, while all stores are locked and before
            anything is removed.

    Returns:
        The number of freed bytes.

    Raises:
        StoreLockedError: a run uses a store; nothing was removed.
        SwapIOError: a file cannot be removed.
    """
    with ExitStack() as held:
        every = []
        for paths in stores:
            every.append([SwapDirectory(path, create=False) for path in paths])
            for directory in every[-1]:
                held.callback(_remove_directory, directory.path)
                held.callback(directory.close)
        for directories in every:
            before(directories[0].path)
        for directories in every:
            remove_manifests(directories[0])
        return sum(sum(remove_store(directories).values()) for directories in every)


def remove_manifests(directory: SwapDirectory) -> None:
    """Remove the manifests in a locked directory, durably.

    Raises:
        SwapIOError: a file cannot be removed.
    """
    for manifest in directory.generations().values():
        atomic_file.remove(manifest)
    atomic_file.sync_directory(directory.path)


def run_and_steps_in(paths: Sequence[Path]) -> tuple[str, list[int]]:
    """Return the run id of a rank's store, and the steps of its manifests, including those of pinned generations.

    If there is no store that can be read, the result is ("", []).
    """
    try:
        header = header_in(paths[0]).header if paths else None
    except ResumeError:
        header = None
    return ("", []) if header is None else (header.run, steps_in(paths[0]))


def steps_in(path: Path) -> list[int]:
    """Return the steps of the manifests in a store's first directory, including those of pinned generations.

    Raises:
        SwapIOError: the directory cannot be read.
    """
    return sorted({int(each.name.split("-")[1]) for each in pinned_in(path)} | set(generations_in(path)))


def remove_generations(path: Path) -> None:
    """Remove all manifests of a rank. The caller has checked that none of them belongs to a generation of all ranks.

    Raises:
        StoreLockedError: a run uses the store.
        SwapIOError: a file cannot be removed.
    """
    directory = SwapDirectory(path, create=False)
    try:
        remove_manifests(directory)
    finally:
        directory.close(keep=True)


def require_none_pinned(path: Path) -> None:
    """Check that no checkpoint folder pins a generation of a store that will be removed.

    Raises:
        ResumeError: a generation is pinned.
    """
    pins = read_pins(path)
    if pins:
        raise ResumeError(
            f"checkpoint folders pin generations in {path}, and another number of ranks cannot keep them: "
            f"{pins_text(pins)}. Unpin them with `infinity checkpoint unpin {place_of(path)} --folder FOLDER`, or "
            "resume with as many ranks as before."
        )


def ranks_text(count: int) -> str:
    """Return the number of ranks as text, for messages."""
    return f"{count} ranks" if count > 1 else "one process"


def _stores_in(path: Path) -> list[tuple[Path, int]]:
    """Return the directories with a store in a path of nvme.paths, each with the number of ranks of its run.

    The path may itself be one of these directories.
    """
    named = ((entry, NAME.fullmatch(entry.name)) for entry in sorted(entries_of(path)))
    found = [(path, 1), *((entry, int(match[2])) for entry, match in named if match)]
    return [(entry, count) for entry, count in found if (entry / HEADER_NAME).exists()]
