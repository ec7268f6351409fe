"""Banks: modules of experts whose experts are units of their own, so that only routed experts move.

transformers keeps the experts of a layer as stacks, parameters of the shape [experts, ...]. A bank has the stacks in
tiles (state/layer_tiles.py): each tile has the rows of some consecutive experts, at least _TILE_BYTES if there are as
many, and is a child module and a unit.

[Note: how a bank computes]
The tokens are sorted by their experts, as in transformers' grouped_mm, and each tile with tokens computes its part. The
bits are those of grouped_mm on the CPU. A tile that no token was routed to is not called, so it is not fetched.

    hidden states ──▶ sorted ──▶ _Save ──▶ split ──▶ tile 0 ──▶ _Combine ──▶ sum over the experts of each token
                                              ├────▶ tile 3 ──▶──┤
                                              └────▶ tile 7 ──▶──┘        backward: tile 7, tile 3, tile 0

A tile saves nothing for the backward: its backward computes its part again, from the inputs that `_Save` has saved,
with the weights that its unit has then. Therefore each tile is fetched twice, once for the forward and once for the
backward, also if the block has a non-reentrant checkpoint: the recomputation stops at the last tensor that was saved,
and if it has to go on behind the tiles, for a shared expert, it does not compute them (`_Recomputed`). A reentrant
checkpoint fetches each tile three times, because its recomputation makes the graph of the backward. The gradients of a
tile land before the backward of the next tile begins, and no gradient of a stack exists.

As in torch, the gradient of an expert without tokens is zero, and not None. It takes no memory, and if the moments are
zero, too, and nothing decays, the expert is not updated (OffloadedOptimizer.keeps_idle).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.errors import ModelError, StaleWeightsError
from infinity.ranks.ranks import has_others
from infinity.runtime.expert_adapters import (
    TileAdapter,
    TileAdapters,
    adapters_of,
    attach,
    why_not_adapted,
    wrappers_of,
)
from infinity.runtime.recomputed_weights import only_saved_tensors_matter
from infinity.runtime.tiles import concatenated, cut_rows, tile_as_linear, tiles_in, version_of
from infinity.state.layer_tiles import ExpertTile, rows_of

logger = logging.getLogger(__name__)

ExpertsName = Literal["auto", "apart", "together"]

_TILE_BYTES = 2 << 20
"""Least bytes of the weights of a tile, unless the bank has fewer: smaller transfers and updates cost more."""

_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_KEYS = frozenset(name + suffix for name in _STACKS for suffix in ("", "_bias"))


def why_together(config: SwapConfig, *, several: bool | None = None, shares: Callable[[], bool] = lambda: True) -> str:
    """Return why all experts stay together with this config; "" if they need not.

    Each rank fetches the experts that its own tokens are routed to. So ranks must be able to fetch without each other,
    as they can if they share all weights.

    Args:
        config: the swap config.
        several: whether there are several ranks; None: look at the ranks of this process.
        shares: function that returns whether the ranks can share memory; called only if that matters.
    """
    if not (has_others() if several is None else several):
        return ""
    if config.ranks.wire == "gloo":
        return "with several ranks and ranks.wire: gloo, all ranks fetch the same weights"
    if config.experts == "auto" and config.weights != "host":
        return "with several ranks, they are apart only with weights: host"
    if config.experts == "auto" and not shares():
        return "the ranks cannot share memory"
    return ""


def cut_banks(model: nn.Module, choice: ExpertsName, reason: Callable[[], str] = lambda: "") -> None:
    """Make the modules of experts in a model banks, in place. One line of the log says where experts stay together.

    Args:
        model: the model.
        choice: value of `experts` in the config.
        reason: function that returns why all experts stay together (why_together), or ""; called only if the model has
            experts that could be apart.
    """
    found = {module: why for module in model.modules() if (why := why_no_bank(module)) is not None}
    if choice == "together" or not found:
        return
    if why := reason():
        found = dict.fromkeys(found, why)
    wrappers = wrappers_of(model)
    for module, why in found.items():
        of = wrappers.get(module, ())
        if not why and choice == "auto" and _implementation(module) != "grouped_mm":
            why = f"the model computes its experts with '{_implementation(module)}'; set experts: apart"
        found[module] = why = why or why_not_adapted(of)
        if not why:
            _cut(module, of)
    if why := next((why for why in found.values() if why), ""):
        logger.info("experts: together in %d of %d layers: %s", sum(map(bool, found.values())), len(found), why)


def _implementation(module: Any) -> str:
    return str(getattr(module.config, "_experts_implementation", None))


def _cut(module: nn.Module, wrappers: Sequence[Any]) -> None:
    """Make a module a bank, unless all its experts together are as small as a tile.

    Args:
        module: the module of experts.
        wrappers: PEFT's wrappers of the module.
    """
    experts = _experts(module)
    nbytes = sum(parameter.numel() * parameter.itemsize for parameter in module.parameters()) // experts
    each = _each(nbytes)
    if each < experts:
        make_bank(module, range(0, experts, each), wrappers)


def _each(nbytes: int) -> int:
    """Return the number of experts in a tile, given the bytes of an expert."""
    return max(-(-_TILE_BYTES // max(nbytes, 1)), 1)


def why_no_bank(module: nn.Module) -> str | None:
    """Return why a module of experts cannot be a bank; "" if it can, and None if it is no module of experts.

    A module of experts has `num_experts` and parameters of three dimensions, one row for each expert. It can be a bank
    if it was decorated for transformers' table of functions that compute experts, because then it has no other
    computation than these functions have.
    """
    own = {key: each for key, each in module._parameters.items() if each is not None}
    if not any(each.dim() == 3 and len(each) == getattr(module, "num_experts", None) for each in own.values()):
        return None
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, "is_transposed"):
        return "its forward is not one of those in transformers' table of functions that compute experts"
    if own.keys() - _KEYS or any(len(each) != _experts(module) for each in own.values()):
        return f"it has other parameters than {', '.join(_STACKS)} and their biases"
    if any(True for child in module.children() for _ in child.parameters()):
        return "it contains modules with parameters"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalizes the results of its experts"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are divided over ranks"
    return ""


def make_bank(module: nn.Module, begins: Sequence[int], wrappers: Sequence[Any] = ()) -> None:
    """Make a module of experts a bank.

    Args:
        module: a module of experts for which why_no_bank() is "".
        begins: first expert of each tile.
        wrappers: PEFT's wrappers of the module, for which why_not_adapted() is "".
    """
    attach(module, wrappers)
    keys = [key for key, parameter in module._parameters.items() if parameter is not None]
    kind: Any = type(module)
    vars(module).pop("forward", None)
    module.__class__ = _bank_class(kind)
    cut_rows(module, keys, begins, _Experts, f"{_experts(module)} experts")


def tile_as(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Tile the layers and the modules of experts of a model in the same way as in an earlier run.

    Layers of the earlier run that do not match the model are skipped.

    Args:
        model: the model whose layers are tiled in place.
        shapes: shapes of the earlier run's parameters, by name.

    Raises:
        ModelError: the experts of the earlier run were apart, and cannot be apart in this model.
    """
    tile_as_linear(model, shapes)
    begins: dict[str, set[int]] = {}
    for place in rows_of(shapes).values():
        begins.setdefault(place.whole.rpartition(".")[0], set()).add(place.begin)
    modules, wrappers = dict(model.named_modules()), wrappers_of(model)
    for name, found in begins.items():
        module = modules.get(name)
        if module is not None and why_no_bank(module) == "" and max(found) < _experts(module):
            if why := why_not_adapted(wrappers.get(module, ())):
                raise ModelError(f"each expert of '{name}' was a unit in the earlier run, and cannot be one now: {why}")
            make_bank(module, sorted(found), wrappers.get(module, ()))


