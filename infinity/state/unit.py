"""The unit: the parameters that move together, and where each lies in the unit's flat buffers.

[Note: layout of a unit]
A unit's weights are one flat, 4 KiB-aligned buffer, so a fetch is one read. Inside it the parameters are grouped by
(trainable, codec, dtype, form of the moments), trainable groups first; each group begins on a 4 KiB border. The
optimizer states of a group are flat buffers over its elements: element i of `residual`, `exp_avg`, `exp_avg_sq` and
`grad` belongs to element i of the group's part of the weights. So an update runs over one group with one format, and
units of mixed dtypes are just units of several groups. Frozen groups have weights only.

The buffer is what a slot holds. At home the groups lie one behind the other in the same order, and those that have a
codec (state/frozen.py) are smaller there: the encoded parameters, one behind the other. They are the last ones, so
every other group is at the same place at home and in a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from infinity import _native
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.codec import Codec, encoded_ranges
from infinity.state.dtypes import require_supported

ELEMENT_ALIGNMENT = _native.BLOCK_NUMEL
"""Every parameter begins at a multiple of this many elements of its group: no block of its moments holds another's."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter's place: elements [offset, offset + numel) of its group.

    `index` counts its first element among all elements of the model, in the model's order whatever the layout.
    """

    name: str
    shape: torch.Size
    numel: int
    offset: int
    index: int

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Of the parameter, which is contiguous there."""
        steps = [1]
        for size in reversed(self.shape[1:]):
            steps.append(steps[-1] * size)
        return tuple(reversed(steps)) if len(self.shape) else ()


@dataclass(frozen=True)
class Group:
    """The parameters of a unit that share a dtype and a form of their moments and are trainable, or not.

    Attributes:
        moments: how exp_avg and exp_avg_sq are kept; "fp32" where there are none.
        numel: elements of the flat buffers, alignment gaps included.
        weight_offset: bytes from the start of the unit's weights.
        weight_bytes: bytes of the group's weights in a slot, a multiple of 4 KiB.
        codec: the form of the weights at home; None: as in a slot.
    """

    dtype: torch.dtype
    trainable: bool
    moments: _native.MomentsName
    specs: tuple[ParameterSpec, ...]
    numel: int
    weight_offset: int
    weight_bytes: int
    codec: Codec | None = None

    @cached_property
    def home_bytes(self) -> int:
        """Bytes of the group's weights at home, a multiple of 4 KiB."""
        if self.codec is None:
            return self.weight_bytes
        return round_up(sum(end - begin for begin, end in self.encoded.values()), PAGE_BYTES)

    @cached_property
    def encoded(self) -> dict[str, tuple[int, int]]:
        """By name, the bytes [begin, end) of each encoded parameter in the group's home; none without a codec."""
        return {} if self.codec is None else encoded_ranges(self.codec, {spec.name: spec.shape for spec in self.specs})

    def byte_range(self, spec: ParameterSpec) -> tuple[int, int]:
        """Bytes [start, end) of a parameter in the unit's weights."""
        start = self.weight_offset + spec.offset * self.dtype.itemsize
        return start, start + spec.numel * self.dtype.itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a flat state with `itemsize` bytes per element, rounded up to 4 KiB."""
        return round_up(self.numel * itemsize, PAGE_BYTES)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients as autograd gives them, rounded up to 4 KiB."""
        return self.state_bytes(self.dtype.itemsize)

    @property
    def moment_bytes(self) -> int:
        """Bytes of one moment, rounded up to 4 KiB."""
        return round_up(_native.moment_bytes(self.moments, self.numel), PAGE_BYTES)


@dataclass(frozen=True)
class Unit:
    """Parameters that are fetched, released and updated together.

    Attributes:
        name: fully qualified name of the module they came from.
        weight_bytes: length of the flat weights in a slot, a multiple of 4 KiB.
        stays: small enough to stay on the device while the model runs (the remainder).
    """

    index: int
    name: str
    groups: tuple[Group, ...]
    weight_bytes: int
    stays: bool = False

    @property
    def numel(self) -> int:
        return sum(spec.numel for group in self.groups for spec in group.specs)

    @cached_property
    def home_bytes(self) -> int:
        """Length of the weights at home, a multiple of 4 KiB."""
        return sum(group.home_bytes for group in self.groups)

    @cached_property
    def encoded_bytes(self) -> int:
        """Of these, those that are decoded into a slot; they are the last ones."""
        return sum(group.home_bytes for group in self.groups if group.codec is not None)

    @cached_property
    def trained_bytes(self) -> int:
        """Of the weights in a slot, those that the optimizer changes; they are the first ones."""
        return sum(group.weight_bytes for group in self.groups if group.trainable)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients as autograd gives them, group behind group."""
        return sum(group.gradient_bytes for group in self.trainable_groups)

    def find(self, name: str) -> tuple[Group, ParameterSpec]:
        """A parameter's group and place in it."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, tuple[Group, ParameterSpec]]:
        return {spec.name: (group, spec) for group in self.groups for spec in group.specs}

    @property
    def trainable_groups(self) -> tuple[Group, ...]:
        """Those that have elements: a slice may have nothing of a group."""
        return tuple(group for group in self.groups if group.trainable and group.numel)

    @property
    def trained_whole(self) -> bool:
        """Whether an update may change all its weights: something is trained, and nothing is frozen."""
        return all(group.trainable for group in self.groups if group.numel) and bool(self.trainable_groups)


@dataclass(frozen=True)
class Place:
    """Where a parameter is: its unit, its group there, and its elements in the group."""

    unit: Unit
    group_index: int
    spec: ParameterSpec

    @cached_property
    def group(self) -> Group:
        return self.unit.groups[self.group_index]


@dataclass(eq=False)
class UnitParameters:
    """A unit while it is being found: its name and its parameters, in module order. It is equal to itself only."""

    name: str
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    stays: bool = False


@dataclass(frozen=True)
class ParameterFacts:
    """What the layout must know of a parameter beside its shape and dtype.

    Attributes:
        index: of its first element among all elements of the model, a multiple of ELEMENT_ALIGNMENT.
        moments: how its moments are kept if it is trained.
        codec: the form it rests in; None: as it is.
    """

    index: int
    moments: _native.MomentsName
    codec: Codec | None = None


def build_unit(index: int, found: UnitParameters, facts: Mapping[torch.nn.Parameter, ParameterFacts]) -> Unit:
    """Lay the parameters of a unit out.

    Raises:
        ModelError: a parameter has a dtype that cannot be moved.
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
        groups.append(Group(dtype, trainable, moments, specs, numel, weight_offset, weight_bytes, codec))
        weight_offset += weight_bytes
    return Unit(index, found.name, tuple(groups), weight_offset, found.stays)


def _place(
    parameters: Mapping[str, torch.nn.Parameter], facts: Mapping[torch.nn.Parameter, ParameterFacts]
) -> tuple[tuple[ParameterSpec, ...], int]:
    specs, offset = [], 0
    for name, parameter in parameters.items():
        specs.append(ParameterSpec(name, parameter.shape, parameter.numel(), offset, facts[parameter].index))
        offset += round_up(parameter.numel(), ELEMENT_ALIGNMENT)
    return tuple(specs), max(offset, ELEMENT_ALIGNMENT)
