"""Hooks on torch.utils.checkpoint, so that recomputation in a backward pass keeps no slot occupied.

[Note: recomputed weights]
A checkpoint around several blocks recomputes all of its blocks before the backward of the last block. The pair of hooks
around the forward (saved_tensors.py) does not apply to the recomputation, because the pair was removed when the forward
ended. Without the hooks of this module, views of every block's slot would be kept,

    non-reentrant   by the checkpoint, whose own pair of hooks keeps the tensors that the recomputation saves
    reentrant       by the graph of the recomputation, which has no hooks

and no slot would be free for another unit until the backward of the checkpoint is over. A non-reentrant checkpoint
therefore keeps a `_ViewStandIn` of the same shape, dtype and device in place of each view. When autograd needs the
view, the view is made again. Views that a reentrant checkpoint recomputes are packed by a pair of hooks. In both cases
the unit is fetched again for its backward.

torch has no official extension point for this, so classes of torch are replaced while an offloaded model exists.
Tensors that are not views of a slot are saved in the same way as without infinity.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from infinity.runtime.saved_tensors import SavedTensors, SavedWeight, is_hooked
from infinity.state.saved_version import unchanged

_lock = threading.RLock()  # the garbage collector may call _forget anywhere
_known: tuple[weakref.ref[SavedTensors], ...] = ()


class _ViewStandIn(torch.Tensor):
    """Placeholder for a view of a unit's weights. It does not keep the weights in memory.

    Attributes:
        saved, weight: the saved-tensor hooks, and the view in the form in which they packed it.
    """

    saved: SavedTensors
    weight: SavedWeight

    def __new__(cls, view: torch.Tensor, saved: SavedTensors, weight: SavedWeight) -> _ViewStandIn:
        # _make_wrapper_subclass is not an operation: a torch-function mode would see an operation
        later: _ViewStandIn = torch.Tensor._make_wrapper_subclass(
            cls, view.size(), strides=view.stride(), dtype=view.dtype, device=view.device
        )
        later.saved, later.weight = saved, weight
        return later

    def view_of_now(self) -> torch.Tensor:
        """Return the view that this object replaces, as a view of the unit's current slot."""
        return self.saved.unpack(self.weight)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation on the views.

        A checkpoint whose forward began before any model was offloaded does not replace stand-ins by views, so autograd
        may compute with a stand-in.
        """
        args, kwargs = tree_map_only(_ViewStandIn, _ViewStandIn.view_of_now, (args, kwargs or {}))
        return func(*args, **kwargs)


class _CheckpointHook(checkpoint._checkpoint_hook):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unpack_hook = partial(_unpack_with, self.unpack_hook)


class _RecomputationHook(checkpoint._recomputation_hook):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pack_hook = partial(_pack_uncompiled, self.pack_hook)
        self.unpack_hook = partial(_unpack_with, self.unpack_hook)


def _pack_with(pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Pack a tensor. For a view of weights, pack its stand-in."""
    for of in _known:
        saved = of()
        weight = None if saved is None else saved.pack_weight(tensor)
        if saved is not None and weight is not None:
            return pack(_ViewStandIn(tensor, saved, weight))
    return pack(tensor)


_pack_uncompiled = _disable_dynamo(_pack_with)  # torch disables dynamo for its own pack hooks, too


def _unpack_with(unpack: Callable[[Any], torch.Tensor], packed: Any) -> torch.Tensor:
    kept = unpack(packed)
    return kept.view_of_now() if isinstance(kept, _ViewStandIn) else kept


def only_saved_tensors_matter() -> bool:
    """Return whether this thread recomputes a non-reentrant checkpoint's function, for the tensors that it saves.

    The outputs of the function are not used. Before torch 2.8 the result is always False (saved_tensors.is_hooked).
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    return hooks is not None and getattr(hooks[0], "func", None) is _pack_uncompiled


def _pack(tensor: torch.Tensor) -> _ViewStandIn | tuple[torch.Tensor, int]:
    return tensor if isinstance(tensor, _ViewStandIn) else (tensor.detach(), tensor._version)


def _unpack(packed: _ViewStandIn | tuple[torch.Tensor, int]) -> torch.Tensor:
    return packed if isinstance(packed, _ViewStandIn) else unchanged(*packed)


_HOOKS = partial(_pack_with, _pack), partial(_unpack_with, _unpack)


def _backward(context: Any, *gradients: Any) -> Any:
    with nullcontext() if is_hooked() else torch.autograd.graph.saved_tensors_hooks(*_HOOKS):
        return _THEIRS[-1](context, *gradients)


_REPLACED: list[tuple[Any, str, Any]] = [
    (checkpoint, "_checkpoint_hook", _CheckpointHook),
    (checkpoint, "_recomputation_hook", _RecomputationHook),
    (checkpoint.CheckpointFunction, "backward", staticmethod(_backward)),
]
_THEIRS = [vars(owner)[name] for owner, name, _ in _REPLACED]


def free_recomputed(saved: SavedTensors) -> None:
    """Begin to pack views of an offloaded model's weights ([Note: recomputed weights]). The model is not kept alive."""
    global _known
    with _lock:
        _known = (*_known, weakref.ref(saved, _forget))
        for owner, name, ours in _REPLACED:
            setattr(owner, name, ours)


def _forget(gone: weakref.ref[SavedTensors]) -> None:
    global _known
    with _lock:
        _known = tuple(each for each in _known if each is not gone and each() is not None)
        if not _known:
            for (owner, name, ours), theirs in zip(_REPLACED, _THEIRS, strict=True):
                if vars(owner)[name] is ours:  # otherwise other code has replaced the attribute since
                    setattr(owner, name, theirs)
