"""`infinity checkpoint`: list, verify, export, unpin or remove the generations in a swap directory."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from infinity import _native
from infinity.checkpoint.generation import open_stores
from infinity.cli.generation_pins import generations_with, let_go, unpin
from infinity.errors import (
    ConfigError,
    DamagedFileError,
    ManifestError,
    ModelError,
    NewerVersionError,
    NoStoreError,
    ResumeError,
    printable,
)
from infinity.integrations.checkpoint_folders import remove_empty
from infinity.io.directory import HEADER_NAME, SWAP_NAME, SwapDirectory, generations_in, pinned_in, remove_store
from infinity.io.generation_pins import GenerationPin, read_pins
from infinity.io.generation_scan import GenerationDamage, extents_of, verify
from infinity.io.headers import header_in, is_there
from infinity.io.manifest import Manifest, SwapFileHeader, read_kept
from infinity.io.rank_paths import is_rank_path
from infinity.io.store import SwapStore
from infinity.ranks.paths import rank_paths
from infinity.sharded.rank_stores import counts_in, parts_of, remove_rank_stores, steps_of
from infinity.sizes import format_bytes

_BUFFER_BYTES = 32 << 20


def checkpoint(options: argparse.Namespace) -> int:
    """Run one of list, verify, export, unpin and remove.

    Return the exit code, which is 1 if a file or a generation is damaged.

    Raises:
        ResumeError: a directory has no store.
        StoreLockedError: a run is using the store.
    """
    paths = [path.expanduser() for path in options.directory]
    if options.act == "list":
        return max([_list_all(path) for path in paths])
    if options.act == "verify":
        return _verify(paths, options.step)
    if options.act == "export":
        from infinity.checkpoint.export import export_checkpoint

        step = export_checkpoint(paths, options.output, step=options.step, also=_write_tokenizer)
        _say(f"generation {step} exported to {options.output}")
        return 0
    if options.act == "unpin":
        return unpin(paths, options.folder or [], all_gone=options.all_gone)
    _remove(paths, pinned=options.pinned)
    _remove_references(paths)
    return 0


def _list_all(path: Path) -> int:
    """List the stores of all ranks in a directory, or the store of a single process. Return 1 if a store is damaged."""
    counts = counts_in(path)
    damaged = [_list(path)] if not counts or 1 in counts else []
    for count in (each for each in counts if each > 1):
        damaged += [_list(each) for each in rank_paths(path, count) if each.is_dir()]
        steps = ", ".join(map(str, sorted(steps_of(path, count)))) or "none"
        pinned = any(pinned_in(each) for each in rank_paths(path, count) if each.is_dir())
        _say(
            f"{path}: generations that are complete on all {count} ranks: {steps}"
            + (", but checkpoint folders pin older generations" if pinned else "")
        )
    return max(damaged)


def _list(path: Path) -> int:
    """List the generations of a store, and return 1 if the store is damaged.

    Only headers and manifests are read, so a run may be using the store at the same time.
    """
    of_store = header_in(path)
    header = of_store.header
    _say(f"{path}: run {header.run[:8]}, begun {header.created}, {format_bytes(header.nbytes)} reserved")
    if header.mode == "in place":
        print("the states are updated in place, without commits: no run can be resumed")
        return 0
    damaged = 0
    if not (path / SWAP_NAME).exists():
        damaged += 1
        _say(f"damaged: {SWAP_NAME} is missing, so no run can be resumed; `remove` deletes the other files")
    if of_store.rebuilt:
        damaged += 1
        _say(f"damaged: {of_store.rebuilt}")
    damaged += _list_generations(path, header.run)
    if not is_there(header, path):
        _say(f"its path was {header.members[header.member]} when the store was made: the store was copied or moved")
    if header.member:
        _say(
            f"part {header.member + 1} of {len(header.members)} of a store; its generations are in {header.members[0]}"
        )
    elif not generations_in(path):
        print("no generation was committed yet")
    return 1 if damaged else 0


def _list_generations(path: Path, run: str) -> int:
    """List the generations that are kept or pinned, and return the number of damaged files."""
    pins, damaged = list[GenerationPin](), 0
    try:
        pins = read_pins(path)
    except ManifestError as error:
        damaged += 1
        _say(f"damaged: {error}")
    for number, manifest, who in generations_with(pins, path):
        ((_, found),) = read_kept({number: manifest}, run)
        if isinstance(found, NewerVersionError):
            _say(f"generation {number:>8}  newer: {found}{who}")
        elif isinstance(found, ManifestError):
            damaged += 1
            _say(f"generation {number:>8}  damaged: {found}{who}")
        else:
            nbytes = sum(extent.nbytes for extent in found.extents)
            _say(f"generation {number:>8}  committed {found.created}, {format_bytes(nbytes)} of states{who}")
    return damaged


def _say(line: str) -> None:
    """Print a line that may quote names from files."""
    print(printable(line))


def _verify(paths: list[Path], step: int | None) -> int:
    memory = _native.Arena(_BUFFER_BYTES).view(0, _BUFFER_BYTES)
    with open_stores(paths) as stores:
        damaged = [_verify_store(store, step, memory) for store in stores]
    return max(damaged)


def _verify_store(store: SwapStore, step: int | None, memory: memoryview) -> int:
    path = store.directories[0].path
    damaged, checked = int(not store.proven), 0
    of_rank = f"{path.name}: " if is_rank_path(path) else ""
    for number, manifest, _ in generations_with(read_pins(path), path):
        if step is not None and number != step:
            continue
        checked += 1
        ((_, found),) = read_kept({number: manifest}, store.run)
        problems = [str(found)] if isinstance(found, ManifestError) else list(map(str, _damage(store, found, memory)))
        damaged += bool(problems)
        for problem in problems:
            _say(f"{'newer' if isinstance(found, NewerVersionError) else 'damaged'}: {problem}")
        if not problems and isinstance(found, Manifest):
            nbytes = sum(extent.nbytes for extent in found.extents)
            with_sums = "every byte is as it was written" if found.sums is not None else "readable; it has no checksums"
            print(f"{of_rank}generation {number}: {format_bytes(nbytes)} in {len(found.extents)} extents, {with_sums}")
    if not checked:
        raise ResumeError(f"{path} has no generation{'' if step is None else f' {step}'} to verify")
    return 1 if damaged else 0


def _damage(store: SwapStore, manifest: Manifest, memory: memoryview) -> Iterator[GenerationDamage]:
    outside = [record for record in manifest.extents if record.offset + record.nbytes > store.nbytes]
    if outside:
        record = outside[0]
        where = store.file.path, record.offset, record.nbytes
        yield GenerationDamage(record, manifest.step, *where, "lies outside the store")
        return
    yield from verify(store, extents_of(manifest), manifest, memory)


def _write_tokenizer(directory: Path, tracked: dict[str, Any]) -> None:
    """Write the tokenizer of a run of `infinity finetune` to an exported model.

    The next run can then begin from the model.

    Args:
        directory: directory of the exported model.
        tracked: states of the tracked objects in the exported generation.
    """
    from infinity.cli import job
    from infinity.cli.tokenizer import load_tokenizer

    found = job.model_of(tracked)
    if found is None:
        return
    model, revision = found
    try:
        named = {} if revision is None else {"revision": revision}
        load_tokenizer(model, trust_remote_code=False, **named).save_pretrained(directory)
    except ModelError as error:
        print(
            f"warning: the exported checkpoint has no tokenizer. {error}. Copy the tokenizer's files into its "
            "directory, or give --model with the directory of these files to a run that starts from the exported "
            "checkpoint",
            file=sys.stderr,
        )


def _remove(paths: list[Path], *, pinned: bool) -> None:
    """Remove a store.

    If the removal is interrupted, it can be repeated, because the files that identify the store are removed last. A
    part that is already removed is not an error.

    Args:
        paths: all directories of the store.
        pinned: whether to remove the store even if existing checkpoint folders pin generations of the store.
    """
    counts = counts_in(paths[0])
    for count in (count for count in counts if count > 1):
        there = [each for each in rank_paths(paths[0], count) if (each / HEADER_NAME).exists()]
        stores = [[part for part in parts_of(paths, each) if part.is_dir()] for each in there]
        freed = remove_rank_stores(stores, before=lambda path: let_go(path, pinned=pinned))
        _say(f"{paths[0]}: the stores of {len(there)} of {count} ranks are removed, {format_bytes(freed)} freed")
    if counts and 1 not in counts:
        return
    _require_one_store(paths)
    with ExitStack() as held:
        directories = []
        for path in filter(Path.is_dir, paths):
            directories.append(SwapDirectory(path, create=False))
            held.callback(directories[-1].close)
        for path in paths:
            let_go(path, pinned=pinned)
        for path, freed in remove_store(directories).items():
            _say(f"{path}: {format_bytes(freed)} freed")


def _remove_references(paths: Sequence[Path]) -> None:
    """Remove the weights of reference models that a killed run has left in subdirectories of its store."""
    left = sorted(each.parent for path in paths for each in path.glob(f"reference-*/**/{HEADER_NAME}"))
    if left:
        _say(f"references that a killed run left: {format_bytes(remove_rank_stores([each] for each in left))} freed")
    remove_empty(each for path in paths for each in path.glob("reference-*"))


def _require_one_store(paths: Sequence[Path]) -> None:
    """Check that the paths are exactly the directories of one store. Some parts of the store may already be removed.

    Raises:
        NoStoreError: a directory has no store, and is not a directory of the store that the other directories have.
        ConfigError: directories of the store may be missing, or the store of a directory cannot be determined.
        ManifestError: a header cannot be understood.
    """
    found = {path: _header_or_problem(path) for path in paths}
    known = {path: each for path, each in found.items() if isinstance(each, SwapFileHeader)}
    where = next((path for path, each in known.items() if len(each.members) == len(found)), None)
    if where is None:
        raise _refusal(found, known)
    store = known[where]
    moved = not is_there(store, where)
    places = {os.path.realpath(name) for name in store.members}
    for path, each in found.items():
        is_part = isinstance(each, SwapFileHeader) and each.run == store.run
        is_named = os.path.realpath(path) in places
        if is_part or is_named or (moved and not isinstance(each, SwapFileHeader)):
            continue
        if isinstance(each, NoStoreError):
            raise each
        raise ConfigError(
            f"{path} is not a part of the store in {where}. When that store was made, its parts were "
            f"{' '.join(store.members)}."
        )
    if len(found) == 1 and store.mode == "generations" and not generations_in(where):
        _require_own(where, store)


def _header_or_problem(path: Path) -> SwapFileHeader | DamagedFileError | NoStoreError:
    try:
        return header_in(path).header
    except (DamagedFileError, NoStoreError) as error:
        return error


def _refusal(
    found: dict[Path, SwapFileHeader | DamagedFileError | NoStoreError], known: dict[Path, SwapFileHeader]
) -> NoStoreError | ConfigError:
    """Return the error for directories none of which has the header of a store with this number of parts.

    Args:
        found: for each directory its header, or the problem with its header.
        known: the headers, by directory, of the directories that have a header.
    """
    nothing = next((each for each in found.values() if isinstance(each, NoStoreError)), None)
    if nothing is not None:
        return nothing
    if known:
        path, header = next(iter(known.items()))
        return ConfigError(
            f"{path} is a part of a store: name the directories of all its {len(header.members)} parts. When the store "
            f"was made, they were {' '.join(header.members)}."
        )
    path, problem = next(iter(found.items()))
    return _nobody_knows(path, str(problem))


def _require_own(path: Path, header: SwapFileHeader) -> None:
    """Check that the header of a store without generations was not copied from another store.

    Raises:
        ConfigError: the header may have been copied.
    """
    swap = path / SWAP_NAME
    if not swap.exists() or (is_there(header, path) and swap.stat().st_size >= header.nbytes):
        return
    problem = (
        f"the directory of {path / HEADER_NAME} has no generation, so nothing shows that {SWAP_NAME} belongs to this "
        "header"
    )
    raise _nobody_knows(path, problem)


def _nobody_knows(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{problem}. {path} may be a part of a store that can still be resumed: name the store's other directories "
        f"too. If there are no others, delete {HEADER_NAME} and {SWAP_NAME} in {path} yourself."
    )
