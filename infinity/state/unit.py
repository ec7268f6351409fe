"""Unit: the parameters that are fetched, released and updated together, and the place of each parameter in the unit's
flat buffers.

[Note: layout of a unit]
A unit's weights are one flat buffer, aligned to 4 KiB, so a fetch is one read. The buffer is divided into groups. The
parameters of a group are all trainable or all frozen, and have the same codec, dtype and form of the moments. Trainable
groups come first. Each group begins on a 4 KiB boundary. The optimizer states of a group are flat buffers over its
elements: element i of `residual`, `exp_avg`, `exp_avg_sq` and `grad` belongs to element i of the group's part of the
weights. An update therefore runs over one group with one format, and a unit with several dtypes has several groups.
Frozen groups have only weights.

A slot contains the buffer of a unit's weights. At home the groups are stored one after the other, in the same order.
Groups with a codec (state/frozen_codecs.py) are smaller at home, where their encoded parameters are stored one after
the other. Groups with a codec are the last groups of a unit, so all other groups have the same offset at home and in a
slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from infinity import _native
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.codec import Codec, encoded_ranges
from infinity.state.dtypes import require_supported

ELEMENT_ALIGNMENT = _native.BLOCK_NUMEL
"""The offset of every parameter in its group is a multiple of this number, so no block of moments belongs to two
parameters."""


@dataclass(frozen=True)
class ParameterSpec:
    """Place of one parameter: elements [offset, offset + numel) of its group.

    `index` is the number of the parameter's first element among all elements of the model, in the model's order. The
    index does not depend on the layout.
    """

    name: str
    shape: torch.Size
    numel: int
    offset: int
    index: int

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the parameter, whose elements are contiguous in its group."""
        steps = [1]
        for size in reversed(self.shape[1:]):
            steps.append(steps[-1] * size)
        return tuple(reversed(steps)) if len(self.shape) else ()


@dataclass(frozen=True)
class FlatParameterGroup:
    """Parameters of a unit that have the same dtype, codec and form of the moments, and are all trainable or all
    frozen.

    Attributes:
        dtype: dtype of the weights.
        trainable: whether the optimizer changes the parameters.
        moments: form of exp_avg and exp_avg_sq; "fp32" if the group has no moments.
        specs: places of the parameters.
        numel: number of elements of the flat buffers, including alignment gaps.
        weight_offset: offset of the group in the unit's weights, in bytes.
        weight_bytes: bytes of the group's weights in a slot, a multiple of 4 KiB.
        codec: encoded form of the weights at home; None if the form at home is the same as in a slot.
        slice_numel: for a rank's slice of an encoded group (shard.py), which has no parameters: the number of elements
            whose values its bytes are, rounded; None for any other group.
    """

    dtype: torch.dtype
    trainable: bool
    moments: _native.MomentsName
    specs: tuple[ParameterSpec, ...]
    numel: int
    weight_offset: int
    weight_bytes: int
    codec: Codec | None = None
    slice_numel: int | None = None

    @cached_property
    def home_bytes(self) -> int:
        """Bytes of the group's weights at home, a multiple of 4 KiB."""
        if self.codec is None or self.slice_numel is not None:
            return self.weight_bytes
        return round_up(sum(end - begin for begin, end in self.encoded.values()), PAGE_BYTES)

    @cached_property
    def encoded(self) -> dict[str, tuple[int, int]]:
        """Bytes [begin, end) of each encoded parameter in the group's home, by name; empty if the group has no
        codec."""
        return {} if self.codec is None else encoded_ranges(self.codec, {spec.name: spec.shape for spec in self.specs})

    @property
    def values_numel(self) -> int:
        """Number of elements of the parameters, without alignment gaps."""
        return sum(spec.numel for spec in self.specs) if self.slice_numel is None else self.slice_numel

    def byte_range(self, spec: ParameterSpec) -> tuple[int, int]:
        """Return bytes [start, end) of a parameter in the unit's weights."""
        start = self.weight_offset + spec.offset * self.dtype.itemsize
        return start, start + spec.numel * self.dtype.itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a flat state with `itemsize` bytes per element, rounded up to 4 KiB."""
        return round_up(self.numel * itemsize, PAGE_BYTES)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients in the dtype that autograd gives them, rounded up to 4 KiB."""
        return self.state_bytes(self.dtype.itemsize)

    @property
    def moment_bytes(self) -> int:
        """Bytes of one moment, rounded up to 4 KiB."""
        return round_up(_native.moment_bytes(self.moments, self.numel), PAGE_BYTES)


