"""The scales of int8 moments: what must be kept beside their values to encode them again without a change.

[Note: why values are not enough]
A block's scale is its largest magnitude. The signed map has +1 and no −1, so a block whose largest magnitude is
negative decodes to 0.993 of it there, and would get a smaller scale, and other values, when it is encoded again. With
the scale put back in that place every code comes out as it was.
"""

from __future__ import annotations

import torch

from infinity import _native
from infinity.sizes import PAGE_BYTES

_SCALES_PER_CHUNK = _native.CHUNK_NUMEL // _native.BLOCK_NUMEL


def blocks_of(numel: int) -> int:
    """Blocks that hold so many elements."""
    return -(-numel // _native.BLOCK_NUMEL)


def scales_of(encoded: torch.Tensor, numel: int) -> torch.Tensor:
    """fp32 [blocks]: the scales in the encoding, uint8, of `numel` elements from the border of a chunk on."""
    parts = []
    for begin in range(0, numel, _native.CHUNK_NUMEL):
        at = begin // _native.CHUNK_NUMEL * (PAGE_BYTES + _native.CHUNK_NUMEL)
        parts.append(encoded[at : at + 4 * min(_SCALES_PER_CHUNK, blocks_of(numel - begin))].view(torch.float32))
    return torch.cat(parts)


def put_scales_back(values: torch.Tensor, scales: torch.Tensor) -> None:
    """Have each block of `values`, fp32 [blocks · 256], decoded from int8, get its scale when it is encoded."""
    blocks = values.view(-1, _native.BLOCK_NUMEL)
    short = (blocks.abs().amax(dim=1) < scales).nonzero().flatten()
    where = blocks[short].argmin(dim=1)  # a positive one would have decoded to the scale
    blocks[short, where] = -scales[short]
