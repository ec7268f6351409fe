"""What the parameters of a unit are at a moment: placeholders, views of a slot, or gathered copies.

The class of a parameter says whether it may be read now (units/released.py). A unit is open, and its parameters may be
read, from the moment a forward, a backward or a gathering brings it until that ends or the unit is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.state.unit import Group, Unit
from infinity.tiers.slots import Slot
from infinity.units.released import ReleasedParameter, in_backward, nan_placeholder, ordinary_tensors

_use_count: Final[Callable[[torch.Tensor], int] | None] = getattr(torch.Tensor, "_use_count", None)
"""Counts who refers to a tensor: autograd and torch's own, a parameter itself and the node that accumulates its
gradient among them. None where torch does not tell."""


class ParameterViews:
    """The parameters of one unit.

    Invariant: `parameter.data` is the placeholder, a view of the slot that `show` was given last, or a gathered copy.
    While the unit is not open every parameter that is not gathered has the released class.

    Attributes:
        named: the parameters.
        placeholders: a stride-0 NaN of the true shape and dtype for each parameter, once the unit was adopted.
        gathered: names of the parameters whose data is a copy that somebody asked for.
        open: the parameters have their own class.

    Args:
        released: the class of parameters that may not be read.
    """

    def __init__(self, unit: Unit, named: dict[str, nn.Parameter], released: type[ReleasedParameter]) -> None:
        self._unit = unit
        self._released = released
        self.named = named
        self.placeholders: dict[str, torch.Tensor] = {}
        self._nowhere: dict[str, int] = {}  # the storages of the placeholders
        self.gathered: set[str] = set()
        self.open = False
        self._classes: dict[str, type[nn.Parameter]] = {}
        self._data: dict[str, tuple[int, int]] = {}  # (storage, offset) that infinity left
        self._versions: dict[str, int] = {}  # that infinity left
        self._references: dict[str, int] = {}  # of a unit that a backward opened: each parameter's, at that time

    def adopt(self, device: torch.device) -> None:
        """Take the parameters over, whose values are at home now: from here on they are placeholders."""
        for name, parameter in self.named.items():
            self.placeholders[name] = nan_placeholder(parameter.shape, parameter.dtype, device)
            self._nowhere[name] = self.placeholders[name].untyped_storage()._cdata
            self._classes[name] = type(parameter)
            self._versions[name] = parameter._version
        self.open = True
        self.hide()

    def value_in(self, slot: Slot, name: str) -> torch.Tensor:
        """The view of a slot with the unit's weights that has the values of one parameter."""
        group, spec = self._unit.find(name)
        flat = _flat(slot, group)
        return flat.as_strided(spec.shape, spec.stride, int(flat.storage_offset()) + spec.offset)

    def show(self, slot: Slot) -> None:
        """The parameters are views of a slot."""
        with ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
            storage = slot.tensor.untyped_storage()._cdata
            for group in self._unit.groups:
                flat = _flat(slot, group)
                begin = int(flat.storage_offset())
                for spec in group.specs:
                    if spec.name not in self.gathered:
                        self.named[spec.name].data = flat.as_strided(spec.shape, spec.stride, begin + spec.offset)
                        self._data[spec.name] = storage, begin + spec.offset  # which changes no version
        self._expect(slot)

    def hide(self) -> None:
        """The parameters are placeholders, and may not be read."""
        self.close()
        with ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self.named.items():
                if name not in self.gathered:
                    parameter.data = self.placeholders[name]
                    self._data[name] = self._nowhere[name], 0

    def open_up(self) -> None:
        """The parameters may be read."""
        if self.open:
            return
        backward = in_backward()
        for name, parameter in self.named.items():
            parameter.__class__ = self._classes[name]
            if backward and _use_count is not None:
                self._references[name] = _use_count(parameter)
        self.open = True

    def close(self) -> None:
        """The parameters may not be read any more, but for those that are gathered."""
        if not self.open:
            return
        for name, parameter in self.named.items():
            if name not in self.gathered:
                parameter.__class__ = self._released
        self._references.clear()
        self.open = False

    def gather(self, values: Mapping[str, torch.Tensor], slot: Slot | None) -> None:
        """These parameters have these tensors as their data, whatever becomes of the unit, until they are scattered.

        Args:
            slot: that the others are views of.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for name, value in values.items():
                self.gathered.add(name)
                self.named[name].data = value
                self.named[name].__class__ = self._classes[name]
        self._expect(slot)

    def scatter(self, names: Collection[str], slot: Slot | None) -> None:
        """Parameters that were gathered are as the others again."""
        self.gathered.difference_update(names)
        with ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
            for name in names:
                parameter = self.named[name]
                parameter.data = self.placeholders[name] if slot is None else self.value_in(slot, name)
                self._data[name], self._versions[name] = _data_of(parameter), parameter._version
                parameter.__class__ = self._classes[name] if self.open else self._released
        self._expect(slot)

    def _expect(self, slot: Slot | None) -> None:
        if slot is not None:
            slot.expect(len(self.named) - len(self.gathered))

    def set_to_itself(self, name: str) -> None:
        """torch has called `parameter.set_(parameter)`, which adds one to the version and changes no value. A parameter
        whose version moved further was changed before that: require_untouched will say so."""
        parameter, version = self.named[name], self._versions[name] + 1
        with torch._C.DisableTorchFunctionSubclass():
            if _data_of(parameter) == self._data[name] and parameter._version == version:
                self._versions[name] = version

    def require_untouched(self) -> None:
        """Raises ModelError when a parameter was replaced, converted, modified in place or unfrozen behind our back."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self.named.items():
                as_left = _data_of(parameter) == self._data[name] and parameter._version == self._versions[name]
                if not as_left and name not in self.gathered:
                    raise ModelError(
                        f"parameter '{name}' of unit '{self._unit.name}' was changed outside infinity (.to(), "
                        ".half(), .data, load_state_dict or an in-place operation); the change would be lost. Do "
                        "it in `with infinity.gathered(model, module, write=True):`, before infinity.offload, or "
                        "on the saved model."
                    )

    def saved_by_autograd(self) -> bool:
        """Whether autograd may have saved parameters themselves, since a backward opened the unit.

        This happens in what a reentrant checkpoint that is not torch's own recomputes, where no hook packs them. Who
        referred to a parameter before the backward opened it does not want the values of now.
        """
        if not self.open or not in_backward():
            return False
        if _use_count is None:
            return True  # rather too little room than weights that are gone
        return any(
            _use_count(parameter) > max(self._references.get(name, 0), 1 + parameter.requires_grad)
            for name, parameter in self.named.items()
        )


def _data_of(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset())


def _flat(slot: Slot, group: Group) -> torch.Tensor:
    """The weights of a group in a slot, [numel and the gap behind them]."""
    return slot.tensor[group.weight_offset : group.weight_offset + group.weight_bytes].view(group.dtype)