@dataclass(frozen=True)
class Unit:
    """Parameters that are fetched, released and updated together.

    Attributes:
        index: number of the unit in the model.
        name: fully qualified name of the module to which the parameters belong.
        groups: groups of parameters, in the order of the flat weights.
        weight_bytes: length of the flat weights in a slot, a multiple of 4 KiB.
        stays: whether the unit is never evicted while the model runs. This is so for the unit of the remaining small
            parameters.
        routed: whether a forward uses the unit only if a token is routed to it. This is so for experts.
    """

    index: int
    name: str
    groups: tuple[FlatParameterGroup, ...]
    weight_bytes: int
    stays: bool = False
    routed: bool = False

    @property
    def numel(self) -> int:
        return sum(group.values_numel for group in self.groups)

    @cached_property
    def home_bytes(self) -> int:
        """Size in bytes of the weights at home, a multiple of 4 KiB."""
        return sum(group.home_bytes for group in self.groups)

    @cached_property
    def encoded_bytes(self) -> int:
        """Bytes at home that are decoded into a slot. They are the last bytes of the home."""
        return sum(group.home_bytes for group in self.groups if group.codec is not None)

    def encoded_offset(self, group_index: int) -> int:
        """Return the offset of an encoded group among the encoded bytes of the unit."""
        return sum(group.home_bytes for group in self.groups[:group_index] if group.codec is not None)

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes in a slot that the optimizer changes. They are the first bytes of the slot."""
        return sum(group.weight_bytes for group in self.groups if group.trainable)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all groups, in the dtypes that autograd gives them."""
        return sum(group.gradient_bytes for group in self.trainable_groups)

    def find(self, name: str) -> tuple[FlatParameterGroup, ParameterSpec]:
        """Return the group of a parameter, and the parameter's place in the group."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, tuple[FlatParameterGroup, ParameterSpec]]:
        return {spec.name: (group, spec) for group in self.groups for spec in group.specs}

    @property
    def trainable_groups(self) -> tuple[FlatParameterGroup, ...]:
        """Trainable groups that have at least one element. A rank's slice may have no element of a group."""
        return tuple(group for group in self.groups if group.trainable and group.numel)

    @property
    def trained_whole(self) -> bool:
        """Whether the unit has trained weights and no frozen weights, so that an update may change every weight."""
        return all(group.trainable for group in self.groups if group.numel) and bool(self.trainable_groups)


@dataclass(frozen=True)
class ParameterPlace:
    """Place of a parameter: its unit, its group in the unit, and its elements in the group."""

    unit: Unit
    group_index: int
    spec: ParameterSpec

    @cached_property
    def group(self) -> FlatParameterGroup:
        return self.unit.groups[self.group_index]


def experts_of(units: Sequence[Unit]) -> dict[int, list[int]]:
    """Return the units of the experts in each unit's module, by the index of the unit; only for units that have any."""
    found: dict[int, list[int]] = {}
    names = {unit.name: unit.index for unit in units if not unit.routed}
    for unit in units:
        if unit.routed:
            parts = unit.name.split(".")
            around = (names.get(".".join(parts[:length])) for length in range(len(parts) - 1, 0, -1))
            parent = next((index for index in around if index is not None), None)
            if parent is not None:
                found.setdefault(parent, []).append(unit.index)
    return found


@dataclass(eq=False)
class PartialUnit:
    """Name of a unit that is being assembled, and its parameters so far, in the order of the modules.

    An object of this class is equal only to itself.
    """

    name: str
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    stays: bool = False
    routed: bool = False


@dataclass(frozen=True)
class ParameterFacts:
    """Facts that the layout needs about a parameter, in addition to its shape and dtype.

    Attributes:
        index: number of the parameter's first element among all elements of the model, a multiple of ELEMENT_ALIGNMENT.
        moments: form of the parameter's moments; used only if the parameter is trained.
        codec: encoded form of the parameter at home; None if the parameter is not encoded.
    """

    index: int
    moments: _native.MomentsName
    codec: Codec | None = None


def build_unit(index: int, found: PartialUnit, facts: Mapping[torch.nn.Parameter, ParameterFacts]) -> Unit:
    """Lay out the parameters of a unit.

    Args:
        index: number of the unit.
        found: name and parameters of the unit.
        facts: facts about each parameter of the model.

    Raises:
        ModelError: infinity does not support the dtype of a parameter.
    """
    keys: dict[tuple[bool, torch.dtype, _native.MomentsName, Codec | None], list[str]] = {}
    for name, parameter in found.parameters.items():
        require_supported(name, parameter.dtype)
        moments = facts[parameter].moments if parameter.requires_grad else "fp32"
        keys.setdefault((parameter.requires_grad, parameter.dtype, moments, facts[parameter].codec), []).append(name)
    groups, weight_offset = [], 0
    for key in sorted(keys, key=lambda key: (not key[0], key[3] or "", str(key[1]), key[2])):
        (trainable, dtype, moments, codec), names = key, keys[key]
        parameters = {name: found.parameters[name] for name in names}
        specs, numel = _place(parameters, facts)
        weight_bytes = round_up(numel * dtype.itemsize, PAGE_BYTES)
        groups.append(FlatParameterGroup(dtype, trainable, moments, specs, numel, weight_offset, weight_bytes, codec))
        weight_offset += weight_bytes
    return Unit(index, found.name, tuple(groups), weight_offset, found.stays, found.routed)


def _place(
    parameters: Mapping[str, torch.nn.Parameter], facts: Mapping[torch.nn.Parameter, ParameterFacts]
) -> tuple[tuple[ParameterSpec, ...], int]:
    specs, offset = [], 0
    for name, parameter in parameters.items():
        specs.append(ParameterSpec(name, parameter.shape, parameter.numel(), offset, facts[parameter].index))
        offset += round_up(parameter.numel(), ELEMENT_ALIGNMENT)
    return tuple(specs), max(offset, ELEMENT_ALIGNMENT)
