"""What autograd saves during a forward.

[Note: weights saved for backward]
A saved view of a unit's weights would keep the slot alive from forward to backward, or be read after the slot was
given to another unit. So one pair of hooks around the outermost forward packs such a view as (unit, version, dtype,
size, stride, offset) and makes it again, from the slot the unit has then, when the backward asks. Anything else is
packed as the detached tensor and its version, because with hooks autograd's own check for in-place changes is off.
What was packed before an update of the unit is refused (units/room.py bumps the version; tests/runtime/test_errors.py).
Never one pair per unit: an inner pair hides the outer one, and with it torch.utils.checkpoint's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ReleasedParameterError, StaleWeightsError
from infinity.units.released import USE_GATHERED


class _Graph:
    """What one forward saves holds it: it is alive as long as its backward may come."""

    __slots__ = ("__weakref__",)


_SavedTensor = tuple[_Graph | None, torch.Tensor, int]
"""A tensor, detached, and its version."""

SavedWeight = tuple[_Graph | None, int, int, torch.dtype, torch.Size, tuple[int, ...], int]
"""A view of a unit's weights: the unit and its version, dtype, size, stride, and the offset in elements."""


class Kept:
    """Memory that a forward keeps for its backward, beside weights.

    Attributes:
        nbytes: so far; each piece of memory counts once.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._storages: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.nbytes += storage.nbytes()


def unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The tensor. Raises StaleWeightsError where it was modified since it had this version."""
    if tensor._version != version:
        raise StaleWeightsError(
            f"a tensor of shape {tuple(tensor.shape)} needed for the backward pass was modified in place "
            f"(version {tensor._version}, expected {version}). Use an operation that is not in place."
        )
    return tensor


def is_hooked() -> bool:
    """Whether this thread is in a context of saved-tensor hooks. False where torch (before 2.8) does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a view stands for the conjugated or negated values of its memory."""
    return tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg())


class SavedTensors:
    """The pair of hooks.

    Attributes:
        kept: is told of what is saved; None: nobody wants to know.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.kept: Kept | None = None
        self._graph: _Graph | None = None
        self._require = coordinator.require
        self._units = coordinator.units
        self._unit_at = coordinator.unit_at
        self._placeholders = {
            tensor.untyped_storage()._cdata: name
            for unit in coordinator.units
            for name, tensor in unit.placeholders.items()
        }

    def forward_begins(self) -> Callable[[], object]:
        """What is saved from now on is of a new graph. Returns what gives None once nothing of it is kept."""
        self._graph = _Graph()
        return weakref.ref(self._graph)

    def forward_ends(self) -> None:
        self._graph = None

    def pack(self, tensor: torch.Tensor) -> _SavedTensor | SavedWeight:
        weight = self.pack_weight(tensor)
        if weight is not None:
            return weight
        if _is_lazy(tensor) and self._unit_at(tensor.untyped_storage()._cdata) is not None:
            tensor = tensor.resolve_conj().resolve_neg()
        if self.kept is not None and tensor.layout == torch.strided:
            self.kept.add(tensor)
        return self._graph, tensor.detach(), tensor._version

    def pack_weight(self, tensor: torch.Tensor) -> SavedWeight | None:
        """A view of a unit's weights; None: the tensor is none, or one that its tuple would not say all of."""
        if tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        unit = self._unit_at(storage)
        if unit is not None and _is_lazy(tensor):
            return None
        if unit is not None:
            offset = int(tensor.storage_offset())
            return self._graph, unit.index, unit.version, tensor.dtype, tensor.size(), tensor.stride(), offset
        if storage in self._placeholders:
            raise ReleasedParameterError(
                f"parameter '{self._placeholders[storage]}' is used by code that does not see that its values are "
                f"in the store. {USE_GATHERED}"
            )
        return None

    def unpack(self, saved: _SavedTensor | SavedWeight) -> torch.Tensor:
        if len(saved) == 3:
            _, tensor, version = saved
            return unchanged(tensor, version)
        _, index, version, dtype, size, stride, offset = saved
        unit = self._units[index]
        if unit.version != version:
            raise StaleWeightsError(
                f"this backward pass needs the weights of unit '{unit.name}' from before the last "
                "optim.step(), or from before infinity.gathered(..., write=True) changed them. Call backward() on "
                "every loss before that."
            )
        return self._require(index).view(dtype).as_strided(size, stride, offset)
