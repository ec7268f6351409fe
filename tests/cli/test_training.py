"""The training of `infinity finetune`: its losses are those of a loop that calls the model, its optimizer and nothing
else, which recorded them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cli.test_examples import CHATML, byte_level
from tests.cli.test_finetune import TEXT, run
from tests.models import llama

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
TWO_PASSES = {"--epochs": 2, "--gradient-accumulation": 3, "--min-lr": 1e-4}

RECORDED: dict[str, tuple[Any, dict[str, Any], list[float]]] = {
    "text": (None, {"--steps": 5}, [6.2188449, 6.1113391, 5.6960192, 5.4719191, 5.3655744]),
    "two passes in batches across their border": (
        None,
        TWO_PASSES,
        [6.2188447, 6.1085799, 5.6805297, 5.4176371, 5.2315933, 5.1112819, 5.0449752],
    ),
    "packed chats, accumulated": (
        CHATS,
        PACKED | {"--steps": 4, "--gradient-accumulation": 2},
        [6.2347999, 5.8691213, 5.6188176, 5.4471996],
    ),
    "packed chats, layer by layer": (
        CHATS,
        PACKED | {"--steps": 3, "--micro-batches": 2},
        [6.2347999, 5.8691213, 5.6316574],
    ),
    "answers apart": (
        ANSWERS,
        {"--epochs": 1, "--sequence-length": 96, "--gradient-accumulation": 2, "--no-packing": None},
        [6.2091639, 6.0162551, 5.6837394, 5.4270501, 5.2853887, 5.2346612],
    ),
    "adapters": (None, {"--steps": 4, "--lora": 4}, [6.2188449, 6.2180052, 6.2171350, 6.2167749]),
}


@pytest.mark.parametrize("name", RECORDED)
def test_losses_are_those_that_a_plain_loop_recorded(name: str, tmp_path: Path) -> None:
    rows, options, expected = RECORDED[name]
    torch.manual_seed(0)
    model, _ = llama(2)
    model.resize_token_embeddings(500)
    model.save_pretrained(tmp_path / "model")
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / ("text.txt" if rows is None else "rows.jsonl")
    data.write_text(TEXT[:3000] if rows is None else "".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "8MiB", "host": "64MiB"},
        "nvme": {"paths": [str(tmp_path / "swap")]},
    }
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(config))
    job = {
        "--model": tmp_path / "model",
        "--data": data,
        "--config": tmp_path / "swap.yaml",
        "--output": tmp_path / "out",
        "--sequence-length": 32,
        "--batch-size": 2,
        "--lr": 3e-3,
        "--dtype": "fp32",
    } | options
    flags = [name for name, value in job.items() if value is None]
    assert run({name: value for name, value in job.items() if value is not None}, *flags) == 0
    with (tmp_path / "out" / "loss.csv").open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == pytest.approx(expected, rel=1e-6)
