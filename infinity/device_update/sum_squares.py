"""The sums of squares of gradients on a device, in the order of csrc/cpu_adam/reductions.inl."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from infinity.device_update.kernels import Kernels
from infinity.device_update.rules import CHUNK_NUMEL

PARTIAL_NUMEL = 64 * 1024
"""Elements per partial (kPartialNumel)."""
_LANES = 32
_ROW_BYTES = 16 + 12 * _LANES
"""Temporary memory per row of elements that is added at a time."""
_PIECE_BYTES = 24 + 29 * _LANES
"""Temporary memory per piece."""


@torch.no_grad()
def sums_of_squares(
    gradients: Sequence[torch.Tensor],
    firsts: Sequence[int],
    memory: torch.Tensor,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Compute Σ g² of each partial of each gradient, to the bits of _native.sums_of_squares.

    The elements of a partial are added one after the other in 32 lanes. A kernel does this for all partials of a
    gradient at once. Without kernels, gradients of the same dtype in the same storage take 2,048 operations that follow
    each other, whatever their number, if there is memory for all partials. So call this function once for all gradients
    of a step. The host waits for the device.

    Args:
        gradients: flat contiguous tensors in bf16, fp16 or fp32, on one device.
        firsts: for each gradient the index of its first element in a larger array; see _native.sums_of_squares.
        memory: temporary memory on the device, uint8 [at least 1 KiB], aligned to 8 bytes. With 1 KiB per partial, all
            partials are computed at the same time.
        kernels: kernels that are right for gradients of these dtypes; None: torch operations.

    Returns:
        fp64 [partials] in RAM: the partials of the first gradient, then of the second, and so on.

    Raises:
        ValueError: a gradient is not flat and contiguous.
    """
    if any(gradient.dim() != 1 or not gradient.is_contiguous() for gradient in gradients):
        raise ValueError("gradients are flat contiguous tensors")
    if kernels is not None:
        return _by_kernels(kernels, gradients, firsts, memory)
    storages: dict[tuple[int, torch.dtype], tuple[torch.Tensor, list[torch.Tensor]]] = {}
    partials = 0
    for gradient, first in zip(gradients, firsts, strict=True):
        key = gradient.untyped_storage().data_ptr(), gradient.dtype
        pieces = _pieces(len(gradient), first, int(gradient.storage_offset()), partials)
        storages.setdefault(key, (gradient, []))[1].append(pieces)
        partials += pieces.shape[1]
    result = torch.empty(partials, dtype=torch.float64, device="cpu")
    for gradient, of_each in storages.values():
        pieces = torch.cat(of_each, dim=1)
        pieces = pieces[:, pieces[0].argsort(descending=True)]
        for some in pieces.split(memory.numel() // _PIECE_BYTES, dim=1):
            if some.numel():
                result[some[2]] = _sums(gradient, some, memory).cpu()
    return result


def _by_kernels(
    kernels: Kernels, gradients: Sequence[torch.Tensor], firsts: Sequence[int], memory: torch.Tensor
) -> torch.Tensor:
    """Compute the sums with one kernel for each gradient."""
    given = [(gradient, first) for gradient, first in zip(gradients, firsts, strict=True) if len(gradient)]
    counts = [(first + len(gradient) - 1) // PARTIAL_NUMEL - first // PARTIAL_NUMEL + 1 for gradient, first in given]
    nbytes = 8 * sum(counts)
    out = memory[:nbytes].view(torch.float64) if nbytes <= len(memory) else memory.new_empty(nbytes).view(torch.float64)
    for (gradient, first), sums in zip(given, out.split(counts), strict=True):
        kernels.sums_of_squares(gradient, first, sums, PARTIAL_NUMEL, _LANES)
    return out.cpu()


def _pieces(numel: int, first: int, begin: int, partial: int) -> torch.Tensor:
    """Return the pieces of a gradient, one for each of its partials: int64 [3, pieces], in RAM.

    The rows are the number of elements, the first element in the storage, and the index of the partial. The table is
    made by torch, because a large model has more than 100,000 pieces.

    Args:
        numel: number of elements of the gradient.
        first: index of the gradient's first element in the larger array.
        begin: index of the gradient's first element in its storage.
        partial: index of the gradient's first partial.
    """
    begin_cell = first // PARTIAL_NUMEL
    end_cell = -(-(first + numel) // PARTIAL_NUMEL) if numel else begin_cell
    cells = torch.arange(begin_cell, end_cell, device="cpu")
    starts = (cells * PARTIAL_NUMEL).clamp_(min=first)
    ends = ((cells + 1) * PARTIAL_NUMEL).clamp_(max=first + numel)
    return torch.stack([ends - starts, starts + (begin - first), cells + (partial - begin_cell)])


class _Memory:
    """Temporary memory that is cut into tensors. Copies of this object cut the same memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.rest = memory

    def cut(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        tensor, self.rest = self.rest[:nbytes].view(dtype).view(shape), self.rest[-(-nbytes // 8) * 8 :]
        return tensor


def _sums(gradient: torch.Tensor, pieces: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return fp64 [pieces] on the device: the sum of each piece of the gradient's storage. The longest piece comes
    first."""
    cuts = _Memory(memory)
    full_rows = pieces[0] // _LANES
    table = cuts.cut(torch.int64, 3, pieces.shape[1])
    table.copy_(torch.stack([pieces[1], pieces[1] + pieces[0], pieces[1] + full_rows * _LANES]))
    lanes = cuts.cut(torch.float64, pieces.shape[1], _LANES).zero_()
    numel = gradient.untyped_storage().nbytes() // gradient.itemsize
    flat = gradient.as_strided((numel,), (1,), 0)
    _add_rows(lanes, flat, table[0], full_rows.tolist(), cuts.rest)
    _add_rests(lanes, flat, table[1], table[2], _Memory(cuts.rest))
    width = _LANES // 2
    while width:
        lanes[:, :width].add_(lanes[:, width : 2 * width])
        width //= 2
    return table[0].view(torch.float64).copy_(lanes[:, 0])


def _add_rows(
    lanes: torch.Tensor, flat: torch.Tensor, begins: torch.Tensor, rows: Sequence[int], memory: torch.Tensor
) -> None:
    """Add the squares of all full rows of each piece to its lanes. The longest piece comes first.

    A row that ends after the storage belongs to no piece: any other row takes its place.
    """
    windows = flat.as_strided((max(len(flat) - _LANES + 1, 0), _LANES), (1, 1))
    rows_max = min(CHUNK_NUMEL // _LANES, memory.numel() // _ROW_BYTES)
    row, live = 0, len(rows)
    while row < rows[0]:
        while rows[live - 1] <= row:
            live -= 1
        height = min(max(1, rows_max // live), rows[0] - row)
        cuts = _Memory(memory)
        steps = torch.arange(row * _LANES, (row + height) * _LANES, _LANES, out=cuts.cut(torch.int64, height))
        at = torch.add(begins[:live, None], steps, out=cuts.cut(torch.int64, live, height))
        squares = _squares(windows, at.clamp_(max=len(windows) - 1), cuts, live, height, _LANES)
        for each in range(height):
            while rows[live - 1] <= row + each:
                live -= 1
            lanes[:live].add_(squares[:live, each])
        row += height


def _add_rests(lanes: torch.Tensor, flat: torch.Tensor, ends: torch.Tensor, rests: torch.Tensor, cuts: _Memory) -> None:
    """Add the squares of the elements after the full rows. Lanes without an element add zero."""
    shape = lanes.shape
    at = torch.add(rests[:, None], torch.arange(_LANES, device=flat.device), out=cuts.cut(torch.int64, *shape))
    beyond = torch.ge(at, ends[:, None], out=cuts.cut(torch.bool, *shape))
    squares = _squares(flat, at.clamp_(max=len(flat) - 1), cuts, *shape)
    lanes.add_(squares.masked_fill_(beyond, 0.0))


def _squares(values: torch.Tensor, at: torch.Tensor, cuts: _Memory, *shape: int) -> torch.Tensor:
    """Return fp64 [*shape]: the squares of values[at]. They are exact."""
    picked = torch.ops.aten.index.Tensor_out(values, [at], out=cuts.cut(values.dtype, *shape))
    squares = cuts.cut(torch.float64, *shape).copy_(picked)
    return squares.mul_(squares)
