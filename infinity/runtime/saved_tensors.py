"""Tensors that autograd saves during a forward.

[Note: weights saved for backward]
A saved view of a unit's weights must not keep the slot occupied from forward to backward, and must not be read after
another unit has got the slot. Therefore one pair of hooks around the outermost forward packs such a view as (unit,
version, dtype, size, stride, offset). When the backward needs the view, the view is made again from the unit's current
slot. Any other tensor is packed as the detached tensor and its version, because autograd does not check for in-place
changes while saved-tensor hooks are installed. With `activations: host` or `nvme`, the memory of such a tensor is moved
(tiers/activations.py), and the tensor is packed as a MovedTensor. An update of a unit increases the unit's version
(units/fetcher.py), and unpacking raises for a view of an earlier version (tests/runtime/test_errors.py). Never install
one pair for each unit, because an inner pair hides the outer pair and the pair of torch.utils.checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ReleasedParameterError, StaleWeightsError
from infinity.state.saved_version import unchanged
from infinity.units.released_parameters import USE_GATHERED


class _GraphToken:
    """Token to which all tensors that one forward saved refer. The token is alive as long as a backward is possible."""

    __slots__ = ("__weakref__",)


_SavedTensor = tuple[_GraphToken | None, torch.Tensor, int]
"""Graph, detached tensor, and the tensor's version."""

_SavedMoved = tuple[_GraphToken | None, Any]
"""Graph, and what Coordinator.keep_activation returned."""

SavedWeight = tuple[_GraphToken | None, int, int, torch.dtype, torch.Size, tuple[int, ...], int]
"""View of a unit's weights: graph, unit, the unit's version, dtype, size, stride, and offset in elements."""


class SavedBytesCounter:
    """Counter of the memory that a forward keeps for its backward, without weights.

    Each storage counts once while it is alive: a later storage may have the address of one that is gone.

    Args:
        staying: tensors that exist before the forward and after it, such as buffers and inputs. They do not count.

    Attributes:
        nbytes: number of bytes so far.
    """

    def __init__(self, staying: Iterable[torch.Tensor] = ()) -> None:
        self.nbytes = 0
        self._storages = weakref.WeakSet[torch.UntypedStorage](each.untyped_storage() for each in staying)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            self._storages.add(storage)
            self.nbytes += storage.nbytes()


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
        kept: counter of saved tensors that take memory of the device or RAM; None: nothing is counted.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.kept: SavedBytesCounter | None = None
        self._graph: _GraphToken | None = None
        self._require = coordinator.weights_view
        self._units = coordinator.units
        self._unit_at = coordinator.unit_at
        self._moves = coordinator.moves_activations
        self._on_nvme = coordinator.plan.placement.activations == "nvme"
        self._device = coordinator.torch_device
        self._keep, self._activation = coordinator.keep_activation, coordinator.activation
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

    def pack(self, tensor: torch.Tensor) -> _SavedTensor | SavedWeight | _SavedMoved:
        weight = self.pack_weight(tensor)
        if weight is not None:
            return weight
        if _is_lazy(tensor) and self._unit_at(tensor.untyped_storage()._cdata) is not None:
            tensor = tensor.resolve_conj().resolve_neg()
        moved = self._keep(tensor) if self._moves and self._can_move(tensor) else None
        if moved is not None and self._on_nvme:
            return self._graph, moved
        if self.kept is not None and tensor.layout == torch.strided:
            self.kept.add(tensor)
        if moved is not None:
            return self._graph, moved
        return self._graph, tensor.detach(), tensor._version

    def _can_move(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes of a tensor's storage are all that the tensor is."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        strange = tensor.is_quantized or tensor.is_nested or _is_lazy(tensor)
        return plain and tensor.device == self._device and not strange

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

    def unpack(self, saved: _SavedTensor | SavedWeight | _SavedMoved) -> torch.Tensor:
        if len(saved) == 2:
            return self._activation(saved[1])
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
