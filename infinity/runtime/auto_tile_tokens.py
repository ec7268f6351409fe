"""Automatic tiles of tokens: if the memory of one block at the given number of tokens has no room on the device, the
block's norms and MLPs run in tiles of tokens.

[Note: the peak of a block]
When a block begins to run backward, everything that its forward has kept exists. Per token these bytes are

    values    the outputs of all linear layers outside of the modules that can run in tiles (queries, keys, values and
              output of attention), tensors of the norms of queries and keys, the outputs of the modules that can run
              in tiles, and the sum between the block's two halves
    kept      what the modules that can run in tiles keep inside; nothing, if they run in tiles

and the peak is

    whole     tokens × (values + kept of all modules + further memory in the backward of the module that keeps most)
    in tiles  tokens × values + the larger of
              - attention's backward: tokens × (2 × outputs of the linear layers + 2 × width)
              - a module's backward: tokens × 2 × width + tokens of a tile × the module's peak + the fp32 sums of its
                weights' gradients

The bytes of the modules that can run in tiles are measured: each module runs forward and backward on the meta device.
The others follow from the shapes of the layers. For Llama and Qwen3 the result is within a fifth of the peak that was
measured (tests/runtime/test_auto_tile_tokens.py). Attention that computes its whole matrix of scores needs more.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from infinity.coordinator import registry
from infinity.runtime.token_tiles import TokenTiledModule, own_class, set_tiles, why_not_tokens
from infinity.sizes import format_bytes
from infinity.state.discover import blocks_of
from infinity.state.live_bytes import LiveBytes

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 256
"""Least number of tokens of a tile: smaller matrix products take longer."""
_MEASURED = 1 << 20, 1 << 21
"""Numbers of tokens for which modules are measured, on the meta device. With so many tokens, the peak is reached at the
same operation for all larger numbers of tokens: weights and their gradients take less memory than activations.
"""
_ATTENTION = ("attn", "attention")
"""Ends of the names of modules that do not act on each token alone; also parts of the names of their classes."""


@dataclass(frozen=True)
class TokenModule:
    """A module of a block that can run in tiles of tokens.

    Attributes:
        name: name of the module in the model.
        module: the module.
        kept: bytes per token that the module keeps for its backward, besides its input.
        peak: bytes per token of the peak of the module's forward and backward, without the gradients of its weights.
        sums: bytes of the fp32 sums of its weights' gradients, and of the largest weight's gradient.
    """

    name: str
    module: nn.Module
    kept: int
    peak: int
    sums: int


@dataclass(frozen=True)
class BlockPeak:
    """The memory of one block while it runs backward: [Note: the peak of a block].

    Attributes:
        name: name of the block in the model.
        width: bytes per token of the block's input.
        layers: bytes per token of the other linear layers' outputs, by name in the block.
        norms: bytes per token that norms of queries and keys keep, with their outputs.
        modules: modules that can run in tiles.
    """

    name: str
    width: int
    layers: dict[str, int]
    norms: int
    modules: tuple[TokenModule, ...]

    @property
    def values(self) -> int:
        """Bytes per token of tensors that exist whether or not the modules run in tiles."""
        return sum(self.layers.values()) + self.norms + self.width * (len(self.modules) + 1)

    def nbytes(self, tokens: int, tiles: int) -> int:
        """Return the bytes of the block's peak."""
        if tiles == 1:
            largest = max(self.modules, key=lambda module: module.kept)
            kept = sum(module.kept for module in self.modules)
            return tokens * (self.values + kept + largest.peak - largest.kept)
        tile = -(-tokens // tiles)
        modules = max(tile * module.peak + module.sums for module in self.modules)
        return tokens * (self.values + 2 * self.width) + max(2 * tokens * sum(self.layers.values()), modules)


def tile_tokens_to_fit(model: nn.Module, tokens: int, room_bytes: int) -> int:
    """Run the norms and MLPs of a model's blocks in tiles of tokens if, and only if, the peak of a block does not fit
    otherwise. Log what was done.

    Args:
        model: the model, before or after it is offloaded.
        tokens: number of tokens of a micro-batch.
        room_bytes: bytes of memory for the peak of one block.

    Returns:
        The number of tiles; 1 if the modules run as a whole.
    """
    peaks = list(block_peaks(model))
    if not peaks:
        return 1
    whole = max(peak.nbytes(tokens, 1) for peak in peaks)
    tiles = tiles_for(peaks, tokens, room_bytes)
    largest = max(peaks, key=lambda peak: peak.nbytes(tokens, tiles))
    nbytes, modules = largest.nbytes(tokens, tiles), [each for peak in peaks for each in peak.modules]
    if tiles > 1:
        for each in modules:
            set_tiles(each.module, tiles, required=False)
        logger.info(
            "a block needs %s for %s tokens, and there is room for %s: %d modules ('%s', …) run in %d tiles of tokens, "
            "and the block needs %s. The gradients of their weights are added in another order.",
            format_bytes(whole), f"{tokens:,}", format_bytes(room_bytes), len(modules), largest.modules[-1].name,
            tiles, format_bytes(nbytes),
        )  # fmt: skip
    if nbytes > room_bytes:
        logger.warning("%s", why_too_large(largest, tokens, tiles, room_bytes))
    return tiles


def tile_tokens_of_plan(model: nn.Module, tokens: int, micro_batches: int = 1) -> int:
    """Call tile_tokens_to_fit with the room that the plan of an offloaded model leaves for one block.

    If the model computes in host memory, or does not recompute its blocks, nothing is changed.

    Args:
        model: the offloaded model, whose blocks are recomputed in the backward.
        tokens: number of tokens of a micro-batch.
        micro_batches: number of micro-batches that go through a block together.

    Returns:
        The number of tiles.
    """
    plan = registry.coordinator_of(model).plan
    if plan.budgets.limits.in_place or not plan.placement.recompute:
        return 1
    stay = plan.placement.activations == "keep"  # otherwise the tensors between blocks rest in RAM or on NVMe
    between = micro_batches * tokens * sum(peak.width for peak in block_peaks(model)) if stay else 0
    return tile_tokens_to_fit(model, tokens, max(plan.budgets.limits.device - plan.device_bytes - between, 0))


def why_too_large(peak: BlockPeak, tokens: int, tiles: int, room_bytes: int) -> str:
    """Return a text that says which tensors make a block's peak larger than the room for it."""
    return (
        f"'{peak.name}' needs {format_bytes(peak.nbytes(tokens, tiles))} for {tokens:,} tokens"
        f"{' in tiles of tokens' if tiles > 1 else ''}, and there is room for {format_bytes(room_bytes)}. The outputs "
        f"of {', '.join(peak.layers)} and their gradients take up to "
        f"{format_bytes(3 * tokens * sum(peak.layers.values()))} of it. Use shorter sequences or smaller "
        "micro-batches, or raise memory.device."
    )


def tiles_for(peaks: list[BlockPeak], tokens: int, room_bytes: int, least: int = 1) -> int:
    """Return the least number of tiles, a power of two of at least `least`, with which all blocks fit; if there is no
    such number, the number with the smallest peak. Return 1 if tiles would have too few tokens."""
    counts = [least]
    while tokens // (2 * counts[-1]) >= _LEAST_TOKENS:
        counts.append(2 * counts[-1])
    if tokens // least < _LEAST_TOKENS:
        return 1
    found = {tiles: max(peak.nbytes(tokens, tiles) for peak in peaks) for tiles in counts}
    fitting = (tiles for tiles, nbytes in found.items() if nbytes <= room_bytes)
    return next(fitting, min(found, key=lambda tiles: found[tiles]))


def block_peaks(model: nn.Module) -> Iterator[BlockPeak]:
    """Yield the peak of each block of a model that has modules which can run in tiles of tokens."""
    names = {module: name for name, module in model.named_modules()}
    measured: dict[Any, tuple[int, int]] = {}
    for block in blocks_of(model):
        modules = tuple(_token_modules(block, names, measured))
        if not modules:
            continue
        inside = {each for found in modules for each in found.module.modules()}
        outputs = {name: _width_out(layer) for name, layer in block.named_modules() if layer not in inside}
        layers = {name: nbytes for name, nbytes in outputs.items() if nbytes}
        width = max(_input_of(found.module, 1).nbytes for found in modules)
        yield BlockPeak(names[block], width, layers, _kept_by_norms(block, layers, inside, measured), modules)


def _token_modules(
    block: nn.Module, names: dict[nn.Module, str], measured: dict[Any, tuple[int, int]]
) -> Iterator[TokenModule]:
    """Yield the outermost modules below a module that can run in tiles of tokens, and keep more than their output."""
    for name, child in block.named_children():
        if name.endswith(_ATTENTION) or any(part in type(child).__name__.lower() for part in _ATTENTION):
            continue
        if not (_takes_one_tensor(child) and not why_not_tokens(child)):
            yield from _token_modules(child, names, measured)
            continue
        kept, peak = _bytes_per_token(child, measured)
        if 2 * kept > _input_of(child, 1).nbytes:
            trained = [each for each in child.parameters() if each.requires_grad]
            numel = sum(each.numel() for each in trained)
            sums = 4 * numel + max((each.numel() * each.element_size() for each in trained), default=0)
            yield TokenModule(names[child], child, kept, peak, sums)


def _kept_by_norms(
    block: nn.Module, layers: dict[str, int], inside: set[nn.Module], measured: dict[Any, tuple[int, int]]
) -> int:
    """Return BlockPeak.norms. A norm of queries or keys, such as `q_norm`, has tensors of the width of `q_proj`."""
    total = 0
    for name, norm in block.named_modules():
        prefix = name.rpartition("_")[0] + "_"
        normed = next((nbytes for layer, nbytes in layers.items() if layer.startswith(prefix)), 0)
        if normed and norm not in inside and "norm" in name and not why_not_tokens(norm):
            width = _input_of(norm, 1).nbytes
            total += normed * (_bytes_per_token(norm, measured)[0] + width) // width
    return total


def _takes_one_tensor(module: nn.Module) -> bool:
    given = [*inspect.signature(own_class(module).forward).parameters.values()][1:]
    return len(given) == 1 and given[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _width_out(layer: nn.Module) -> int:
    """Return the bytes per token of the output of a linear layer; 0 for other modules."""
    if not isinstance(layer, nn.Linear) and type(layer).__name__ != "Conv1D":
        return 0
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0 if isinstance(layer, nn.Linear) else 1] * weight.element_size()


def _input_of(module: nn.Module, tokens: int) -> torch.Tensor:
    """Return an input of a module of known layers on the meta device. Its width is that of its first layer's weight."""
    layer = next(each for each in module.modules() if any(value is not None for value in each._parameters.values()))
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    width = weight.shape[0 if type(layer).__name__ == "Conv1D" else -1]
    return torch.empty(1, tokens, width, dtype=weight.dtype, device="meta", requires_grad=True)


def _bytes_per_token(module: nn.Module, measured: dict[Any, tuple[int, int]]) -> tuple[int, int]:
    """Return TokenModule.kept and TokenModule.peak; zeros if the module cannot run on the meta device.

    `measured` has the results of modules of the same class and shapes.
    """
    key = type(module), *((each.shape, each.dtype, each.requires_grad) for each in module.parameters())
    if key not in measured:
        try:
            (kept, peak), (kept_of_more, peak_of_more) = (_measured(module, tokens) for tokens in _MEASURED)
        except Exception as error:  # the module's own code may raise any exception
            logger.debug("a %s cannot be measured on the meta device: %r", type(module).__name__, error)
            kept = peak = kept_of_more = peak_of_more = 0
        more = _MEASURED[1] - _MEASURED[0]
        measured[key] = (kept_of_more - kept) // more, (peak_of_more - peak) // more
    return measured[key]


def _measured(module: nn.Module, tokens: int) -> tuple[int, int]:
    given = _input_of(module, tokens)
    weights = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta", requires_grad=each.requires_grad)
        for name, each in module.named_parameters()
    }
    run = module.of_tile if isinstance(module, TokenTiledModule) else module.forward
    with _reparametrize_module(module, weights), torch.enable_grad(), LiveBytes() as live:
        output = run(given)
        kept = live.now - output.nbytes
        output.backward(torch.ones_like(output))
    return kept, live.peak
