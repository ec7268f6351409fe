"""infinity.tile_tokens: tiles of tokens for a module that acts on each token alone.

[Note: how a module runs in tiles of tokens]
The tensors inside an MLP are wider than the MLP's input, and autograd keeps them all until the MLP's backward. A module
in tiles of tokens keeps only its input. The forward runs the module on one tile of tokens after the other, without a
graph. The backward runs each tile again, with a graph, and runs this graph backward before the next tile (TiledMLP of
Arctic Long Sequence Training, arXiv 2506.13996, section 3.1).

The whole module is one autograd function, with the weights as inputs. Autograd therefore sees one gradient per weight
and backward pass, as without tiles, so one gradient lands. Weights are saved for the backward through the saved-tensor
hooks (saved_tensors.py). In the backward, the module's parameters are replaced by leaves, which are views of the unit's
slot at that time. The gradients of the leaves are added in fp32 (in fp64 for fp64 weights), and each sum is rounded
once to the weight's dtype.

Nothing in a module's structure shows that its forward treats each token alone. The first call in tiles therefore runs a
few random tokens through the module, together and one by one (`_why_not_alone`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import get_device_states, set_device_states

from infinity.coordinator import registry
from infinity.errors import ConfigError, ModelError
from infinity.runtime.guards import not_compiled
from infinity.runtime.tiles import TiledLinear
from infinity.state.layer_tiles import LayerTile

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)

_TRIED_TOKENS = 3
_NORMS = ("RMSNorm", "LayerNorm")
"""Ends of the names of classes of norms over the features of a token."""


def tile_tokens(module: M, tiles: int) -> M:
    """Run a module that acts on each token alone in tiles of tokens, in place.

    Between forward and backward the module then keeps its input alone, and inside the module only the tensors of one
    tile exist at a time. The backward runs the forward of each tile again. Call this before or after the model is
    offloaded:

        for layer in model.model.layers:
            infinity.tile_tokens(layer.mlp, 8)

    The outputs and the input's gradient are the results of the same operations on fewer tokens at a time; libraries of
    matrix products may round them differently for other numbers of tokens. The gradient of each weight is the sum of
    the tiles' gradients, in fp32, rounded once; the sums of all trainable weights of the module exist at the same time.
    With dropout, each tile draws its own random numbers.

    Args:
        module: a module whose forward takes one tensor [..., tokens, features] of at least two dimensions, and returns
            one tensor [..., tokens, other features]; for example the MLP or a norm of a block. With three or more
            dimensions, the tokens are the second dimension.
        tiles: number of tiles for every call; a call with fewer tokens has one tile per token. 1: the module runs as a
            whole again.

    Returns:
        The same module.

    Raises:
        ModelError: the module contains layers that are not known to act on each token alone, or is in tiles of rows
            (infinity.tile), or its forward was replaced. The first call of the module raises ModelError if the output
            for a token depends on other tokens or on their number, or if the parts of the module are fetched apart.
        ConfigError: `tiles` is not a positive integer.
    """
    if not isinstance(tiles, int) or isinstance(tiles, bool) or tiles < 1:
        raise ConfigError(f"tiles is {tiles!r}: a module runs in 1 or more tiles of tokens")
    if why := why_not_tokens(module):
        raise ModelError(why)
    set_tiles(module, tiles, required=True)
    return module


def set_tiles(module: nn.Module, tiles: int, *, required: bool) -> None:
    """Run a module in tiles of tokens, without testing whether this is possible (TokenTiledModule)."""
    if not isinstance(module, TokenTiledModule):
        vars(module).pop("forward", None)
        module.__class__ = _tiled_class(type(module))  # type: ignore[arg-type]
        cast("TokenTiledModule", module).shown = False
    tiled = cast("TokenTiledModule", module)
    tiled.token_tiles, tiled.required = tiles, required


def why_not_tokens(module: nn.Module) -> str:
    """Return the reason why a module cannot run in tiles of tokens; "" if its layers act on each token alone.

    The reason does not cover the code of the module's forward, which the first call in tiles tests.
    """
    kind = type(module).__name__
    for name, layer in module.named_modules():
        where = f"'{name}' ({type(layer).__name__})" if name else f"a {kind}"
        if isinstance(layer, TiledLinear | LayerTile):
            return f"{where} is in tiles of its rows (infinity.tile), so the {kind} cannot run in tiles of tokens"
        if (layer._parameters or layer._buffers) and not _acts_on_each_token(layer):
            return (
                f"{where} has parameters or buffers, and is not a layer that is known to act on each token alone "
                "(torch's Linear, LayerNorm and RMSNorm, transformers' Conv1D and norms): infinity.tile_tokens takes "
                "modules of such layers, such as an MLP"
            )
    if all(parameter is None for layer in module.modules() for parameter in layer._parameters.values()):
        return f"infinity.tile_tokens takes a module with weights, such as an MLP, not a {kind}"
    forward = vars(module).get("forward", module.forward)
    if getattr(forward, "__func__", None) is not type(module).forward:
        return f"the forward of this {kind} was replaced: call infinity.tile_tokens before that"
    return ""


def _acts_on_each_token(layer: nn.Module) -> bool:
    kind = own_class(layer)
    known = kind is nn.Linear or kind.__name__.endswith(_NORMS) or kind.__name__ == "Conv1D"
    return known and all(buffer is None for buffer in layer._buffers.values())


class TokenTiledModule(nn.Module):
    """A module in tiles of tokens, which infinity.tile_tokens makes by changing the module's class.

    Attributes:
        token_tiles: number of tiles.
        shown: whether a call has shown that the module acts on each token alone.
        required: whether a call raises ModelError if the module does not act on each token alone; False: the module
            then runs as a whole.
    """

    token_tiles: int
    shown: bool
    required: bool

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _RUN(self, [*args, *kwargs.values()])

    def of_tile(self, given: torch.Tensor) -> Any:
        """Run the module's own forward."""
        return super().forward(given)

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, token_tiles={self.token_tiles}" if own else f"token_tiles={self.token_tiles}"


