"""The training of `infinity finetune`: its losses are those of a loop that calls the model, its optimizer and nothing
else, which recorded them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
import yaml

from tests.cli.test_examples import CHATML, byte_level
from tests.cli.test_finetune import TEXT, run
from tests.models import llama

WORDS = 500
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"say {index}"},
            {"role": "assistant", "content": "fox " * (1 + index % 5)},
        ]
    }
    for index in range(24)
]
ANSWERS = [{"prompt": f"say {index}:", "completion": " fox" * (1 + index % 5)} for index in range(24)]
PACKED = {"--sequence-length": 256, "--batch-size": 1}
APART = {"--epochs": 1, "--sequence-length": 96, "--gradient-accumulation": 2, "--no-packing": None}
TWO_PASSES = {"--epochs": 2, "--gradient-accumulation": 3, "--min-lr": 1e-4}


def small_llama() -> Any:
    model, _ = llama(2)
    model.resize_token_embeddings(WORDS)
    return model


def gpt2() -> Any:
    """With dropout; its class tells nothing of its loss."""
    config = hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return hf.GPT2LMHeadModel(config)


def bert() -> Any:
    """Its head has layers before the weight of the logits."""
    config = hf.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertLMHeadModel(config)


def capped() -> Any:
    """Its logits are capped, by a field of the config that no other model has."""
    config = hf.RecurrentGemmaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        lru_width=32,
        attention_window_size=32,
        vocab_size=WORDS,
        logits_soft_cap=0.1,
    )
    return hf.RecurrentGemmaForCausalLM(config)


def balanced() -> Any:
    """Return a mixture of experts whose config asks that its experts are used equally often."""
    config = hf.MixtralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=WORDS,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    return hf.MixtralForCausalLM(config)


class Case(NamedTuple):
    """Args: rows: of the data; None: text."""

    options: dict[str, Any]
    losses: list[float]
    rows: Any = None
    model: Callable[[], Any] = small_llama


RECORDED = {
    "text": Case({"--steps": 5}, [6.2188449, 6.1113391, 5.6960192, 5.4719191, 5.3655744]),
    "two passes in batches across their border": Case(
        TWO_PASSES, [6.2188447, 6.1085799, 5.6805297, 5.4176371, 5.2315933, 5.1112819, 5.0449752]
    ),
    "packed chats, accumulated": Case(
        PACKED | {"--steps": 4, "--gradient-accumulation": 2}, [6.2347999, 5.8691213, 5.6188176, 5.4471996], CHATS
    ),
    "packed chats, layer by layer": Case(
        PACKED | {"--steps": 3, "--micro-batches": 2}, [6.2347999, 5.8691213, 5.6316574], CHATS
    ),
    "answers apart": Case(APART, [6.2091639, 6.0162551, 5.6837394, 5.4270501, 5.2853887, 5.2346612], ANSWERS),
    "adapters": Case({"--steps": 4, "--lora": 4}, [6.2188449, 6.2180052, 6.2171350, 6.2167749]),
    "a seed above 32 bits": Case({"--steps": 2, "--seed": 2**32 + 7}, [6.2188449, 6.1103978]),
    "dropout": Case({"--steps": 3, "--gradient-accumulation": 2}, [6.2222123, 5.9537404, 5.8077302], model=gpt2),
    "a head of layers": Case({"--steps": 3}, [6.1972795, 6.0143280, 5.8895426], model=bert),
    "capped logits": Case({"--steps": 3}, [6.1979065, 6.1457806, 6.1243911], model=capped),
    "balanced experts": Case(
        APART, [7.3620665, 7.0989716, 6.9095716, 6.7333198, 6.6049237, 6.5376701], ANSWERS, balanced
    ),
}


def losses_of(case: Case, folder: Path) -> list[float]:
    torch.manual_seed(0)
    case.model().save_pretrained(folder / "model")
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "model")
    data = folder / ("text.txt" if case.rows is None else "rows.jsonl")
    data.write_text(TEXT[:3000] if case.rows is None else "".join(json.dumps(row) + "\n" for row in case.rows))
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "8MiB", "host": "64MiB"},
        "nvme": {"paths": [str(folder / "swap")]},
    }
    (folder / "swap.yaml").write_text(yaml.safe_dump(config))
    job = {
        "--model": folder / "model",
        "--data": data,
        "--config": folder / "swap.yaml",
        "--output": folder / "out",
        "--sequence-length": 32,
        "--batch-size": 2,
        "--lr": 3e-3,
        "--dtype": "fp32",
    } | case.options
    flags = [name for name, value in job.items() if value is None]
    assert run({name: value for name, value in job.items() if value is not None}, *flags) == 0
    with (folder / "out" / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.covering(most=7)
@pytest.mark.parametrize("name", RECORDED)
def test_losses_are_those_that_a_plain_loop_recorded(name: str, tmp_path: Path) -> None:
    assert losses_of(RECORDED[name], tmp_path) == pytest.approx(RECORDED[name].losses, rel=1e-6)


def test_tokens_count_the_same_where_a_model_takes_no_number_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
    case = RECORDED["answers apart"]
    assert losses_of(case, tmp_path) == pytest.approx(case.losses, rel=1e-6)
