"""Tensors that autograd saves during a forward.

[Note: weights saved for backward]
A saved view of a unit's weights must not keep the slot occupied from forward to backward, and must not be read after
another unit has got the slot. Therefore one pair of hooks around the outermost forward packs such a view as (unit,
version, dtype, size, stride, offset). When the backward needs the view, the view is made again from the unit's current
slot. Any other tensor is packed as the detached tensor and its version, because autograd does not check for in-place
changes while saved-tensor hooks are installed. An update of a unit increases the unit's version (units/fetcher.py), and
unpacking raises for a view of an earlier version (tests/runtime/test_errors.py). Never install one pair for each unit,
because an inner pair hides the outer pair and the pair of torch.utils.checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ReleasedParameterError, StaleWeightsError
from infinity.units.released_parameters import USE_GATHERED


class _GraphToken:
    """Token to which all tensors that one forward saved refer. The token is alive as long as a backward is possible."""

    __slots__ = ("__weakref__",)


_SavedTensor = tuple[_GraphToken | None, torch.Tensor, int]
"""Graph, detached tensor, and the tensor's version."""

SavedWeight = tuple[_GraphToken | None, int, int, torch.dtype, torch.Size, tuple[int, ...], int]
"""View of a unit's weights: graph, unit, the unit's version, dtype, size, stride, and offset in elements."""


class SavedBytesCounter:
    """Counter of the memory that a forward keeps for its backward, without weights.

    Attributes:
        nbytes: number of bytes so far; each storage counts once.
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
    """Return the tensor. Raises StaleWeightsError if the tensor no longer has this version, because it was modified."""
    if tensor._version != version:
        raise StaleWeightsError(
            f"a tensor of shape {tuple(tensor.shape)} needed for the backward pass was modified in place "
            f"(version {tensor._version}, expected {version}). Use an operation that is not in place."
        )
    return tensor


def is_hooked() -> bool:
    """Return whether this thread is in a context of saved-tensor hooks.

    Before torch 2.8 the result is always False, because torch has no function for this.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a view represents the conjugates or the negatives of the values in its memory."""
    return tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg())


class SavedTensors:
    """The pair of saved-tensor hooks.

    Attributes:
        kept: counter of saved tensors; None: nothing is counted.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.kept: SavedBytesCounter | None = None
        self._graph: _GraphToken | None = None
        self._require = coordinator.weights_view
        self._units = coordinator.units
        self._unit_at = coordinator.unit_at
        self._placeholders = {
            tensor.untyped_storage()._cdata: name
            for unit in coordinator.units
            for name, tensor in unit.placeholders.items()
        }

    def forward_begins(self) -> Callable[[], object]:
        """Begin a new graph, to which all tensors belong that are saved from now on.

        Returns a function that returns None as soon as no tensor of the graph is kept.
        """
        self._graph = _GraphToken()
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
        """Pack a view of a unit's weights. Return None for other tensors, and for views that a SavedWeight cannot
        describe."""
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
                f"parameter '{self._placeholders[storage]}' is used by code that cannot see that its values are "
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
