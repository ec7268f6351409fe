"""LoRA adapters of a bank (experts.py): PEFT's ParamWrapper, which adapts the stacks of a module of experts.

In its forward, PEFT adds the product of the adapters to a copy of the whole stack. A bank adds the adapters' results
to those of each expert instead, and makes no tensor of a stack's size:

    x Wᵀ + scaling · (x Aᵀ) Bᵀ        A: [experts, r, in], B: [out, r, experts], as in PEFT
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from infinity.errors import StaleWeightsError
from infinity.runtime.tiles import tiles_in, version_of


class TileAdapter(NamedTuple):
    """Adapter of one stack, for the experts of a tile.

    Attributes:
        key: name of the stack.
        scaling: factor of the adapter's result.
        a: [experts, r, in].
        b: [out, r, experts].
    """

    key: str
    scaling: float
    a: torch.Tensor
    b: torch.Tensor

    def result(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the adapter's result for one expert.

        Args:
            rows: inputs of the expert, [rows, in].
            expert: number of the expert in the tile.
        """
        inner = functional.linear(rows, self.a[expert].to(rows.dtype))
        return functional.linear(inner, self.b[..., expert].to(rows.dtype)) * self.scaling

    def delta(self, *, transposed: bool) -> torch.Tensor:
        """Return what the adapter adds to the weights of its experts, computed as in PEFT's get_delta_weight.

        Args:
            transposed: whether the stack has the shape [experts, in, out], and not [experts, out, in].
        """
        return torch.einsum(f"ore,eri->{'eio' if transposed else 'eoi'}", self.b, self.a) * self.scaling


class StackAdapter(NamedTuple):
    """Adapter of one stack.

    Attributes:
        key: name of the stack.
        scaling: factor of the adapter's result.
        experts: number of experts.
        a: PEFT's weight of lora_A, [experts * r, in].
        b: PEFT's weight of lora_B, [out, r * experts].
    """

    key: str
    scaling: float
    experts: int
    a: nn.Parameter
    b: nn.Parameter

    def split(self, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
        """Return the weights of the adapters of all tiles, given the number of experts of each tile."""
        a, b = self._stacked()
        return [list(each) for each in zip(a.split(list(sizes)), b.split(list(sizes), dim=2), strict=True)]

    def narrow(self, begin: int, end: int) -> list[torch.Tensor]:
        """Return the weights of the adapter of the experts from `begin` to `end`."""
        a, b = self._stacked()
        return [a[begin:end], b[..., begin:end]]

    def of(self, a: torch.Tensor, b: torch.Tensor) -> TileAdapter:
        """Return the adapter of a tile, given its weights."""
        return TileAdapter(self.key, self.scaling, a, b)

    def _stacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a.view(self.experts, -1, self.a.shape[-1]), self.b.view(len(self.b), -1, self.experts)


class TileAdapters:
    """All adapters of a tile in one call of its bank.

    It keeps no weights, because a graph keeps it until the backward, and weights are views of the memory of a unit.

    Args:
        stacks: adapters of the bank.
        begin, end: the tile's experts.
    """

    def __init__(self, stacks: Sequence[StackAdapter], begin: int, end: int) -> None:
        self._stacks = stacks
        self._begin, self._end = begin, end
        self._versions = self._versions_now()

    def with_weights(self, weights: Sequence[torch.Tensor]) -> list[TileAdapter]:
        """Return the adapters, given the weights of all of them, in the order of `read_again`."""
        pairs = zip(self._stacks, weights[::2], weights[1::2], strict=True)
        return [each.of(a, b) for each, a, b in pairs]

    def read_again(self) -> list[torch.Tensor]:
        """Return the weights of all adapters, with the values that they have in the backward.

        Raises:
            StaleWeightsError: the adapters were changed since the call.
        """
        if self._versions_now() != self._versions:
            raise StaleWeightsError(
                "this backward pass needs the adapters of experts from before they were changed, by optim.step() or in "
                "place. Call backward() on every loss before that."
            )
        return [weight for each in self._stacks for weight in each.narrow(self._begin, self._end)]

    def _versions_now(self) -> list[int]:
        return [version_of(weight) for each in self._stacks for weight in (each.a, each.b)]


def wrappers_of(model: nn.Module) -> dict[nn.Module, list[Any]]:
    """Return PEFT's ParamWrappers in a model, by the module whose parameters they adapt."""
    found: dict[nn.Module, list[Any]] = {}
    layer: Any
    for layer in model.modules():
        if getattr(layer, "parameter_name", None) is not None and hasattr(layer, "get_base_layer"):
            found.setdefault(layer.get_base_layer(), []).append(layer)
    return found


def why_not_adapted(wrappers: Sequence[Any]) -> str:
    """Return why a bank cannot compute with the adapters of its wrappers; "" if it can."""
    for each in wrappers:
        base: Any = each.get_base_layer()
        stack = base._parameters.get(each.parameter_name)
        if stack is None or stack.dim() != 3 or each.num_experts != base.num_experts:
            return "the biases of experts have adapters"
        if getattr(each, "_did_swap_in_out_features", None) != (not base.is_transposed):
            return "this version of PEFT has another layout of the adapters of experts"
        if each.merged:
            return "its adapters are merged"
    return ""


def attach(bank: nn.Module, wrappers: Sequence[Any]) -> None:
    """Make PEFT's wrappers of a module give their adapters to the bank that the module will be."""
    for each in wrappers:
        kind: Any = type(each)
        each.__class__ = _adapting(kind)
    vars(bank)["adapters_of_call"] = list[tuple[Any, Sequence[str]]]()


def adapters_of(bank: nn.Module, sizes: Sequence[int]) -> list[tuple[TileAdapters, list[torch.Tensor]]]:
    """Return the adapters with which the tiles of a bank compute now, and their weights as autograd's graph has them.

    Args:
        bank: the bank.
        sizes: number of experts of each tile.
    """
    stacks = [adapter_of(wrapper, name) for wrapper, names in vars(bank)["adapters_of_call"] for name in names]
    parts = [each.split(sizes) for each in stacks]
    ends = list(accumulate(sizes, initial=0))
    return [
        (TileAdapters(stacks, begin, end), [weight for each in parts for weight in each[at]])
        for at, (begin, end) in enumerate(pairwise(ends))
    ]


def adapter_of(wrapper: Any, name: str) -> StackAdapter:
    """Return an adapter of one of PEFT's wrappers."""
    weights = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    return StackAdapter(wrapper.parameter_name, wrapper.scaling[name], wrapper.num_experts, *weights)


@functools.cache
def _adapting(kind: Any) -> Any:
    return type(kind.__name__, (_BankWrapper, kind), {"__module__": kind.__module__})


class _BankWrapper:
    """PEFT's ParamWrapper around a bank."""

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        """Make the bank compute with adapters; PEFT's own method parametrizes the stack."""
        wrapper: Any = self
        calls: list[tuple[Any, Sequence[str]]] = vars(wrapper.get_base_layer())["adapters_of_call"]
        calls.append((self, [name for name in active_adapters if name in wrapper.lora_A]))
        try:
            yield
        finally:
            calls.pop()

    def merge(self, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
        """Add adapters to the experts of all tiles, as PEFT's own method adds them to the stack.

        Raises:
            ValueError: the merged weights are not finite. Only checked with `safe_merge`.
        """
        wrapper: Any = self
        if isinstance(adapter_names, str):
            raise ValueError("adapter_names is a list of names")
        for name in wrapper.active_adapters if adapter_names is None else adapter_names:
            if name not in wrapper.lora_A or name in wrapper.merged_adapters:
                continue
            if safe_merge and not all(bool(torch.isfinite(merged).all()) for _, merged in self._merged(name, 1.0)):
                raise ValueError(f"the merged weights are not finite: the adapter {name} seems to be broken")
            self._add(name, 1.0)
            wrapper.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Subtract the merged adapters from the experts of all tiles."""
        wrapper: Any = self
        while wrapper.merged_adapters:
            self._add(wrapper.merged_adapters[-1], -1.0)
            wrapper.merged_adapters.pop()

    def _add(self, name: str, factor: float) -> None:
        for weight, merged in self._merged(name, factor):
            weight.data.copy_(merged)

    def _merged(self, name: str, factor: float) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the weight of each tile, and this weight plus the adapter times `factor`."""
        wrapper: Any = self
        bank, adapter, begin = wrapper.get_base_layer(), adapter_of(self, name), 0
        for tile in tiles_in(bank):
            weight = tile.get_parameter(wrapper.parameter_name)
            parts = adapter.of(*adapter.narrow(begin, begin + len(weight)))
            yield weight, weight.data + factor * parts.delta(transposed=bool(bank.is_transposed)).to(weight.dtype)
            begin += len(weight)
