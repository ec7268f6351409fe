"""Memory for the activations of one block, from a trace of its forward and backward without values.

A copy of the model on the meta device gets tokens, up to the arguments of its first block. The largest block then runs
forward and backward with these arguments, for one batch and for two. No value is computed, so the trace takes a
fraction of a second for any model. Attention counts as fused attention, which keeps no scores, and a question about
values gets the answer yes, as for sequences without padding.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from infinity.state.live_bytes import LiveBytes

logger = logging.getLogger(__name__)


class LinearBytes(NamedTuple):
    """A number of bytes that grows with the number of tokens."""

    fixed: float
    per_token: float

    def of(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


class BlockBytes(NamedTuple):
    """Device memory for the activations of one block.

    Attributes:
        boundary: the input of the block.
        kept: tensors that a forward of the block keeps for its backward, without weights; each storage counts once.
        peak: maximum of a forward and a backward of the block, without its input and its weights.
    """

    boundary: LinearBytes
    kept: LinearBytes
    peak: LinearBytes


def trace_block(model: nn.Module, sequences: int, length: int) -> BlockBytes | None:
    """Return the memory for a block of a model; None if the model cannot be traced.

    Args:
        model: a model of token ids, whose parameters may be on any device. The model does not change.
        sequences: sequences of the batch for which the result is exact.
        length: tokens of a sequence.
    """
    try:
        index = _largest(blocks_of(model))
        traced = _without_values(model, index).train()
        block = blocks_of(traced)[index]
        once, twice = (_trace(traced, block, times * sequences, length) for times in (1, 2))
    except Exception as error:  # the model's own code may raise any exception
        logger.debug("the memory for activations is estimated: a block cannot be traced", exc_info=error)
        return None

    def line(first: int, second: int) -> LinearBytes:
        return LinearBytes(2.0 * first - second, (second - first) / (sequences * length))

    return BlockBytes(*map(line, once, twice))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the blocks of a model: the longest module list that is not inside a block."""

    def lists(module: nn.Module) -> Iterator[nn.ModuleList]:
        if isinstance(module, nn.ModuleList):
            yield module
            return
        for child in module.children():
            yield from lists(child)

    return max(lists(model), key=len, default=nn.ModuleList())


def _largest(blocks: nn.ModuleList) -> int:
    """Return the index of the first block that has the most parameters."""
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    return sizes.index(max(sizes))


def _without_values(model: nn.Module, index: int) -> nn.Module:
    """Return a copy on the meta device whose blocks are all copies of the first block, except the block `index`."""
    memo: dict[int, Any] = {}
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    for parameter in model.parameters():
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    blocks = blocks_of(model)
    first, _ = (copy.deepcopy(blocks[each], memo) for each in (0, index))
    for block in blocks:
        memo.setdefault(id(block), first)
    copied = copy.deepcopy(model, memo)
    for parameter in copied.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)
    return copied


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _ReachedError(Exception):
    """The first block was called."""


def _trace(model: nn.Module, block: nn.Module, sequences: int, length: int) -> tuple[int, int, int]:
    """Return the bytes of the attributes of BlockBytes for some sequences."""
    found: list[Any] = []

    def reached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.extend((args, kwargs))
        raise _ReachedError

    with torch.device("meta"), _WithoutValues(), ExitStack() as hooked:
        hooked.callback(blocks_of(model)[0].register_forward_pre_hook(reached, with_kwargs=True).remove)
        try:
            model(torch.zeros(sequences, length, dtype=torch.long), use_cache=False)
        except _ReachedError:
            hooked.close()
        (entering, *others), named = found[0] or (found[1].pop("hidden_states"),), found[1]
        entering = entering.detach().requires_grad_()
        staying = tree_leaves((*model.parameters(), *model.buffers(), others, named))
        with LiveBytes(each for each in staying if isinstance(each, torch.Tensor)) as live:
            kept = weakref.WeakKeyDictionary[Any, int]()

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if live.sizes.get(storage, 1):
                    kept[storage] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                left = block(entering, *others, **named)
            kept_bytes = sum(kept.values())
            end = _LaterPart.apply(left[0] if isinstance(left, tuple) else left)
            del left
            end.backward()
    return entering.untyped_storage().nbytes(), kept_bytes, live.peak


class _WithoutValues(TorchFunctionMode):
    """Context in which attention is fused, and every question about the values of a tensor has the answer yes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            return _FusedAttention.apply(*(args[:3] or (named["query"], named["key"], named["value"])))
        return True if function is torch.Tensor.__bool__ else function(*args, **named)


class _LaterPart(torch.autograd.Function):
    """The later blocks and the loss: they make a gradient of the block's result, and do not keep the result."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor) -> torch.Tensor:
        ctx.like = left.shape, left.dtype
        return left.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


class _FusedAttention(torch.autograd.Function):
    """The memory of fused attention: it keeps its inputs, its output and one number for each query."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))
