"""Counter of the memory of the tensors that a computation makes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of all storages that operations in this context make, also on the meta device.

    Storages that existed before the context do not count.

    Args:
        staying: tensors whose storages do not count, even if no operation has used them yet.

    Attributes:
        sizes: bytes of each known storage that exists; 0 if the storage does not count.
        now: bytes of the storages that exist now.
        peak: largest value of `now` so far.
    """

    def __init__(self, staying: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.sizes = weakref.WeakKeyDictionary[Any, int]((each.untyped_storage(), 0) for each in staying)
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in map(_storage_of, tree_leaves((args, kwargs))):
            if storage is not None:
                self.sizes.setdefault(storage, 0)
        made = func(*args, **(kwargs or {}))
        for storage in map(_storage_of, tree_leaves(made)):
            if storage is not None and storage not in self.sizes:
                self.sizes[storage] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


def _storage_of(leaf: Any) -> torch.UntypedStorage | None:
    return leaf.untyped_storage() if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided else None
