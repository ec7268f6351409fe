"""Reading of a generation in a swap directory, without the program that trained the model.

Weights are read unit by unit, and states chunk by chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from infinity import _native
from infinity.access.ingest import IngestedMoment
from infinity.config import NvmeConfig
from infinity.durable.generation_body import GroupRecord, ParameterRecord, parse_body
from infinity.errors import ManifestError, ResumeError
from infinity.io import generation_scan
from infinity.io.engine import open_engine
from infinity.io.extent_reading import read_part
from infinity.io.generation_scan import extents_of
from infinity.io.headers import headers_of
from infinity.io.manifest import Manifest
from infinity.io.store import Extent, SwapStore
from infinity.sharded.rank_stores import stores_in
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.codec import decode, encoded_ranges
from infinity.state.dtypes import residual_itemsize
from infinity.state.frozen_codecs import CheckpointEncoding, encoded_form, remember
from infinity.state.int8 import blocks_of, recut_int8, scales_of
from infinity.state.moments import STORED_AS, Moment
from infinity.state.shard import RankPartition, slices_of, slices_of_encoded
from infinity.state.unit import ELEMENT_ALIGNMENT

logger = logging.getLogger(__name__)

CHUNK_NUMEL = 4 * _native.CHUNK_NUMEL
"""Number of elements of a state that are in memory at a time. In every format, chunks of the native core begin at a
multiple of 4 KiB.
"""
MASTER = "master"
"""Name of a state: the fp32 master of a weight, where the master is more precise than the weight."""

_VERIFY_BYTES = 16 << 20
_STATES = ("weight", "residual", "exp_avg", "exp_avg_sq")
"""States that a generation contains for a trainable group. For a frozen group, a generation contains only
the weight.
"""


@contextmanager
def open_stores(
    directories: Sequence[Path], nvme: NvmeConfig | None = None, count: int | None = None, *, shared: bool = False
) -> Iterator[list[SwapStore]]:
    """Open the store in `directories` for reading; if several ranks trained the model, open the stores of all ranks.

    Nothing on disk is changed.

    Args:
        directories: all directories of the store, in the store's order; or one of these directories, at the path where
            the store was created. If several ranks trained the model: the directories that contain the ranks' stores.
        nvme: how the disks are accessed.
        count: the number of ranks of the run to open. It matters if several runs with different numbers of ranks left
            stores. Default: the number of ranks of the run with the most steps.
        shared: whether the ranks of a run that is in progress have the stores open. These ranks wait until the caller
            has finished reading.

    Raises:
        ResumeError: there is no store, or `directories` are not all of its directories.
        StoreLockedError: a run is using the store.
    """
    stores = stores_in([path.expanduser().absolute() for path in directories], count)
    every = [path for paths in stores for path in paths]
    engine = open_engine((nvme or NvmeConfig()).model_copy(update={"paths": every}))
    held: list[SwapStore] = []
    try:
        for paths in stores:
            header = headers_of(paths)[0].header
            held.append(SwapStore(paths, header.nbytes, engine, mode="share" if shared else "read"))
        yield held
    finally:
        engine.close()  # ends all I/O before the stores close their files
        for store in held:
            store.close()


def newest_stored_generation(
    stores: Sequence[SwapStore], step: int | None = None, digests: Sequence[str] = (), *, rank: int = 0
) -> StoredGeneration:
    """Return the newest complete generation, the generation of `step`, or the pinned generation with these `digests`.

    Every byte of the generation is read and compared with its checksums.

    Args:
        stores: the store of one process, or of each rank of a run, in the order of the ranks.
        step: step of the generation; None: the newest complete generation.
        digests: the digest of the pinned generation in each store.
        rank: as for StoredGeneration.

    Raises:
        ResumeError: no generation is complete; the message names the problem of each generation.
        SwapIOError: a part of a generation cannot be read.
    """
    memory = _native.Arena(_VERIFY_BYTES, huge_pages=False).view(0, _VERIFY_BYTES)

    def part_of(
        store: SwapStore,
        step: int | None,
        digest: str | None = None,
        only: generation_scan.ResumeCandidate | None = None,
    ) -> GenerationPart:
        def use(manifest: Manifest, path: Path) -> tuple[GenerationPart, list[Extent]]:
            part = GenerationPart(store, manifest, path, RankPartition(len(stores), stores.index(store)))
            return part, part.extents

        return generation_scan.newest_whole(store, memory, step, use, "export", digest, only)

    path = stores[0].directories[0].path
    place = path if len(stores) == 1 else path.parent
    if digests:
        parts = [part_of(store, None, digest) for store, digest in zip(stores, digests, strict=True)]
        return StoredGeneration(parts, place, rank)
    if len(stores) == 1:
        return StoredGeneration([part_of(stores[0], step)], place, rank)
    found = [
        {candidate.name: candidate for candidate in generation_scan.candidates(each.directories[0], each.run, step)}
        for each in stores
    ]
    names = generation_scan.common_candidates(
        [[(candidate.name, candidate.kept) for candidate in each.values()] for each in found]
    )
    generation_scan.require_one(names, step, place)
    problems = []
    for name in names:
        try:
            parts = [part_of(store, None, only=each[name]) for store, each in zip(stores, found, strict=True)]
            return StoredGeneration(parts, place, rank)
        except ResumeError as error:
            problems.append(str(error))
            logger.warning("%s", error)
    which = "" if step is None else f" of step {step}"
    raise ResumeError("; ".join(problems) or f"{place} has no generation{which} of which every rank has a part")


class GenerationPart:
    """The states of a generation in one store: the complete states, or a rank's slices of the states.

    Args:
        store: the open store of the manifest's run.
        manifest: the manifest of the generation.
        source: the manifest's path, for messages.
        cut: the slices that the store must have.

    Raises:
        ManifestError: the manifest contradicts itself, the store or the cut.
    """

    def __init__(self, store: SwapStore, manifest: Manifest, source: Path, cut: RankPartition) -> None:
        self._store = store
        self._cut = cut
        self.source = source
        self.manifest = manifest
        self.body = parse_body(manifest.body, self.source)
        self._extents = {(extent.unit, extent.group, extent.state): extent for extent in extents_of(manifest)}
        self._require_sound()

    def _require_sound(self) -> None:
        groups = {(group.unit, group.group): group for group in self.body.model.groups}
        for (unit, index, state), extent in self._extents.items():
            if extent.offset + extent.nbytes > self._store.nbytes:
                raise ManifestError(self.source, f"places {state} of unit '{unit}' outside the store")
            group = groups.get((unit, index))
            if group is None or state not in (_STATES if group.trainable else _STATES[:1]):
                raise ManifestError(
                    self.source, f"has {state} of unit '{unit}' (group {index}), and the group has no such state"
                )
        self._require_facts()
        for group in groups.values():
            weight = self._extents.get((group.unit, group.group, "weight"))
            if self._weight_bytes(group) > (weight.nbytes if weight else 0):
                problem = f"has no room for weight of unit '{group.unit}' (group {group.group})"
                raise ManifestError(self.source, problem)

    def _weight_bytes(self, group: GroupRecord) -> int:
        """Return the size in bytes of a group's weights in this store."""
        begin, end = self.slice_of(group)
        return (end - begin) * (dtype_of(group).itemsize if group.codec is None else 1)

    def _require_facts(self) -> None:
        """Require that the manifest's facts name the state formats of its groups, and the rank whose slices the store
        has. Old manifests have a single value from the config for a format; such a value is not compared.
        """
        facts = self.manifest.facts
        for name in ("master", "moments"):
            fact = facts.get(name)
            forms = {getattr(group, name) for group in self.body.model.groups if group.trainable}
            if isinstance(fact, list) and self._cut.whole and set(fact) != forms:
                raise ManifestError(self.source, f"says that {name} is {fact}, but its groups have {sorted(forms)}")
        mine = [facts.get("rank", 0), facts.get("ranks", 1), facts.get("slice_numel", self._cut.numel)]
        if mine != [self._cut.index, self._cut.count, self._cut.numel]:
            raise ManifestError(
                self.source,
                f"belongs to rank {mine[0]} of {mine[1]}, but is in the directory of rank "
                f"{self._cut.index} of {self._cut.count}",
            )

    @property
    def extents(self) -> list[Extent]:
        """Extents of the part, in the order of the manifest."""
        return list(self._extents.values())

    def slice_of(self, group: GroupRecord) -> tuple[int, int]:
        """Return the elements [begin, end) of a group that are in this store; for an encoded group, the bytes."""
        if group.codec is None:
            return slices_of(group.numel, self._cut.count, self._cut.numel)[self._cut.index]
        nbytes = max((end for _, end in self.encoded[group.unit, group.group].values()), default=0)
        return slices_of_encoded(round_up(nbytes, PAGE_BYTES), self._cut.count)[self._cut.index]

    @cached_property
    def encoded(self) -> dict[tuple[str, int], dict[str, tuple[int, int]]]:
        """Byte range of each encoded parameter in its group's weights, by (unit, group) and by name.

        Raises:
            ManifestError: the codec of a group cannot encode the shape of a parameter.
        """
        groups = {(each.unit, each.group): each for each in self.body.model.groups if each.codec is not None}
        shapes: dict[tuple[str, int], dict[str, torch.Size]] = {key: {} for key in groups}
        for each in self.body.model.parameters:
            if (each.unit, each.group) in shapes:
                shapes[each.unit, each.group][each.name] = torch.Size(each.shape)
        found = {}
        for key, group in groups.items():
            if group.codec is None:
                raise AssertionError("a group without a codec has no encoded parameters")
            try:
                found[key] = encoded_ranges(group.codec, shapes[key])
            except ValueError as error:
                problem = f"has a weight of unit '{group.unit}' in a shape that {group.codec} cannot have: {error}"
                raise ManifestError(self.source, problem) from None
        return found

    def read(self, group: GroupRecord, state: str, at: int, nbytes: int) -> torch.Tensor:
        """Return bytes [at, at + nbytes) of this store's part of a state, uint8. Raises SwapIOError, ManifestError."""
        extent = self._extents.get((group.unit, group.group, state))
        if extent is None or at + nbytes > extent.nbytes:
            raise ManifestError(self.source, f"has no {state} of unit '{group.unit}' (group {group.group})")
        return read_part(self._store, extent, at, nbytes)


