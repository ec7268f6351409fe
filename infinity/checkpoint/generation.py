"""Reading a generation in a swap directory without the program that trained it: weights by unit, states by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from infinity import _native
from infinity.config import NvmeConfig
from infinity.errors import ManifestError
from infinity.io import whole
from infinity.io.engine import open_engine
from infinity.io.headers import headers_of, members_of
from infinity.io.manifest import Manifest
from infinity.io.store import Extent, SwapStore
from infinity.io.whole import extents_of
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.dtypes import residual_itemsize
from infinity.state.records import GroupRecord, ParameterRecord, parse_body

CHUNK_NUMEL = 4 * _native.CHUNK_NUMEL
"""Elements of a state in memory at a time. In every format these begin at a multiple of 4 KiB."""

_VERIFY_BYTES = 16 << 20
_STATES = ("weight", "residual", "exp_avg", "exp_avg_sq")
"""The states that a generation has of a group; of a frozen group only the first."""


@contextmanager
def opened(directories: Sequence[Path], nvme: NvmeConfig | None = None) -> Iterator[SwapStore]:
    """The store in these directories, open for reading. Nothing on disk is changed.

    Args:
        directories: all directories of the store in its order; or one of them, at the path where the store was made.
        nvme: how the disks are driven.

    Raises:
        ResumeError: there is no store, or `directories` are not all of its directories.
        StoreLockedError: a run is using the store.
    """
    paths = [path.expanduser().absolute() for path in directories]
    if len(paths) == 1:
        paths = members_of(paths[0])
    header = headers_of(paths)[0].header
    engine = open_engine((nvme or NvmeConfig()).model_copy(update={"paths": paths}))
    try:
        store = SwapStore(paths, header.nbytes, engine, mode="read")
        try:
            yield store
        finally:
            engine.close()  # idle before the store lets go of its files
            store.close()
    finally:
        engine.close()


def newest_whole(store: SwapStore, step: int | None = None, digest: str | None = None) -> StoredGeneration:
    """The newest generation that is whole, the generation of `step`, or the pinned one of `digest`. Every byte of it is
    read.

    Raises:
        ResumeError: no generation is whole; says what is wrong with each.
        SwapIOError: a part of a generation cannot be read.
    """

    def use(manifest: Manifest, path: Path) -> tuple[StoredGeneration, list[Extent]]:
        generation = StoredGeneration(store, manifest, path)
        return generation, generation.extents

    memory = _native.Arena(_VERIFY_BYTES, huge_pages=False).view(0, _VERIFY_BYTES)
    return whole.newest_whole(store, memory, step, use, "export", digest)


class StoredGeneration:
    """The states of a generation, as its manifest names them.

    Args:
        store: the open store of the manifest's run.
        source: the manifest's path, for messages.

    Raises:
        ManifestError: the manifest contradicts itself or the store.
    """

    def __init__(self, store: SwapStore, manifest: Manifest, source: Path) -> None:
        self._store = store
        self.source = source
        self.manifest = manifest
        self.body = parse_body(manifest.body, self.source)
        self._extents = {(extent.unit, extent.group, extent.state): extent for extent in extents_of(manifest)}
        self._parameters: dict[tuple[str, int], list[ParameterRecord]] = {}
        for parameter in self.body.model.parameters:
            self._parameters.setdefault((parameter.unit, parameter.group), []).append(parameter)
        self._units: dict[str, list[GroupRecord]] = {}
        for group in self.body.model.groups:
            self._units.setdefault(group.unit, []).append(group)
        self._require_sound()

    def _require_sound(self) -> None:
        groups = {(group.unit, group.group): group for group in self.body.model.groups}
        for (unit, index, state), extent in self._extents.items():
            if extent.offset + extent.nbytes > self._store.nbytes:
                raise ManifestError(self.source, f"places {state} of unit '{unit}' outside the store")
            group = groups.get((unit, index))
            if group is None or state not in (_STATES if group.trainable else _STATES[:1]):
                raise ManifestError(self.source, f"has {state} of unit '{unit}' (group {index}), which has none")
        for group in groups.values():
            self._require_room(group, "weight", group.numel * dtype_of(group).itemsize)
            if group.trainable:
                self._require_room(group, "residual", group.numel * residual_itemsize(group.master))
        self._require_facts()

    def _require_facts(self) -> None:
        """Facts and groups must have the same formats of the states. In old manifests a fact is one value, what the
        config asked for, and is not compared."""
        for name in ("master", "moments"):
            fact = self.manifest.facts.get(name)
            forms = {getattr(group, name) for group in self.trained_groups()}
            if isinstance(fact, list) and set(fact) != forms:
                raise ManifestError(self.source, f"says that {name} is {fact}, and its groups have {sorted(forms)}")

    def _require_room(self, group: GroupRecord, state: str, nbytes: int) -> None:
        extent = self._extents.get((group.unit, group.group, state))
        if nbytes > (extent.nbytes if extent else 0):
            raise ManifestError(self.source, f"has no room for {state} of unit '{group.unit}' (group {group.group})")

    @property
    def extents(self) -> list[Extent]:
        """In the order of the manifest."""
        return list(self._extents.values())

    @property
    def units(self) -> list[str]:
        """In the order of the store."""
        return list(self._units)

    def trained_groups(self) -> list[GroupRecord]:
        return [group for group in self.body.model.groups if group.trainable]

    def parameters(self, group: GroupRecord) -> list[ParameterRecord]:
        return self._parameters.get((group.unit, group.group), [])

    def weights(self, unit: str) -> dict[str, torch.Tensor]:
        """All weights of a unit, by parameter name. Raises SwapIOError."""
        result = {}
        for group in self._units[unit]:
            dtype = dtype_of(group)
            flat = self._read(group, "weight", 0, group.numel * dtype.itemsize).view(dtype)
            for parameter in self.parameters(group):
                part = flat[parameter.offset : parameter.offset + parameter.numel]
                result[parameter.name] = part.view(parameter.shape)
        return result

    def master(self, group: GroupRecord, begin: int, numel: int) -> torch.Tensor:
        """Elements [begin, begin + numel) of a group's fp32 master, which must be split16 or fp32.

        Raises:
            SwapIOError: the device failed, or its data is damaged.
        """
        itemsize = residual_itemsize(group.master)
        residual = self._read(group, "residual", begin * itemsize, numel * itemsize)
        if group.master == "fp32":
            return residual.view(torch.float32)
        weight = self._read(group, "weight", begin * 2, numel * 2)
        values = torch.empty(numel)
        _native.decode_split16(weight.numpy(), residual.numpy(), values.numpy())
        return values

    def moment(self, group: GroupRecord, state: str, begin: int, numel: int) -> torch.Tensor:
        """Elements [begin, begin + numel) of "exp_avg" or "exp_avg_sq" as stored, uint8. Raises SwapIOError."""
        at = _native.moment_bytes(group.moments, begin)
        return self._read(group, state, at, _native.moment_bytes(group.moments, begin + numel) - at)

    def _read(self, group: GroupRecord, state: str, at: int, nbytes: int) -> torch.Tensor:
        """Bytes [at, at + nbytes) of a state; `at` is a multiple of 4 KiB."""
        extent = self._extents.get((group.unit, group.group, state))
        if extent is None or at + nbytes > extent.nbytes:
            raise ManifestError(self.source, f"has no {state} of unit '{group.unit}' (group {group.group})")
        whole = max(round_up(nbytes, PAGE_BYTES), PAGE_BYTES)
        memory = _native.Arena(whole, huge_pages=False).view(0, whole)
        self._store.read(extent, memory, at=at, io_class="states").result()
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """(first element, how many) of each chunk of a group."""
    for begin in range(0, numel, CHUNK_NUMEL):
        yield begin, min(CHUNK_NUMEL, numel - begin)


def dtype_of(group: GroupRecord) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, group.dtype)
    return dtype
