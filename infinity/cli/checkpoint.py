"""`infinity checkpoint`: what generations a swap directory has, whether they are whole, a copy of one, or their end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity import _native
from infinity.checkpoint.generation import opened
from infinity.errors import ConfigError, DamagedFileError, ManifestError, ModelError, ResumeError
from infinity.io.directory import HEADER_NAME, SWAP_NAME, SwapDirectory, generations_in
from infinity.io.generations import Damage, extents_of, verify
from infinity.io.headers import header_in
from infinity.io.manifest import Manifest, read_kept
from infinity.io.store import SwapStore
from infinity.sizes import format_bytes

_BUFFER_BYTES = 32 << 20


def checkpoint(options: argparse.Namespace) -> int:
    """Run one of list, verify, export and remove; returns the exit code: 1 when something is damaged.

    Raises:
        ResumeError: the directory holds no store.
        StoreLockedError: a run is using it.
    """
    paths = [path.expanduser() for path in options.directory]
    if options.act == "list":
        return max([_list(path) for path in paths])
    if options.act == "verify":
        return _verify(paths, options.step)
    if options.act == "export":
        from infinity.checkpoint.export import export_checkpoint

        step = export_checkpoint(paths, options.output, step=options.step, also=_write_tokenizer)
        print(f"generation {step} exported to {options.output}")
        return 0
    return _remove(paths)


def _list(path: Path) -> int:
    """Only the manifests are read, and a run may be using the store meanwhile."""
    of_store = header_in(path)
    header = of_store.header
    print(f"{path}: run {header.run[:8]}, begun {header.created}, {format_bytes(header.nbytes)} reserved")
    if header.mode == "in place":
        print("updated in place (commit_every: 0): nothing can be resumed")
        return 0
    damaged = 0
    if of_store.rebuilt:
        damaged += 1
        print(f"damaged: {of_store.rebuilt}")
    for number, found in read_kept(generations_in(path), header.run):
        if isinstance(found, ManifestError):
            damaged += 1
            print(f"generation {number:>8}  damaged: {found}")
        else:
            nbytes = sum(extent.nbytes for extent in found.extents)
            print(f"generation {number:>8}  committed {found.created}, {format_bytes(nbytes)} of states")
    if header.member:
        print(
            f"part {header.member + 1} of {len(header.members)} of a store; its generations are in {header.members[0]}"
        )
    elif not generations_in(path):
        print("no generation was committed yet")
    return 1 if damaged else 0


def _verify(paths: list[Path], step: int | None) -> int:
    with opened(paths) as store:
        memory = _native.Arena(_BUFFER_BYTES).view(0, _BUFFER_BYTES)
        damaged, checked = int(not store.proven), 0
        for number, found in read_kept(store.directories[0].generations(), store.run):
            if step is not None and number != step:
                continue
            checked += 1
            problems = (
                [str(found)] if isinstance(found, ManifestError) else list(map(str, _damage(store, found, memory)))
            )
            damaged += bool(problems)
            for problem in problems:
                print(f"damaged: {problem}")
            if not problems and isinstance(found, Manifest):
                nbytes = sum(extent.nbytes for extent in found.extents)
                with_sums = (
                    "every byte as it was written" if found.sums is not None else "readable; it has no checksums"
                )
                print(f"generation {number}: {format_bytes(nbytes)} in {len(found.extents)} extents, {with_sums}")
        if not checked:
            raise ResumeError(f"{paths[0]} has no generation{'' if step is None else f' {step}'} to verify")
    return 1 if damaged else 0


def _damage(store: SwapStore, manifest: Manifest, memory: memoryview) -> Iterator[Damage]:
    outside = [record for record in manifest.extents if record.offset + record.nbytes > store.nbytes]
    if outside:
        record = outside[0]
        yield Damage(
            record.unit, record.group, record.state, manifest.step, store.file.path, record.offset, record.nbytes,
            "lies outside the store",
        )  # fmt: skip
        return
    yield from verify(store, extents_of(manifest), manifest, memory)


def _write_tokenizer(directory: Path, tracked: dict[str, Any]) -> None:
    """Beside the model of a run of `infinity finetune`, so that the copy is all that a next run needs."""
    from infinity.cli import job
    from infinity.cli.tokenizer import load_tokenizer

    model = job.model_of(tracked)
    if model is None:
        return
    try:
        load_tokenizer(model).save_pretrained(directory)
    except ModelError as error:
        print(
            f"warning: the copy has no tokenizer. {error}. Copy the tokenizer's files into it, or give --model with "
            "the directory that has them to a run that begins from the copy",
            file=sys.stderr,
        )


def _remove(paths: list[Path]) -> int:
    for path in paths:
        _require_all_named(path, paths)
    for path in reversed(paths):  # the first says of the others whose they are
        directory = SwapDirectory(path, create=False)
        try:
            freed = directory.swap_path.stat().st_size if directory.swap_path.exists() else 0
            directory.remove_all()
            print(f"{path}: {format_bytes(freed)} freed")
        finally:
            directory.close()
    return 0


def _require_all_named(path: Path, paths: list[Path]) -> None:
    """Raises ResumeError where `path` holds no store, ConfigError where `paths` may not be all directories of it."""
    try:
        members = header_in(path).header.members
    except DamagedFileError as error:
        if len(paths) == 1 and not generations_in(path):
            raise ConfigError(
                f"{error}. {path} may be a part of a store that can still be resumed: name the store's other "
                f"directories too. If it has none, delete {HEADER_NAME} and {SWAP_NAME} there yourself."
            ) from None
        return
    if len(paths) < len(members):
        raise ConfigError(
            f"{path} is a part of a store: name the directories of all its {len(members)} parts. Where the store was "
            f"made they are {' '.join(members)}."
        )
