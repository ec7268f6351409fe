"""Scales of int8 moments.

A portable copy contains the scales in addition to the decoded values, so that the values can be encoded again without
loss.

[Note: why values are not enough]
A block's scale is its largest magnitude. The codes can represent +1 times the scale, but not −1 times the scale. If the
element with the largest magnitude is negative, it therefore decodes to 0.993 of its value. If the decoded block were
encoded again, it would get a smaller scale and different values. If the element with the largest magnitude is set to
−scale before the block is encoded, every code is the same as before.
"""

from __future__ import annotations

import torch

from infinity import _native
from infinity.sizes import PAGE_BYTES

_SCALES_PER_CHUNK = _native.CHUNK_NUMEL // _native.BLOCK_NUMEL


def blocks_of(numel: int) -> int:
    """Return the number of blocks of `numel` elements."""
    return -(-numel // _native.BLOCK_NUMEL)


def scales_of(encoded: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the scales of `numel` encoded elements (uint8), as fp32 [blocks].

    The elements begin at a chunk boundary.
    """
    parts = []
    for begin in range(0, numel, _native.CHUNK_NUMEL):
        at = begin // _native.CHUNK_NUMEL * (PAGE_BYTES + _native.CHUNK_NUMEL)
        parts.append(encoded[at : at + 4 * min(_SCALES_PER_CHUNK, blocks_of(numel - begin))].view(torch.float32))
    return torch.cat(parts)


def put_scales_back(values: torch.Tensor, scales: torch.Tensor) -> None:
    """Change `values` so that each block gets its old scale when the values are encoded.

    Args:
        values: fp32 [blocks · 256], decoded from int8.
        scales: fp32 [blocks], the old scales.
    """
    blocks = values.view(-1, _native.BLOCK_NUMEL)
    short = (blocks.abs().amax(dim=1) < scales).nonzero().flatten()
    where = blocks[short].argmin(dim=1)  # negative: a positive one would decode to the scale
    blocks[short, where] = -scales[short]


def recut_int8(source: torch.Tensor, begin: int, target: torch.Tensor, at: int, numel: int) -> None:
    """Copy encoded elements [begin, begin + numel) of `source` to elements [at, at + numel) of `target`.

    The chunks of `source` and `target` may begin at different elements.

    Args:
        source: uint8, encoded, from a chunk boundary on.
        begin: first element in `source`, a multiple of a block.
        target: uint8, encoded, from a chunk boundary on.
        at: first element in `target`, a multiple of a block.
        numel: number of elements.
    """
    chunk, done = _native.CHUNK_NUMEL, 0
    while done < numel:
        here, there = begin + done, at + done
        count = min(chunk - here % chunk, chunk - there % chunk, numel - done)
        (scales, codes), (scales_to, codes_to) = _places(here), _places(there)
        scales_bytes = 4 * blocks_of(count)
        target[scales_to : scales_to + scales_bytes] = source[scales : scales + scales_bytes]
        target[codes_to : codes_to + count] = source[codes : codes + count]
        done += count


def _places(element: int) -> tuple[int, int]:
    """Return the byte offsets of the scale of an element's block, and of the element's code."""
    chunk, inside = divmod(element, _native.CHUNK_NUMEL)
    start = chunk * (PAGE_BYTES + _native.CHUNK_NUMEL)
    return start + 4 * (inside // _native.BLOCK_NUMEL), start + PAGE_BYTES + inside
