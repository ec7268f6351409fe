"""Collectives over torch.distributed. They are asynchronous works, which can be polled.

[Note: the collectives of gloo that are used] In torch 2.13, gloo's `all_gather_into_tensor` allocates temporary memory
of the size of the complete output. Weights are therefore gathered by one in-place broadcast from each rank. gloo's
`reduce_scatter_tensor` is an all-reduce of a copy of the input. It rounds bf16 sums at every hop and cannot be polled.
Gradients are therefore sent by `all_to_all_single`, which writes directly to the output, and the owner of a slice adds
the gradients. A header is also sent by `all_to_all_single`, which sends it directly to each rank. `all_gather` would
pass the header around a ring in N - 1 hops.

Only host memory is supported here. Slices and gradients that ranks share in memory do not come here, but go through
sharded/mailboxes.py, also to devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from infinity.errors import NotAvailableError
from infinity.ranks.operations import AllGather, AllToAll, CollectiveOperation
from infinity.ranks.ranks import RankGroup


def check(operation: CollectiveOperation, gather: RankGroup, shard: RankGroup) -> None:
    """Check the buffers of a collective. Raises ValueError or NotAvailableError if a buffer is not suitable."""
    moved = operation.collective
    if isinstance(moved, AllGather):
        group = gather if moved.near else shard
        # A buffer without this rank's slice is filled from shared memory only, and may be on a device.
        _check_buffer(operation, "buffer", moved.buffer, moved.slices, group, in_host=moved.in_buffer)
    elif isinstance(moved, AllToAll):
        _check_buffer(operation, "send", moved.send, moved.send_splits, shard)
        _check_buffer(operation, "receive", moved.receive, moved.receive_splits, shard)


def _check_buffer(
    operation: CollectiveOperation,
    which: str,
    buffer: torch.Tensor,
    sizes: Sequence[int],
    group: RankGroup,
    *,
    in_host: bool = True,
) -> None:
    where = f"{which} of {operation.name}"
    if in_host and buffer.device.type != "cpu":
        raise NotAvailableError(f"{where} is on {buffer.device}: ranks exchange host memory only")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"{where} is {buffer.dtype} of shape {tuple(buffer.shape)}: flat, contiguous bytes are needed")
    if len(sizes) != group.size or min(sizes) < 0 or sum(sizes) != buffer.numel():
        raise ValueError(
            f"{where} has {buffer.numel()} bytes, which the sizes {list(sizes)} of {group.size} ranks do not make up"
        )


def alone(operation: CollectiveOperation) -> list[bytes]:
    """Carry out a collective of one rank."""
    moved = operation.collective
    if isinstance(moved, AllGather):
        return []
    if isinstance(moved, AllToAll):
        moved.receive.copy_(moved.send)
        return []
    return [moved.payload]


def begin_gather(moved: AllGather, group: RankGroup, talking: ProcessGroup) -> list[Work]:
    """Start one broadcast from each rank that has a slice."""
    ends = list(accumulate(moved.slices))
    return [
        _work(dist.broadcast(moved.buffer[end - nbytes : end], rank, group=talking, async_op=True))
        for rank, nbytes, end in zip(group.ranks, moved.slices, ends, strict=True)
        if nbytes
    ]


def begin_all_to_all(moved: AllToAll, talking: ProcessGroup) -> list[Work]:
    """Start an all-to-all exchange of pieces."""
    received, sent = list(moved.receive_splits), list(moved.send_splits)
    return [_work(dist.all_to_all_single(moved.receive, moved.send, received, sent, group=talking, async_op=True))]


def begin_header(header: bytes, into: torch.Tensor, talking: ProcessGroup) -> list[Work]:
    """Send `header` to all ranks. The headers of ranks 0, 1, … are written to `into`, one after the other."""
    sent = torch.frombuffer(bytearray(header), dtype=torch.uint8).repeat(into.numel() // len(header))
    return [_work(dist.all_to_all_single(into, sent, group=talking, async_op=True))]


def begin_telling(payload: bytes, into: torch.Tensor, talking: ProcessGroup) -> list[Work]:
    """Send `payload`, padded to the length of the longest payload, to all ranks. `into` has a row of this length for
    each rank."""
    padded = torch.frombuffer(bytearray(payload.ljust(into.shape[1], b"\0")), dtype=torch.uint8)
    return [_work(dist.all_gather(list(into.unbind()), padded, group=talking, async_op=True))]


def _work(begun: Work | None) -> Work:
    return cast(Work, begun)  # never None: the call is asynchronous, and this rank is in the group
