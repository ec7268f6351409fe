"""What the parameters of a unit are at a moment: placeholders, views of a slot, or gathered copies.

The class of a parameter says whether it may be read now (units/released.py). A unit is open, and its parameters may be
read, from the moment a forward, a backward or a gathering brings it until that ends or the unit is evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.state.unit import Group, Unit
from infinity.tiers.slots import Slot
from infinity.units.released import ReleasedParameter, in_backward, nan_placeholder, ordinary_tensors

_TELLS_REFERENCES = hasattr(torch.Tensor, "_use_count")


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
        self._marks: dict[str, tuple[int, int, int]] = {}  # (storage, offset, version) that infinity left
        self._references: dict[str, int] = {}  # of a unit that a backward opened: each parameter's, at that time

    def adopt(self, device: torch.device) -> None:
        """Take the parameters over, whose values are at home now: from here on they are placeholders."""
        for name, parameter in self.named.items():
            self.placeholders[name] = nan_placeholder(parameter.shape, parameter.dtype, device)
            self._nowhere[name] = self.placeholders[name].untyped_storage()._cdata
            self._classes[name] = type(parameter)
            self._marks[name] = 0, 0, parameter._version
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
                        self._put(spec.name, storage, begin + spec.offset)
        self._expect(slot)

    def _put(self, name: str, storage: int, offset: int) -> None:
        """Infinity gave a parameter this data, which changes no version (torch need not be asked for all three)."""
        self._marks[name] = storage, offset, self._marks[name][2]

    def hide(self) -> None:
        """The parameters are placeholders, and may not be read."""
        self.close()
        with ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self.named.items():
                if name not in self.gathered:
                    parameter.data = self.placeholders[name]
                    self._put(name, self._nowhere[name], 0)

    def open_up(self) -> None:
        """The parameters may be read."""
        if self.open:
            return
        backward = in_backward()
        for name, parameter in self.named.items():
            parameter.__class__ = self._classes[name]
            if backward:
                self._references[name] = _references(parameter)
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
                self._marks[name] = _mark(parameter)
                parameter.__class__ = self._classes[name] if self.open else self._released
        self._expect(slot)

    def _expect(self, slot: Slot | None) -> None:
        if slot is not None:
            slot.expect(len(self.named) - len(self.gathered))

    def set_to_itself(self, name: str) -> None:
        """torch has called `parameter.set_(parameter)`, which adds one to the version and changes no value. A parameter
        whose version moved further was changed before that: require_untouched will say so."""
        storage, offset, version = self._marks[name]
        with torch._C.DisableTorchFunctionSubclass():
            if _mark(self.named[name]) == (storage, offset, version + 1):
                self._marks[name] = storage, offset, version + 1

    def require_untouched(self) -> None:
        """Raises ModelError when a parameter was replaced, converted, modified in place or unfrozen behind our back."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self.named.items():
                if _mark(parameter) != self._marks[name] and name not in self.gathered:
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
        if not _TELLS_REFERENCES:
            return True  # rather too little room than weights that are gone
        return any(
            _references(parameter) > max(self._references.get(name, 0), 1 + parameter.requires_grad)
            for name, parameter in self.named.items()
        )


def _references(parameter: nn.Parameter) -> int:
    """Of autograd and torch's own; its own one and that of the node which accumulates its gradient among them."""
    return int(torch.Tensor._use_count(parameter)) if _TELLS_REFERENCES else 0  # type: ignore[attr-defined]


def _mark(parameter: nn.Parameter) -> tuple[int, int, int]:
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset()), parameter._version


def _flat(slot: Slot, group: Group) -> torch.Tensor:
    """The weights of a group in a slot, [numel and the gap behind them]."""
    return slot.tensor[group.weight_offset : group.weight_offset + group.weight_bytes].view(group.dtype)
