"""What a DeepSpeed config says about training: options that `infinity finetune` takes, and infinity's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.cli.arguments import build_finetune_parser
from infinity.cli.deepspeed.reading import read
from infinity.cli.deepspeed.training import finetune_options, optimizer_call
from tests.cli.deepspeed.public import PUBLIC, Public
from tests.cli.deepspeed.test_conversion import by_source, file_of, written
from tests.models import llama


def options(values: Any, directory: Path) -> str:
    return " ".join(finetune_options(read(written({"zero_optimization": {"stage": 3}} | values, directory))))


def adam(kind: str = "AdamW", **params: object) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"weight_decay": "auto"} | params}, "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_the_options_for_a_public_config_are_options(public: Public, tmp_path: Path) -> None:
    source = read(file_of(public, tmp_path))
    build_finetune_parser().parse_args(finetune_options(source))


def test_an_optimizer_and_a_schedule_become_options(tmp_path: Path) -> None:
    values = adam(lr=3e-5, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7) | {
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": 50, "cos_min_ratio": 0.1},
        },
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
    }
    assert options(values, tmp_path) == (
        "--optimizer adamw --lr 3e-05 --beta1 0.8 --beta2 0.999 --eps 1e-08 --weight-decay 3e-07 --max-grad-norm 0.5 "
        "--schedule cosine --warmup-steps 5 --steps 50 --min-lr 3e-06 --log-every 10"
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "--batch-size 4 --gradient-accumulation 2",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 64},
            "--batch-size 4 --gradient-accumulation 16",
        ),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 8}, "--batch-size 8 --gradient-accumulation 8"),
        ({"train_batch_size": 64}, "--batch-size 64"),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, ""),
        ({"train_batch_size": -1, "gradient_clipping": -1, "steps_per_print": 1.5}, ""),
        ({"train_batch_size": "many", "gradient_clipping": "0.5"}, ""),
        ({"steps_per_print": 10_000_000}, ""),
        ({"gradient_clipping": 0}, "--max-grad-norm 0"),
        ({"bf16": {"enabled": True}}, "--dtype bf16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "--dtype fp16"),
        ({"bf16": {"enabled": False}}, "--dtype fp32"),
        (adam("Adam", lr=1e-3), "--optimizer adamw --lr 0.001 --schedule constant"),
        (adam("Adam", lr="auto", adam_w_mode=False), "--optimizer adam"),
        (adam("Lion", betas=[0.9, 0.99], eps=1e-8), "--optimizer lion --beta1 0.9 --beta2 0.99"),
        (adam("SGD", lr=0.1, betas=[0.9, 0.99], momentum=0.9), "--optimizer sgd --lr 0.1 --schedule constant"),
        (adam("Lamb", lr=0.1), "--lr 0.1 --schedule constant"),
        (adam(lr="auto", betas="auto", eps="auto"), "--optimizer adamw"),
        (adam(betas=[0.9], lr=[1]), "--optimizer adamw"),
        ({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": "auto"}}, "--optimizer adamw --weight-decay 0.0"),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "bf16": {"enabled": "auto"}},
            "--optimizer adamw",
        ),
    ],
)
def test_values_become_options_where_the_option_takes_them(values: Any, expected: str, tmp_path: Path) -> None:
    assert options({"bf16": {"enabled": "auto"}} | values, tmp_path) == expected


@pytest.mark.parametrize(
    ("values", "call"),
    [
        (
            adam(lr=3e-5, betas=[0.8, 0.999], eps=1e-8) | {"gradient_clipping": 1.0},
            "AdamW(lr=3e-05, betas=(0.8, 0.999), eps=1e-08, max_grad_norm=1.0)",
        ),
        (adam("Adam", lr=1e-3, adam_w_mode=False), "Adam(lr=0.001)"),
        (adam("Lion", lr=1e-3, eps=1.0), "Lion(lr=0.001)"),
        (adam("Adagrad", lr=1e-3, eps=1e-8), "Adagrad(lr=0.001, eps=1e-08)"),
        (adam("SGD", lr=0.1, momentum=0.9, weight_decay=0.1), "SGD(lr=0.1, weight_decay=0.1, momentum=0.9)"),
        (adam("Lamb"), None),
        ({}, None),
    ],
)
def test_the_optimizer_of_a_loop_of_ones_own_can_be_made(values: Any, call: str | None, tmp_path: Path) -> None:
    got = optimizer_call(read(written({"zero_optimization": {"stage": 3}} | values, tmp_path)))
    expected = "" if call is None else f"infinity.{call}".replace("(", "(model.parameters(), ", 1)
    assert got == expected
    if got:
        model = infinity.offload(llama(layers=1)[0], {"weights": "host", "optimizer": "host"})
        eval(got, {"infinity": infinity, "model": model})
        infinity.close(model, discard=True)
