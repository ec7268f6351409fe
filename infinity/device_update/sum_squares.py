"""The sums of squares of gradients on a device, in the order of csrc/cpu_adam/reductions.inl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinity.device_update.rules import CHUNK_NUMEL

PARTIAL_NUMEL = 64 * 1024
"""Elements per partial (kPartialNumel)."""
_LANES = 32


class _Piece(NamedTuple):
    """Elements of one partial: `numel` elements of a storage from `begin` on, and the index of the partial."""

    numel: int
    begin: int
    partial: int


@torch.no_grad()
def sums_of_squares(gradients: Sequence[torch.Tensor], firsts: Sequence[int]) -> torch.Tensor:
    """Compute Σ g² of each partial of each gradient, to the bits of _native.sums_of_squares.

    The elements of a partial are added one after the other in 32 lanes. So gradients of the same dtype in the same
    storage take 2,048 operations that follow each other, whatever their number: call this function once for all
    gradients of a step. The temporary memory is about 50 MiB, and 1 KiB per partial.

    Args:
        gradients: flat contiguous tensors in bf16, fp16 or fp32, on one device.
        firsts: for each gradient the index of its first element in a larger array; see _native.sums_of_squares.

    Returns:
        fp64 [partials] on the device: the partials of the first gradient, then of the second, and so on.

    Raises:
        ValueError: a gradient is not flat and contiguous.
    """
    storages: dict[tuple[int, torch.dtype], tuple[torch.Tensor, list[_Piece]]] = {}
    partials = 0
    for gradient, first in zip(gradients, firsts, strict=True):
        if gradient.dim() != 1 or not gradient.is_contiguous():
            raise ValueError("gradients are flat contiguous tensors")
        key = gradient.untyped_storage().data_ptr(), gradient.dtype
        _, pieces = storages.setdefault(key, (gradient, []))
        at, end = first, first + len(gradient)
        while at < end:
            until = min(end, (at // PARTIAL_NUMEL + 1) * PARTIAL_NUMEL)
            pieces.append(_Piece(until - at, int(gradient.storage_offset()) + at - first, partials))
            at, partials = until, partials + 1
    device = gradients[0].device if gradients else None
    result = torch.empty(partials, dtype=torch.float64, device=device)
    for gradient, pieces in storages.values():
        if pieces:
            pieces.sort(reverse=True)
            lanes = _lanes(gradient, pieces)
            width = _LANES // 2
            while width:
                lanes[:, :width].add_(lanes[:, width : 2 * width])
                width //= 2
            result[torch.tensor([piece.partial for piece in pieces], device=device)] = lanes[:, 0]
    return result


def _lanes(gradient: torch.Tensor, pieces: Sequence[_Piece]) -> torch.Tensor:
    """Return fp64 [pieces, 32]: the sum of each lane of each piece of the gradient's storage, the longest first."""
    device = gradient.device
    numel = gradient.untyped_storage().nbytes() // gradient.itemsize
    flat = gradient.as_strided((numel,), (1,), 0)
    lanes = torch.zeros(len(pieces), _LANES, dtype=torch.float64, device=device)
    begins = torch.tensor([piece.begin for piece in pieces], device=device)
    rows = [piece.numel // _LANES for piece in pieces]
    row, live = 0, len(pieces)
    while row < rows[0]:
        while rows[live - 1] <= row:
            live -= 1
        height = min(max(1, CHUNK_NUMEL // (_LANES * live)), rows[0] - row)
        squares = _squares(flat, begins[:live, None] + torch.arange(row, row + height, device=device) * _LANES)
        for each in range(height):
            while rows[live - 1] <= row + each:
                live -= 1
            lanes[:live].add_(squares[:live, each])
        row += height
    # The rest of a piece is shorter than a row; lanes without an element add zero.
    ends = begins + torch.tensor([piece.numel for piece in pieces], device=device)
    rests = torch.tensor(rows, device=device) * _LANES + begins
    at = rests[:, None] + torch.arange(_LANES, device=device)
    rest = flat[at.clamp(max=numel - 1)].double().masked_fill_(at >= ends[:, None], 0.0)
    return lanes.add_(rest.mul_(rest))


def _squares(flat: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """Return fp64 [..., 32]: the squares of 32 elements from each index on. They are exact.

    A row that ends after the storage belongs to no piece: any other row takes its place.
    """
    windows = flat.as_strided((len(flat) - _LANES + 1, _LANES), (1, 1))
    values = windows[begins.clamp(max=len(windows) - 1)].double()
    return values.mul_(values)
