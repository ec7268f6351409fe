"""Small models of every architecture the tests train, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

hf.logging.set_verbosity_error()
_ = hf.LlamaForCausalLM  # imports now, instead of in the first test that makes a model

VOCABULARY = 128
Batch = dict[str, torch.Tensor]


def _ids(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def llama(layers: int = 4, **options: Any) -> tuple[nn.Module, Batch]:
    config = hf.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        **options,
    )
    return hf.LlamaForCausalLM(config), {"input_ids": _ids(), "labels": _ids()}


def tied_llama() -> tuple[nn.Module, Batch]:
    return llama(tie_word_embeddings=True)


def gpt2(dropout: float = 0.0) -> tuple[nn.Module, Batch]:
    config = hf.GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf.GPT2LMHeadModel(config), {"input_ids": _ids(), "labels": _ids()}


def bert() -> tuple[nn.Module, Batch]:
    config = hf.BertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config), {"input_ids": _ids(), "labels": _ids()}


def t5() -> tuple[nn.Module, Batch]:
    config = hf.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": _ids(), "labels": _ids()}


def whisper() -> tuple[nn.Module, Batch]:
    config = hf.WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    features = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
    return hf.WhisperForConditionalGeneration(config), {"input_features": features, "labels": _ids()}


def mixtral() -> tuple[nn.Module, Batch]:
    config = hf.MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=VOCABULARY,
    )
    return hf.MixtralForCausalLM(config), {"input_ids": _ids(), "labels": _ids()}


def qwen3_moe() -> tuple[nn.Module, Batch]:
    config = hf.Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
    )
    return hf.Qwen3MoeForCausalLM(config), {"input_ids": _ids(), "labels": _ids()}


class MixedDtypes(nn.Module):
    """Blocks with bf16 matrices and fp32 norms; each block has a frozen matrix. The output is reduced to a loss."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.up = nn.Linear(32, 64).bfloat16()
            self.fixed = nn.Linear(64, 64).bfloat16().requires_grad_(False)
            self.down = nn.Linear(64, 32).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.fixed(torch.relu(self.up(self.norm(x).bfloat16())))
            return x + self.down(inner).float()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedDtypes.Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x * self.scale) ** 2).mean()


def mixed() -> tuple[nn.Module, Batch]:
    return MixedDtypes(), {"x": torch.randn(8, 32, generator=torch.Generator().manual_seed(3))}


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "llama": llama,
    "tied_llama": tied_llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "whisper": whisper,
    "mixtral": mixtral,
    "mixed": mixed,
}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss
