"""The parameters of a unit: placeholders, views of a slot, or gathered copies.

The class of a parameter says whether its values may be read now (units/released_parameters.py). A unit is open while
its parameters may be read. A unit is opened when it is fetched for a forward, a backward or infinity.gathered. It is
closed when this forward, backward or context ends, or when the unit is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.state.unit import FlatParameterGroup, Unit
from infinity.tiers.slots import Slot
from infinity.units.released_parameters import ReleasedParameter, in_backward, nan_placeholder, ordinary_tensors

_use_count: Final[Callable[[torch.Tensor], int] | None] = getattr(torch.Tensor, "_use_count", None)
"""Function that counts the references to a tensor, including the references from autograd and torch.

A parameter itself counts as a reference, and so does the autograd node that accumulates its gradient. None if torch
does not have the function.
"""


class ParameterViews:
    """The parameters of one unit.

    Invariant: `parameter.data` is the placeholder, a view of the slot of the last call of `show`, or a gathered copy.
    While the unit is not open, every parameter that is not gathered has the released class.

    Attributes:
        named: the parameters, by name.
        placeholders: for each parameter a stride-0 NaN tensor of its true shape and dtype; empty before `adopt`.
        gathered: names of the parameters whose data is a copy by infinity.gathered.
        open: whether the parameters have their original class.

    Args:
        released: class of parameters whose values must not be read.
    """

    def __init__(self, unit: Unit, named: dict[str, nn.Parameter], released: type[ReleasedParameter]) -> None:
        self._unit = unit
        self._released = released
        self.named = named
        self.placeholders: dict[str, torch.Tensor] = {}
        self._nowhere: dict[str, int] = {}  # storages of the placeholders
        self.gathered: set[str] = set()
        self.open = False
        self._classes: dict[str, type[nn.Parameter]] = {}
        self._data: dict[str, tuple[int, int]] = {}  # the (storage, offset) that infinity set last
        self._versions: dict[str, int] = {}  # version of each parameter when infinity last set it
        self._references: dict[str, int] = {}  # reference counts when a backward opened the unit

    def adopt(self, device: torch.device) -> None:
        """Turn the parameters into placeholders. The unit's homes must already have the parameters' values."""
        for name, parameter in self.named.items():
            self.placeholders[name] = nan_placeholder(parameter.shape, parameter.dtype, device)
            self._nowhere[name] = self.placeholders[name].untyped_storage()._cdata
            self._classes[name] = type(parameter)
            self._versions[name] = parameter._version
        self.open = True
        self.hide()

    def value_in(self, slot: Slot, name: str) -> torch.Tensor:
        """Return the view of one parameter's values in a slot that has the unit's weights."""
        group, spec = self._unit.find(name)
        flat = _flat(slot, group)
        return flat.as_strided(spec.shape, spec.stride, int(flat.storage_offset()) + spec.offset)

    def show(self, slot: Slot) -> None:
        """Make the parameters views of a slot, except gathered parameters."""
        with ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
            storage = slot.tensor.untyped_storage()._cdata
            for group in self._unit.groups:
                flat = _flat(slot, group)
                begin = int(flat.storage_offset())
                for spec in group.specs:
                    if spec.name not in self.gathered:
                        self.named[spec.name].data = flat.as_strided(spec.shape, spec.stride, begin + spec.offset)
                        self._data[spec.name] = storage, begin + spec.offset  # setting .data changes no version
        self._expect(slot)

    def hide(self) -> None:
        """Turn all parameters except gathered ones into placeholders, and forbid reads."""
        self.close()
        with ordinary_tensors(), torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self.named.items():
                if name not in self.gathered:
                    parameter.data = self.placeholders[name]
                    self._data[name] = self._nowhere[name], 0

    def open_up(self) -> None:
        """Allow reads of the parameters."""
        if self.open:
            return
        backward = in_backward()
        for name, parameter in self.named.items():
            parameter.__class__ = self._classes[name]
            if backward and _use_count is not None:
                self._references[name] = _use_count(parameter)
        self.open = True

    def close(self) -> None:
        """Forbid reads of the parameters, except gathered parameters."""
        if not self.open:
            return
        for name, parameter in self.named.items():
            if name not in self.gathered:
                parameter.__class__ = self._released
        self._references.clear()
        self.open = False

    def gather(self, values: Mapping[str, torch.Tensor], slot: Slot | None) -> None:
        """Set tensors as the data of parameters. The data remains until `scatter` is called, even if the unit is
        fetched or released.

        Args:
            values: the tensors, by parameter name.
            slot: slot that the other parameters are views of; None when they are placeholders.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for name, value in values.items():
                self.gathered.add(name)
                self.named[name].data = value
                self.named[name].__class__ = self._classes[name]
        self._expect(slot)

    def scatter(self, names: Collection[str], slot: Slot | None) -> None:
        """Turn gathered parameters back into views of the slot, or into placeholders.

        Args:
            names: names of the parameters.
            slot: slot that the other parameters are views of; None when they are placeholders.
        """
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
        """Record that torch has called `parameter.set_(parameter)`, so that require_untouched does not report the call.

        The call increases the version by one and changes no value. If the version increased by more than one, the
        parameter was changed before the call, and require_untouched will report this change.
        """
        parameter, version = self.named[name], self._versions[name] + 1
        with torch._C.DisableTorchFunctionSubclass():
            if _data_of(parameter) == self._data[name] and parameter._version == version:
                self._versions[name] = version

    def require_untouched(self) -> None:
        """Check that no script changed a parameter outside infinity.

        Raises:
            ModelError: a parameter was replaced, converted or modified in place.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self.named.items():
                as_left = _data_of(parameter) == self._data[name] and parameter._version == self._versions[name]
                if not as_left and name not in self.gathered:
                    raise ModelError(
                        f"parameter '{name}' of unit '{self._unit.name}' was changed outside infinity (.to(), "
                        ".half(), .data, load_state_dict or an in-place operation), and the change would be lost. Make "
                        "it in `with infinity.gathered(model, module, write=True):`, before infinity.offload, or "
                        "on the saved model."
                    )

    def saved_by_autograd(self) -> bool:
        """Return whether autograd may have saved the parameters themselves after a backward opened the unit.

        Autograd saves parameters when an implementation of reentrant checkpoints other than torch's recomputes a
        forward, because no hook packs saved tensors in this recomputation. References that existed before the backward
        opened the unit do not count, because they do not need the current values.
        """
        if not self.open or not in_backward():
            return False
        if _use_count is None:
            return True  # safe: keeping the slot only costs memory, and freeing it could lose weights
        return any(
            _use_count(parameter) > max(self._references.get(name, 0), 1 + parameter.requires_grad)
            for name, parameter in self.named.items()
        )


def _data_of(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset())


def _flat(slot: Slot, group: FlatParameterGroup) -> torch.Tensor:
    """Return the weights of a group in a slot, [numel + padding]."""
    return slot.tensor[group.weight_offset : group.weight_offset + group.weight_bytes].view(group.dtype)
