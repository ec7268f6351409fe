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
            for record in coordinator.records
            for name, tensor in record.placeholders.items()
        }

    def pack(self, tensor: torch.Tensor) -> _SavedWeight | _SavedTensor:
        storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
        if storage in self._placeholders:
            raise ReleasedParameterError(
                f"parameter '{self._placeholders[storage]}' is used by code that does not see that its values are in "
                f"the store. {USE_GATHERED}"
            )
        record = self._coordinator.residents.at.get(storage)
        if record is not None:
            offset = int(tensor.storage_offset()) * tensor.itemsize
            return _SavedWeight(record.unit.index, record.version, tensor.dtype, tensor.size(), tensor.stride(), offset)
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
        record = self._coordinator.records[saved.unit]
        if record.version != saved.version:
            raise StaleWeightsError(
                f"this backward pass needs the weights of unit '{record.unit.name}' from before the last "
                "optim.step(), or from before infinity.gathered(..., write=True) changed them. Call backward() on "
                "every loss before that."
            )
        slot = self._coordinator.require(saved.unit)
        with torch.no_grad():
            flat = slot.view(saved.dtype)
            return flat.as_strided(saved.size, saved.stride, saved.offset_bytes // saved.dtype.itemsize)
