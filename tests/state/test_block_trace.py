"""The memory for a block's activations, from a trace without values, is the memory that the block takes with values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from infinity.state import model_shape
from infinity.state.block_trace import blocks_of, trace_block
from infinity.state.model_shape import shape_of

WIDTHS = {
    "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": WIDTHS,
    "qwen2": WIDTHS | {"intermediate_size": 128},
    "mistral": WIDTHS | {"sliding_window": None},
    "mixtral": WIDTHS | {"num_local_experts": 4, "experts_implementation": "grouped_mm"},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "attn_pdrop": 0.0},
}
SEQUENCES, LENGTH = 2, 96


def model_of(kind: str, device: str = "cpu", **values: Any) -> Any:
    with torch.device(device):
        config = AutoConfig.for_model(kind, **KINDS[kind] | values)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


class Living(TorchDispatchMode):
    """Counter of the bytes that tensors of this context take."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = weakref.WeakSet[Any](each.untyped_storage() for each in others)
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage() not in self.known:
                storage = each.untyped_storage()
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.end, storage.nbytes())
        return made

    def end(self, nbytes: int) -> None:
        self.now -= nbytes


def measured(model: Any) -> tuple[int, int]:
    """Return the bytes that a block keeps for its backward, and the maximum of its forward and backward."""
    block, found = blocks_of(model)[0], list[Any]()
    handle = block.register_forward_pre_hook(lambda _, args, kwargs: found.extend((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(torch.zeros(SEQUENCES, LENGTH, dtype=torch.long), use_cache=False)
    handle.remove()
    (entering, *others), named = found
    entering = entering.detach().requires_grad_()
    staying = [each for each in tree_leaves((others, named)) if isinstance(each, torch.Tensor)]
    staying += [*model.parameters(), *model.buffers()]
    kept = dict[int, Any]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if all(storage._cdata != each.untyped_storage()._cdata for each in staying):
            kept[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return tensor

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    with Living([*staying, entering]) as living:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            left = block(entering, *others, **named)
        left = left[0] if isinstance(left, tuple) else left
        kept_bytes = sum(nbytes for alive, nbytes in kept.values() if alive() is not None)
        left.backward(torch.zeros_like(left))
    return kept_bytes, living.peak - left.nbytes  # the block's result is no part of its recomputation


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_counts_the_bytes_that_a_block_with_values_takes(kind: str) -> None:
    model = model_of(kind)
    traced = trace_block(model, SEQUENCES, LENGTH)
    assert traced is not None
    kept, peak = measured(model)
    tokens = SEQUENCES * LENGTH
    assert traced.boundary.of(tokens) == tokens * 64 * 2
    assert traced.kept.of(tokens) == pytest.approx(kept, rel=0.01)
    assert traced.peak.of(tokens) == pytest.approx(peak, rel=0.04)


def test_a_block_of_llama_8b_keeps_49_and_peaks_at_65_bytes_per_width_and_token() -> None:
    """Measured with torch's fused attention in bf16, each storage once (docs/plan.md)."""
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    traced = trace_block(model_of("llama", "meta", **large), 1, 32768)
    assert traced is not None
    assert traced.kept.of(32768) / 32768 / 4096 == pytest.approx(49.1, rel=0.005)
    assert traced.peak.of(32768) / 32768 / 4096 == pytest.approx(65, rel=0.005)


def test_the_traced_model_does_not_change() -> None:
    model = model_of("llama").eval()
    before = {name: (each, each.clone()) for name, each in model.named_parameters()}
    assert trace_block(model, 1, 32) is not None
    for name, each in model.named_parameters():
        assert each is before[name][0]
        assert torch.equal(each, before[name][1])
        assert each.grad is None
    assert not model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def asks(tokens: torch.Tensor) -> None:
    if float(tokens.sum()) > 0:
        raise AssertionError


def raises(tokens: torch.Tensor) -> None:
    raise ValueError("not these tokens")


@pytest.mark.parametrize("breaks", [asks, raises])
def test_a_model_that_cannot_be_traced_gets_an_estimate(breaks: Callable[[torch.Tensor], None]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 64)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, tokens: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            breaks(tokens)
            return self.layers[0](self.embedding(tokens))  # type: ignore[no-any-return]

    assert trace_block(Model(), 1, 32) is None
    block = shape_of(Model(), 1, 32).block
    assert block == model_shape._estimate(Model(), 4, 64, 64)
    assert block.kept.per_token == 4 * (8 * 64 + 3 * 64)