class StoredState(NamedTuple):
    """A state of a parameter other than the weight: the master, or a moment that steps have already made.

    Attributes:
        state: MASTER, or the store's name of the moment.
        name: MASTER, or torch's name of the moment.
    """

    group: GroupRecord
    parameter: ParameterRecord
    state: str
    name: str

    @property
    def has_scales(self) -> bool:
        """Whether the state is an int8 moment."""
        return self.state != MASTER and self.group.moments == "int8"


class StoredGeneration:
    """The states of a generation, as named by its manifests. A run can continue from a stored generation
    (from_portable.py: Copy).

    Args:
        parts: the part of a single process, or one part for each rank.
        directory: the directory that contains the stores.
        rank: the rank whose manifest provides all values other than the states. If the run had no such rank, the first
            rank's manifest is used.

    Attributes:
        directory: the directory that contains the stores.
        source: path of the first rank's manifest, for messages.
        manifest: the manifest of `rank`.
    """

    def __init__(self, parts: Sequence[GenerationPart], directory: Path, rank: int) -> None:
        self._parts = parts
        self.directory, self.source = directory, parts[0].source
        part = parts[rank if rank < len(parts) else 0]
        self.manifest, self.body = part.manifest, part.body
        self._groups = {(group.unit, group.group): group for group in self.body.model.groups}
        for part in parts[1:]:
            its, mine = part.manifest, parts[0].manifest
            same = (its.run, its.step, its.life) == (mine.run, mine.step, mine.life)
            if part.body.model != parts[0].body.model or not same:
                raise ManifestError(part.source, f"belongs to another model, run or step than {self.source}")

    def shapes(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the weights of each unit on the meta device, by parameter name, in the order of the store."""
        units: dict[str, dict[str, torch.Tensor]] = {group.unit: {} for group in self.body.model.groups}
        for each in self.body.model.parameters:
            dtype = dtype_of(self._groups[each.unit, each.group])
            units[each.unit][each.name] = torch.empty(each.shape, dtype=dtype, device="meta")
        yield from units.values()

    def weight(self, name: str) -> torch.Tensor:
        """Return the weight of a parameter, by any of its names. Raises KeyError, SwapIOError."""
        parameter = self._named[name]
        group = self._groups[parameter.unit, parameter.group]
        if group.codec is not None:
            return self._decoded(group, parameter)
        dtype = dtype_of(group)
        flat = self._read(group, "weight", dtype.itemsize, parameter.offset, parameter.numel)
        return flat.view(dtype).view(parameter.shape)

    def _decoded(self, group: GroupRecord, parameter: ParameterRecord) -> torch.Tensor:
        """Return the decoded values of a parameter that is stored encoded."""
        if group.codec is None:
            raise AssertionError("weights without a codec are not decoded")
        data = self._encoded_bytes(group, parameter)
        return decode(data, group.codec, torch.Size(parameter.shape), dtype_of(group))

    def _encoded_bytes(self, group: GroupRecord, parameter: ParameterRecord) -> torch.Tensor:
        begin, end = self._parts[0].encoded[group.unit, group.group][parameter.name]
        return self._read(group, "weight", 1, begin, end - begin)

    @contextmanager
    def encoded_forms(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the encoded form of each parameter that is stored encoded is known.

        A run that continues with the model then has the same bytes; to decode and encode again can change bits. After
        the context, the forms that were known before are known again, because the stores will be closed.
        """
        before = {}
        for name, parameter in model.named_parameters():
            record = self._named.get(name)
            group = None if record is None else self._groups[record.unit, record.group]
            if record is not None and group is not None and group.codec is not None:
                before[name] = encoded_form(parameter)
                remember(parameter, CheckpointEncoding(group.codec, partial(self._encoded_bytes, group, record)))
        try:
            yield
        finally:
            for name, known in before.items():
                remember(model.get_parameter(name), known)

    @cached_property
    def _named(self) -> dict[str, ParameterRecord]:
        return {name: each for each in self.body.model.parameters for name in (each.name, *each.aliases)}

    def states(self) -> Iterator[StoredState]:
        """Yield the states other than the weights, in the order of the parameters."""
        begun = self.body.begun()
        for parameter in self.body.model.parameters:
            group = self._groups[parameter.unit, parameter.group]
            if group.trainable and group.master in ("split16", "fp32"):
                yield StoredState(group, parameter, MASTER, MASTER)
            for name in begun.get(parameter.name, ()):
                yield StoredState(group, parameter, STORED_AS.get(name, name), name)

    @cached_property
    def _states(self) -> dict[tuple[str, str], StoredState]:
        return {(each.parameter.name, each.state): each for each in self.states()}

    def values(self, of: StoredState) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield a state chunk by chunk.

        A chunk is a tuple: the index of the chunk's first element in the state, the chunk's values in fp32, and the
        scales of these values (an empty tensor if the state has no scales).

        Raises:
            SwapIOError: the device failed, or its data is damaged.
        """
        group, offset = of.group, of.parameter.offset
        end = offset + of.parameter.numel
        for begin in range(offset // _native.CHUNK_NUMEL * _native.CHUNK_NUMEL, end, CHUNK_NUMEL):
            numel = min(CHUNK_NUMEL, round_up(end, ELEMENT_ALIGNMENT) - begin)
            values, scales = torch.empty(numel, dtype=torch.float32), torch.empty(0)
            if of.state == MASTER:
                values = self._master(group, begin, numel)
            else:
                encoded = self._moment(group, of.state, begin, numel)
                is_signed = of.state == "exp_avg"
                _native.decode_moments(encoded.numpy(), group.moments, is_signed=is_signed, values=values.numpy())
                scales = scales_of(encoded, numel) if of.has_scales else scales
            first, last = max(offset - begin, 0), min(end - begin, numel)
            yield begin + first - offset, values[first:last], scales[blocks_of(first) : blocks_of(last)]

    def master(self, name: str) -> torch.Tensor | None:
        """Return the fp32 master of a parameter; None if the weight is the master. Raises SwapIOError."""
        found = self._whole(name, MASTER)
        return None if found is None else found.values

    def moment(self, name: str, state: Moment) -> IngestedMoment | None:
        """Return a moment of a parameter; None if the moment does not exist yet. Raises SwapIOError."""
        return self._whole(name, state)

    def _whole(self, name: str, state: str) -> IngestedMoment | None:
        found = self._states.get((name, state))
        if found is None:
            return None
        numel = found.parameter.numel
        values, scales = (torch.empty(size, dtype=torch.float32) for size in (numel, blocks_of(numel)))
        for at, some, of_blocks in self.values(found):
            values[at : at + some.numel()] = some
            scales[blocks_of(at) : blocks_of(at) + of_blocks.numel()] = of_blocks
        return IngestedMoment(values.view(found.parameter.shape), scales if found.has_scales else None)

    def _master(self, group: GroupRecord, begin: int, numel: int) -> torch.Tensor:
        """Return elements [begin, begin + numel) of a group's fp32 master, which must be split16 or fp32."""
        itemsize = residual_itemsize(group.master)
        residual = self._read(group, "residual", itemsize, begin, numel)
        if group.master == "fp32":
            return residual.view(torch.float32)
        weight = self._read(group, "weight", 2, begin, numel)
        values = torch.empty(numel, dtype=torch.float32)
        _native.decode_split16(weight.numpy(), residual.numpy(), values.numpy())
        return values

    def _moment(self, group: GroupRecord, state: str, begin: int, numel: int) -> torch.Tensor:
        """Return elements [begin, begin + numel) of "exp_avg" or "exp_avg_sq" as stored, uint8.

        `begin` is the first element of a chunk of the native core.
        """
        if group.moments != "int8":
            return self._read(group, state, _native.moment_bytes(group.moments, 1), begin, numel)
        if len(self._parts) == 1:
            at, end = (_native.moment_bytes("int8", count) for count in (begin, begin + numel))
            return self._parts[0].read(group, state, at, end - at)
        found = torch.zeros(_native.moment_bytes("int8", numel), dtype=torch.uint8)
        for part, first, last in self._parts_of(group, begin, numel):
            offset, _ = part.slice_of(group)
            start = (first - offset) // _native.CHUNK_NUMEL * _native.CHUNK_NUMEL
            at, end = (_native.moment_bytes("int8", count) for count in (start, last - offset))
            encoded = part.read(group, state, at, end - at)
            recut_int8(encoded, first - offset - start, found, first - begin, last - first)
        return found

    def _read(self, group: GroupRecord, state: str, itemsize: int, begin: int, numel: int) -> torch.Tensor:
        """Return elements [begin, begin + numel) of a state, `itemsize` bytes each, uint8."""
        found = [
            part.read(group, state, (first - part.slice_of(group)[0]) * itemsize, (last - first) * itemsize)
            for part, first, last in self._parts_of(group, begin, numel)
        ]
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *found])

    def _parts_of(self, group: GroupRecord, begin: int, numel: int) -> Iterator[tuple[GenerationPart, int, int]]:
        """Yield each part that has some of the elements [begin, begin + numel) of a group, together with the range
        [first, last) of the elements that it has.
        """
        for part in self._parts:
            first, last = part.slice_of(group)
            first, last = max(first, begin), min(last, begin + numel)
            if first < last:
                yield part, first, last


def dtype_of(group: GroupRecord) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, group.dtype)
    return dtype