def own_class(module: nn.Module) -> Any:
    """Return the class that a module has as a whole."""
    return type(module).__bases__[1] if isinstance(module, TokenTiledModule) else type(module)


@functools.cache
def _tiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (TokenTiledModule, kind), {"__module__": kind.__module__})


@not_compiled
class _TiledForward:
    """Forward of modules in tiles of tokens. torch.compile ends its graph before this forward."""

    def __call__(self, module: TokenTiledModule, given: Sequence[Any]) -> torch.Tensor:
        kind = type(module).__name__
        if len(given) != 1 or not isinstance(given[0], torch.Tensor) or given[0].dim() < 2:
            raise ModelError(
                f"a {kind} in tiles of tokens was called with other arguments than one tensor of tokens: "
                "infinity.tile_tokens cannot run this module in tiles"
            )
        tokens: torch.Tensor = given[0]
        parts = _parts(tokens, module.token_tiles)
        if len(parts) < 2 or tokens.is_meta:
            whole: torch.Tensor = module.of_tile(tokens)
            return whole
        if not module.shown and (why := _why_not_now(module, tokens)):
            if module.required:
                raise ModelError(why)
            logger.warning("%s, so it runs as a whole", why)
            module.token_tiles = 1
            return self(module, given)
        named = dict(module.named_parameters())
        made: torch.Tensor = _TokenTiles.apply(module, tuple(named), parts, tokens, *named.values())
        return made


_RUN = _TiledForward()


def _dim(tokens: torch.Tensor) -> int:
    """Return the dimension of the tokens: [tokens, features], or [batch, tokens, ..., features]."""
    return min(tokens.dim() - 2, 1)


def _tile(tokens: torch.Tensor, part: tuple[int, int]) -> torch.Tensor:
    """Return the tokens of a tile. They are contiguous, because transformers' Conv1D calls `view`."""
    return tokens.narrow(_dim(tokens), *part).contiguous()


def _parts(tokens: torch.Tensor, tiles: int) -> list[tuple[int, int]]:
    """Return the first token and the number of tokens of each tile; the numbers differ by one at most."""
    length = tokens.shape[_dim(tokens)]
    count = max(min(tiles, length), 1)
    begins = [index * length // count for index in range(count)]
    return [(begin, end - begin) for begin, end in zip(begins, [*begins[1:], length], strict=True)]


class _TokenTiles(torch.autograd.Function):
    """A module's forward and backward in tiles of tokens: [Note: how a module runs in tiles of tokens]."""

    @staticmethod
    def forward(
        ctx: Any,
        module: TokenTiledModule,
        names: tuple[str, ...],
        parts: Sequence[tuple[int, int]],
        tokens: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        kind = tokens.device.type
        ctx.module, ctx.names, ctx.parts = module, names, parts
        ctx.random = kind, torch.get_rng_state(), *get_device_states(tokens)
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False
        ctx.save_for_backward(tokens, *weights)
        whole: torch.Tensor | None = None
        with torch.autocast(*ctx.autocast):
            for part in parts:
                made = module.of_tile(_tile(tokens, part))
                if whole is None:
                    whole = made.new_empty((*tokens.shape[:-1], made.shape[-1]))
                whole.narrow(_dim(tokens), *part).copy_(made)
                del made  # otherwise it would exist beside the tensors of the next tile
        assert whole is not None
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *came: torch.Tensor) -> Any:
        (gradient,) = came
        tokens, *weights = ctx.saved_tensors
        of_tokens, *trains = ctx.needs_input_grad[3:]
        leaves = [
            weight.detach().requires_grad_(is_trained) for weight, is_trained in zip(weights, trains, strict=True)
        ]
        sums = _WeightGradients(leaves)
        total = torch.zeros_like(tokens) if of_tokens else None
        named = dict(zip(ctx.names, leaves, strict=True))
        with (
            _reparametrize_module(ctx.module, named, tie_weights=True),
            _random_numbers(*ctx.random),
            torch.autocast(*ctx.autocast),
        ):
            for part in ctx.parts:
                tile = _tile(tokens, part).detach().requires_grad_(of_tokens)
                with torch.enable_grad():
                    made = ctx.module.of_tile(tile)
                torch.autograd.backward(made, gradient.narrow(_dim(tokens), *part))
                if total is not None and tile.grad is not None:
                    total.narrow(_dim(tokens), *part).copy_(tile.grad)
                del tile, made
        return None, None, None, total, *(sums.take(leaf) for leaf in leaves)


class _WeightGradients:
    """Sums of the gradients of leaves over the tiles, in fp32.

    Autograd calls `_add` as soon as it has computed one gradient, so that only one gradient of a tile exists at a time.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        for leaf in leaves:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self._add)

    def _add(self, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if id(leaf) in self._sums:
            self._sums[id(leaf)].add_(gradient)
        else:
            self._sums[id(leaf)] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def take(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return a leaf's sum in the leaf's dtype, and forget the sum. Return None if the leaf has no gradient."""
        total = self._sums.pop(id(leaf), None)
        return None if total is None else total.to(leaf.dtype)


@contextmanager
def _random_numbers(
    kind: str, cpu: torch.Tensor, devices: Sequence[int], states: Sequence[torch.Tensor]
) -> Iterator[None]:
    """In this context, draw the random numbers that were drawn after the generators had these states."""
    with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):
        torch.set_rng_state(cpu)
        set_device_states(devices, states, device_type=kind)
        yield


# -- what a module does -----------------------------------------------------------------------------------------------


def _why_not_now(module: TokenTiledModule, tokens: torch.Tensor) -> str:
    """Return the reason why a module cannot run in tiles of tokens; "" if no reason was found. The module's weights are
    known now, and layers may have been added since infinity.tile_tokens was called."""
    kind = type(module).__name__
    found = [registry.find(parameter) for parameter in module.parameters()]
    units = {place.unit.name for _, place in filter(None, found)}
    if len(units) > 1:  # each tile would fetch them again
        return (
            f"a {kind} cannot run in tiles of tokens, because its weights are fetched in {len(units)} units: "
            f"'{min(units)}' and others"
        )
    if why := why_not_tokens(module) or _why_not_alone(module, tokens):
        return f"a {kind} cannot run in tiles of tokens: {why}"
    return ""


@torch.no_grad()
def _why_not_alone(module: TokenTiledModule, tokens: torch.Tensor) -> str:
    """Return how the output for a token depends on other tokens; "" if it does not. Set `module.shown`.

    A few random tokens run through the module together, one by one, and together after one of them has become NaN. The
    comparison of the first two shows a dependence on the position or the number of tokens, within rounding. The NaN
    shows every other dependence, however small, because it passes every sum. If the outputs are not finite, they show
    nothing, and the next call tries again.

    Args:
        module: the module.
        tokens: input of the module's call, for the shape, the dtype and the device. Its values are not used.
    """
    dim, shape = _dim(tokens), list(tokens.shape)
    shape[0] = 1
    shape[dim] = _TRIED_TOKENS
    tried = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(tokens)
    poisoned = tried.clone()
    poisoned.narrow(dim, 1, 1).fill_(float("nan"))
    with _without_dropout(module):
        together = module.of_tile(tried)
        if not isinstance(together, torch.Tensor) or together.shape[:-1] != tried.shape[:-1]:
            return "its forward does not return one tensor with all tokens"
        alone = torch.cat([module.of_tile(token) for token in tried.split(1, dim)], dim)
        beside = module.of_tile(poisoned)
    module.shown = bool(together.isfinite().all())
    if not module.shown:
        return ""
    limit = together.abs().max() * max(16 * torch.finfo(together.dtype).eps, 1e-3)
    others = [beside.narrow(dim, index, 1) for index in (0, _TRIED_TOKENS - 1)]
    module.shown = bool((alone - together).abs().max() <= limit) and all(bool(each.isfinite().all()) for each in others)
    return "" if module.shown else "its forward gives a token another result beside other tokens than alone"


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    training = [each for each in module.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True
