"""What autograd saves during a forward.

[Note: weights saved for backward]
A saved view of a unit's weights would keep the slot alive from forward to backward, or be read after the slot was
given to another unit. So one pair of hooks around the outermost forward packs such a view as (unit, version, dtype,
size, stride, offset) and makes it again, from the slot the unit has then, when the backward asks. Anything else is
packed as the detached tensor and its version, because with hooks autograd's own check for in-place changes is off.
Never one pair per unit: an inner pair hides the outer one, and with it torch.utils.checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ReleasedParameterError, StaleWeightsError
from infinity.state.released import USE_GATHERED


@dataclass(frozen=True)
class _SavedWeight:
    unit: int
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True)
class _SavedTensor:
    tensor: torch.Tensor
    version: int


class SavedTensors:
    """The pair of hooks."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._placeholders = {
            tensor.untyped_storage()._cdata: name
            for unit in coordinator.units
            for name, tensor in unit.views.placeholders.items()
        }

    def pack(self, tensor: torch.Tensor) -> _SavedWeight | _SavedTensor:
        storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
        if storage in self._placeholders:
            raise ReleasedParameterError(
                f"parameter '{self._placeholders[storage]}' is used by code that does not see that its values are in "
                f"the store. {USE_GATHERED}"
            )
        unit = self._coordinator.room.unit_at(storage)
        if unit is not None:
            offset = int(tensor.storage_offset()) * tensor.itemsize
            return _SavedWeight(unit.index, unit.weights.version, tensor.dtype, tensor.size(), tensor.stride(), offset)
        return _SavedTensor(tensor.detach(), tensor._version)

    def unpack(self, saved: _SavedWeight | _SavedTensor) -> torch.Tensor:
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:
                raise StaleWeightsError(
                    f"a tensor of shape {tuple(saved.tensor.shape)} needed for the backward pass was modified in place "
                    f"(version {saved.tensor._version}, expected {saved.version}). Use an operation that is not in "
                    f"place."
                )
            return saved.tensor
        unit = self._coordinator.units[saved.unit]
        if unit.weights.version != saved.version:
            raise StaleWeightsError(
                f"this backward pass needs the weights of unit '{unit.name}' from before the last "
                "optim.step(), or from before infinity.gathered(..., write=True) changed them. Call backward() on "
                "every loss before that."
            )
        slot = self._coordinator.require(saved.unit)
        with torch.no_grad():
            flat = slot.view(saved.dtype)
            return flat.as_strided(saved.size, saved.stride, saved.offset_bytes // saved.dtype.itemsize)