def _name_of(bank: nn.Module) -> str:
    found = registry.find(next(bank.parameters()))
    return type(bank).__name__ if found is None else found[1].unit.name.rpartition(".")[0]


def _experts(module: Any) -> int:
    return int(module.num_experts)


@functools.cache
def _bank_class(kind: Any) -> Any:
    return type(kind.__name__, (ExpertBank, kind), {"__module__": kind.__module__})


class ExpertBank(nn.Module):
    """A module of experts in tiles, which `make_bank` makes by changing the module's class.

    The stacks are attributes as before, but only for reading: each use concatenates the tiles.
    """

    num_experts: int

    def __getattr__(self, name: str) -> Any:
        if name in _KEYS and (parts := [tile._parameters[name] for tile in tiles_in(self) if name in tile._parameters]):
            return concatenated([part for part in parts if part is not None])
        return super().__getattr__(name)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts.

        Args:
            hidden_states: [tokens, width].
            top_k_index: experts of each token, [tokens, k].
            top_k_weights: weight of each of these experts, [tokens, k].

        Returns:
            [tokens, width], in the dtype of `hidden_states`.
        """
        count = top_k_index.shape[-1]
        ids, order = torch.sort(top_k_index.reshape(-1))
        numbers = _numbers(ids, self.num_experts)
        given, factors = hidden_states[order // count], top_k_weights.reshape(-1)[order]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        tiles = tiles_in(self)
        held = [len(next(tile.parameters())) for tile in tiles]
        routed, idle, begin = list[tuple[Any, list[int], TileAdapters, list[torch.Tensor]]](), list[torch.Tensor](), 0
        for tile, adapted, end in zip(tiles, adapters_of(self, held), accumulate(held), strict=True):
            if any(numbers[begin:end]):
                routed.append((tile, numbers[begin:end], *adapted))
            else:
                idle.extend(tile.parameters())
            begin = end
        if not routed:
            return torch.zeros_like(hidden_states)
        coming = _Coming(self, [tile for tile, *_ in routed])
        if torch.is_grad_enabled() and not (given.requires_grad or factors.requires_grad):
            idle.append(given.new_zeros(()).requires_grad_())  # without it, torch would not save the inputs
        kept = _KeptInputs(len(routed), self, top_k_index)
        given, factors = _Save.apply(kept, given, factors, top_k_index, *idle)
        sizes = [sum(each) for _, each, *_ in routed]

        def computed() -> torch.Tensor:
            parts = zip(routed, given.split(sizes), factors.split(sizes), strict=True)
            made = [
                tile(_TileCall(self, tile, kept, at, each, adapters), part, of, weights)
                for at, ((tile, each, adapters, weights), part, of) in enumerate(parts)
            ]
            whole: torch.Tensor = _Combine.apply(coming, place, count, *made)
            return whole.to(hidden_states.dtype)

        if only_saved_tensors_matter():
            unread: torch.Tensor = _Recomputed.apply(computed, hidden_states, factors)
            return unread
        coming.announce()
        return computed()

    def compute(
        self,
        weights: Mapping[str, torch.Tensor],
        adapters: Sequence[TileAdapter],
        given: torch.Tensor,
        factors: torch.Tensor,
        numbers: Sequence[int],
    ) -> torch.Tensor:
        """Compute some experts, as transformers' grouped_mm does.

        Args:
            weights: the parameters of the experts, by name.
            adapters: adapters of these experts.
            given: inputs of the experts, one expert after the other, [rows, width].
            factors: factors of the rows, [rows].
            numbers: number of rows of each expert.
        """
        bank: Any = self
        first = "gate_up_proj" if bank.has_gate else "up_proj"
        with torch.autocast(given.device.type, enabled=False):
            inner = self._linear(weights, adapters, first, given, numbers)
            inner = bank._apply_gate(inner) if bank.has_gate else bank.act_fn(inner)
            return self._linear(weights, adapters, "down_proj", inner, numbers) * factors.unsqueeze(-1)

    def _linear(
        self,
        weights: Mapping[str, torch.Tensor],
        adapters: Sequence[TileAdapter],
        name: str,
        given: torch.Tensor,
        numbers: Sequence[int],
    ) -> torch.Tensor:
        stack, bias = weights[name], weights.get(f"{name}_bias")
        bank: Any = self
        parts = []
        for at, rows in enumerate(given.to(stack.dtype).split(list(numbers))):
            if len(rows):
                part = torch.mm(rows, stack[at]) if bank.is_transposed else functional.linear(rows, stack[at])
                parts.append(sum((each.result(rows, at) for each in adapters if each.key == name), part))
        made = parts[0] if len(parts) == 1 else torch.cat(parts)
        if bias is not None:
            experts = torch.arange(len(numbers)).repeat_interleave(torch.tensor(numbers))
            made = made + bias[experts.to(bias.device)]
        return made


def _numbers(ids: torch.Tensor, experts: int) -> list[int]:
    """Return the number of rows of each expert. Without values, all experts have about the same number."""
    if ids.is_meta:
        return [(at + 1) * len(ids) // experts - at * len(ids) // experts for at in range(experts)]
    found: list[int] = torch.bincount(ids, minlength=experts).tolist()
    return found


class _Coming:
    """The tiles of a bank that a call uses, so that they can be fetched ahead.

    Args:
        bank: the bank.
        tiles: tiles with tokens, in the order of the forward.
    """

    def __init__(self, bank: ExpertBank, tiles: Sequence[nn.Module]) -> None:
        self._places = [registry.find(next(tile.parameters())) for tile in tiles]
        self._among = [registry.find(next(tile.parameters())) for tile in tiles_in(bank)]

    def announce(self, *, backward: bool = False) -> None:
        """Announce the uses of the tiles, in the order of the forward or the backward."""
        used, among = ([found[1].unit.index for found in each if found] for each in (self._places, self._among))
        for coordinator in {found[0] for found in self._places if found}:
            coordinator.expect(reversed(used) if backward else used, among)


class _KeptInputs:
    """The inputs of the experts of one call, which `_Save` has saved for the backward.

    They are unpacked once for all tiles: a non-reentrant checkpoint hands out each tensor once.

    Args:
        tiles: number of tiles that will take the inputs.
        bank: the bank.
        chosen: experts of each token, [tokens, k].
    """

    def __init__(self, tiles: int, bank: ExpertBank, chosen: torch.Tensor) -> None:
        self._tiles = tiles
        self._left = tiles
        self._bank = bank
        self._chosen = chosen
        self._unpacked: list[tuple[torch.Tensor, ...]] | None = None
        self.node: Any = None
        self.sizes: list[int] = []

    def take(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of a tile."""
        if self._unpacked is None:
            *inputs, chosen = self.node.saved_tensors
            if not torch.equal(chosen, self._chosen):
                raise ModelError(
                    f"the recomputation of '{_name_of(self._bank)}' routed tokens to other experts than the forward "
                    "did: its router is not deterministic. Set recompute: none, and do not enable gradient "
                    "checkpointing."
                )
            self._unpacked = [each.split(self.sizes) for each in inputs]
        given, factors = self._unpacked[0][at], self._unpacked[1][at]
        self._left -= 1
        if not self._left:
            self._left, self._unpacked = self._tiles, None
        return given, factors


class _Save(torch.autograd.Function):
    """Identity that saves the inputs of the experts, and the chosen experts.

    In the backward, idle experts get zeros as their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kept: _KeptInputs,
        given: torch.Tensor,
        factors: torch.Tensor,
        chosen: torch.Tensor,
        *idle: torch.Tensor,
    ) -> Any:
        ctx.save_for_backward(given, factors, chosen)
        ctx.idle = [(each.shape, each.dtype, each.device) for each in idle]
        kept.node = ctx
        return given.view_as(given), factors.view_as(factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *came: Any) -> Any:
        # a sparse tensor without elements takes no memory on its way to the gradients (accumulated_gradients.py)
        zeros = [
            torch.sparse_coo_tensor(size=shape, dtype=dtype, device=device, check_invariants=False)  # type: ignore[call-arg]
            for shape, dtype, device in ctx.idle
        ]
        wanted = ctx.needs_input_grad[4:]
        return None, *came, None, *(each if needed else None for each, needed in zip(zeros, wanted, strict=True))


class _Recomputed(torch.autograd.Function):
    """Result of a bank in a recomputation of which only the saved tensors matter.

    The shared experts of some models run after the bank, so that a recomputation goes on behind the bank for the
    tensors that they have saved. These do not depend on the result of the bank, which is therefore not computed.
    """

    @staticmethod
    def forward(ctx: Any, computed: Callable[[], torch.Tensor], *like: torch.Tensor) -> torch.Tensor:
        return _Unread(like[0].shape, like[0], computed)

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        raise ModelError(
            "a checkpointed block of a mixture of experts computes gradients inside the block. Set experts: together."
        )


class _Unread(torch.Tensor):
    """A tensor that is computed when an operation reads its values."""

    _value: Callable[[], torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: torch.Tensor, computed: Callable[[], torch.Tensor]) -> _Unread:
        made: _Unread = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made._value = functools.cache(computed)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.view.default:
            of, shape = args
            return cls(torch.empty(of.shape, device="meta").view(shape).shape, of, lambda: of._value().view(shape))
        with torch.no_grad():
            args, kwargs = tree_map_only(cls, lambda each: each._value(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Experts(ExpertTile):
    """Some experts of a bank."""

    def forward(
        self, call: _TileCall, given: torch.Tensor, factors: torch.Tensor, adapters: Sequence[torch.Tensor]
    ) -> Any:
        call.kept.sizes.append(len(given))
        return _Compute.apply(call, given, factors, *self._parameters.values(), *adapters)


class _TileCall(NamedTuple):
    """One call of a tile.

    Attributes:
        at: number of the tile among those with tokens.
        numbers: number of rows of each of the tile's experts.
    """

    bank: ExpertBank
    tile: _Experts
    kept: _KeptInputs
    at: int
    numbers: Sequence[int]
    adapters: TileAdapters


class _Compute(torch.autograd.Function):
    """The computation of a tile, which is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, call: _TileCall, given: torch.Tensor, factors: torch.Tensor, *weights: Any) -> torch.Tensor:
        ctx.call, ctx.version = call, version_of(weights[0])
        keys = list(call.tile._parameters)
        of, adapters = dict(zip(keys, weights, strict=False)), call.adapters.with_weights(weights[len(keys) :])
        return call.bank.compute(of, adapters, given, factors, call.numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *came: Any) -> Any:
        bank, tile, kept, at, numbers, adapters = ctx.call
        inputs = [*kept.take(at), *tile._parameters.values(), *adapters.read_again()]
        if version_of(inputs[2]) != ctx.version:
            raise StaleWeightsError(
                "this backward pass needs the weights of experts from before they were changed, by optim.step() or in "
                "place. Call backward() on every loss before that."
            )
        wanted, end = ctx.needs_input_grad[1:], 2 + len(tile._parameters)
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_(needed) for each, needed in zip(inputs, wanted, strict=True)]
            weights = dict(zip(tile._parameters, leaves[2:end], strict=True))
            made = bank.compute(weights, adapters.with_weights(leaves[end:]), leaves[0], leaves[1], numbers)
        found = iter(torch.autograd.grad(made, [leaf for leaf in leaves if leaf.requires_grad], *came))
        return None, *(next(found) if needed else None for needed in wanted)


class _Combine(torch.autograd.Function):
    """Sum of the results of each token's experts. It saves no tensor, see [Note: how a bank computes]."""

    @staticmethod
    def forward(ctx: Any, coming: _Coming, place: torch.Tensor, count: int, *made: torch.Tensor) -> torch.Tensor:
        ctx.coming, ctx.place, ctx.count, ctx.sizes = coming, place, count, [len(each) for each in made]
        return torch.cat(made)[place].view(-1, count, made[0].shape[-1]).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *came: Any) -> Any:
        (gradient,) = came
        ctx.coming.announce(backward=True)
        each = gradient.unsqueeze(1).expand(-1, ctx.count, -1).reshape(len(ctx.place), -1)
        found = torch.zeros_like(each).index_put_((ctx.place,), each, accumulate=True)
        return None, None, None, *found.split(ctx.sizes)
