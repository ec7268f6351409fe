"""Whatever architecture a Trainer is given, it trains the same with its model offloaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tests import sampling
from tests.families import FAMILIES
from tests.integrations.conftest import Launch
from tests.models import ARCHITECTURES, VOCABULARY, Batch, loss_of
from tests.runtime.alike import tight

STEPS = 3
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LANGUAGE: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Mistral": {},
    "Ministral": {},
    "Gemma": {},
    "Gemma2": {},
    "Gemma3Text": {},
    "Phi": {},
    "Phi3": {},
    "Falcon": {"head_dim": None, "num_kv_heads": 2, "new_decoder_architecture": True},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Bloom": {"n_head": 4, "n_layer": 3},
    "GPTNeoX": {},
    "GPTJ": {"n_embd": 64, "n_head": 4, "n_layer": 3, "rotary_dim": 8, "n_inner": 128, "n_positions": 64},
    "GPTNeo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, "num_hidden_layers": 4},
    "Olmo": {},
    "Olmo2": {},
    "StableLm": {},
    "Starcoder2": {},
    "Cohere": {},
    "Granite": {},
    "Glm": {},
    "SmolLM3": {},
    "Mamba": {"state_size": 8, "expand": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
}


def language(name: str) -> Callable[[], tuple[nn.Module, Batch]]:
    def make() -> tuple[nn.Module, Batch]:
        config = getattr(hf, f"{name}Config")(
            **{key: value for key, value in (SMALL | LANGUAGE[name]).items() if value is not None}
        )
        ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
        return hf.AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}

    return make


EVERY = {name: make for name, make in ARCHITECTURES.items() if name != "mixed"}
EVERY |= FAMILIES | {name: language(name) for name in LANGUAGE}


class OneBatch(Trainer):
    """Trains on the same batch in every step, whatever is in it."""

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss_of(model, inputs)


def saved(model: nn.Module, directory: Path) -> dict[str, Path]:
    """Write the models that are in a model, each as from_pretrained reads it: by the name of the module."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(outer) for outer in found):
            found[name] = directory / (name or "model")
            module.save_pretrained(found[name])
    return found


def loaded(make: Callable[[], tuple[nn.Module, Batch]], files: dict[str, Path]) -> tuple[nn.Module, Batch]:
    """Return the same model, loaded from files as by a script."""
    torch.manual_seed(0)
    model, batch = make()
    for name, directory in files.items():
        kind = type(model.get_submodule(name))
        inner = kind.from_pretrained(directory, dtype=torch.float32)
        if not name:
            return inner, batch
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, inner)
    return model, batch


def train(model: nn.Module, batch: Batch, output: Path) -> list[float]:
    torch.manual_seed(1)
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        adam_epsilon=1e-3,  # gradients that are zero but for rounding move nothing
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = OneBatch(model, args, data_collator=lambda _: dict(batch), train_dataset=[{}] * STEPS)
    trainer.train()
    keys = ("loss", "grad_norm")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


ALWAYS = ["llama", "t5", "Qwen3Moe", "deberta"]


@pytest.mark.parametrize("name", ALWAYS + sampling.some([name for name in EVERY if name not in ALWAYS]))
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_trains_as_without_infinity(name: str, launch: Launch, tmp_path: Path) -> None:
    """The tolerance is for torch's norm: clip_grad_norm_ adds squares in fp32 (3e-6 off for whisper), infinity in
    double, so that gradients are clipped by another factor in the seventh digit, and later steps differ by more."""
    torch.manual_seed(0)
    model, _ = EVERY[name]()
    files = saved(model, tmp_path)
    logs = []
    for context in (nullcontext(), launch(memory=tight(model, together=3))):
        with context:
            logs.append(train(*loaded(EVERY[name], files), tmp_path / "out"))
    assert len(logs[0]) == 2 * STEPS
    torch.testing.assert_close(logs[1][::2], logs[0][::2], rtol=5e-5, atol=1e-5)  # losses
    torch.testing.assert_close(logs[1][1::2], logs[0][1::2], rtol=5e-4, atol=1e-5)  # norms
