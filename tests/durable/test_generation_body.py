"""The body of a generation is believed only as far as it can be true: every lie is a ManifestError that names it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from infinity.durable import rng
from infinity.durable.generation_body import parse_body
from infinity.errors import ManifestError

Change = Callable[[dict[str, Any]], None]


def body() -> dict[str, Any]:
    """Return the body of a model of two matrices and a tied name, trained with AdamW."""
    group = {"unit": "block", "group": 0, "dtype": "bfloat16", "trainable": True, "master": "split16"}
    frozen = group | {"group": 1, "trainable": False, "numel": 256, "moments": "fp32"}
    first = {"name": "block.up", "aliases": ["head"], "shape": [4, 100], "unit": "block", "group": 0, "offset": 0}
    second = first | {"name": "block.down", "aliases": [], "shape": [7], "offset": 512}
    hyperparameters = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "amsgrad": False,
        "maximize": False,
        "seed": 0,
        "initial_lr": 1e-3,
        "note": b"mine",
    }
    progress = {"step": 3, "begun": {"exp_avg": True, "exp_avg_sq": True}}
    return {
        "optimizers": [
            {
                "class_name": "AdamW",
                "param_groups": [hyperparameters | {"params": ["block.up", "block.down"]}],
                "state": {"block.up": progress, "block.down": copy.deepcopy(progress)},
                "last_grad_norm": float("nan"),
                "skipped_steps": 0,
                "skips_in_a_row": 0,
            }
        ],
        "tracked": {},
        "model": {
            "class_name": "Net",
            "config": None,
            "generation_config": None,
            "groups": [group | {"numel": 768, "moments": "int8"}, frozen],
            "parameters": [first, second, second | {"name": "scale", "group": 1, "offset": 0}],
        },
        "buffers": {"mean": torch.zeros(2)},
        "rng": rng.snapshot(),
        "rng_before_forward": None,
    }


def test_what_a_run_writes_is_read() -> None:
    parse_body(body(), "here")
    tensors = body()
    tensors["optimizers"][0]["param_groups"][0] |= {"lr": torch.tensor(0.1), "eps": np.float64(1e-8), "seed": 2**64 - 1}
    parse_body(tensors, "here")
    other = body()
    random.seed(7)
    other["rng"] = other["rng_before_forward"] = rng.snapshot()
    parse_body(other, "here")


def optimizer(key: str, value: Any) -> Change:
    return lambda found: found["optimizers"][0].update({key: value})


def group(key: str, value: Any) -> Change:
    return lambda found: found["optimizers"][0]["param_groups"][0].update({key: value})


def model(record: str, index: int, key: str, value: Any) -> Change:
    return lambda found: found["model"][record][index].update({key: value})


def drawn(key: str, value: Any) -> Change:
    return lambda found: found["rng"].update({key: value})


def numpys(state: dict[str, Any]) -> Change:
    return lambda found: found["rng"]["numpy"].update({"state": state})


WORDS = np.zeros(624, dtype=np.uint32)
WRONG: dict[str, tuple[Change, str]] = {
    "half of a surrogate pair": (lambda found: found["model"].update(config='"\ud800"'), "model.config: .*surrogates"),
    "lr a string": (group("lr", "1e-3"), r"optimizers\.0\.param_groups\.0: lr is a str, not a finite number"),
    "lr NaN": (group("lr", float("nan")), "lr is nan, not a finite number"),
    "lr infinite": (group("initial_lr", float("inf")), "initial_lr is inf"),
    "lr two numbers": (group("lr", torch.zeros(2)), "lr is a Tensor"),
    "lr an infinite tensor": (group("lr", torch.tensor(float("-inf"))), "lr is a Tensor"),
    "lr True": (group("lr", True), "lr is True"),
    "lr huge": (group("lr", 10**400), "lr is a int"),
    "no lr": (lambda found: found["optimizers"][0]["param_groups"][0].pop("lr"), "lr is missing"),
    "one beta": (group("betas", [0.9]), "betas is a list, not a pair of numbers"),
    "a beta None": (group("betas", (None, 0.9)), r"betas\[0\] is None"),
    "a beta dict": (group("betas", {"0": 0.9}), "betas is a dict"),
    "eps a list": (group("eps", [1]), "eps is a list"),
    "seed negative": (group("seed", -1), "seed is a int, not an integer between 0 and"),
    "seed a string": (group("seed", "0"), "seed is a str"),
    "amsgrad a list": (group("amsgrad", [1]), "amsgrad is a list"),
    "params a string": (group("params", "block.up"), "params is not a list of names"),
    "params of numbers": (group("params", [1]), "params is not a list of names"),
    "params unknown": (group("params", ["nobody"]), "AdamW has 'nobody', which is not a parameter of the model"),
    "groups no list": (optimizer("param_groups", {}), "param_groups"),
    "state unknown": (optimizer("state", {"x": {"step": 1, "begun": {"exp_avg": True}}}), "AdamW has .* of 'x'"),
    "state frozen": (
        lambda found: found["optimizers"][0]["state"].update(scale=found["optimizers"][0]["state"]["block.up"]),
        "trained 'scale', which is not a trained parameter",
    ),
    "a moment missing": (
        lambda found: found["optimizers"][0]["state"]["block.up"]["begun"].pop("exp_avg"),
        "AdamW has .*of 'block.up' and not",
    ),
    "a moment not begun": (
        lambda found: found["optimizers"][0]["state"]["block.up"]["begun"].update(exp_avg=False),
        "begun.exp_avg: Input should be True",
    ),
    "steps a string": (
        lambda found: found["optimizers"][0]["state"]["block.up"].update(step="3"), r"state\.block\.up\.step"
    ),
    "two optimizers with a parameter": (
        lambda found: found["optimizers"].append(copy.deepcopy(found["optimizers"][0])),
        "the optimizer's state of 'block.up' twice",
    ),
    "grad norm a string": (optimizer("last_grad_norm", "nan"), "last_grad_norm"),
    "dtype unknown": (model("groups", 0, "dtype", "float8"), r"model\.groups\.0\.dtype"),
    "master of another dtype": (model("groups", 0, "dtype", "float16"), "float16 weights with a split16 master"),
    "group twice": (model("groups", 1, "group", 0), "the group .* twice"),
    "group too large": (model("groups", 0, "numel", 1024), "has 1024 elements instead of 768"),
    "group negative": (model("groups", 0, "numel", -1), "greater than or equal to 0"),
    "a million groups": (
        lambda found: found["model"].update(groups=[found["model"]["groups"][0]] * 1_000_000), "at most 131072 items"
    ),
    "shape huge": (model("parameters", 2, "shape", [1 << 40, 1 << 40]), "'scale' is not where it belongs|elements"),
    "shape of too many dimensions": (model("parameters", 2, "shape", [1] * 65), "at most 64 items"),
    "shape other": (model("parameters", 0, "shape", [4, 300]), "'block.down' is not where it belongs in its group, at"),
    "offset between": (model("parameters", 1, "offset", 513), "'block.down' is not where it belongs"),
    "offset of another": (model("parameters", 1, "offset", 0), "'block.down' is not where it belongs"),
    "group not there": (model("parameters", 0, "group", 7), "'block.up' is in group 7 of 'block', which does not"),
    "name twice": (model("parameters", 1, "name", "block.up"), "the parameter 'block.up' twice"),
    "alias of another": (model("parameters", 0, "aliases", ["scale"]), "the parameter 'scale' twice"),
    "name of metadata": (model("parameters", 0, "name", "__metadata__"), "cannot be the name of a tensor"),
    "name long": (model("parameters", 0, "name", "x" * 5000), "at most 4096 characters"),
    "config an object": (lambda found: found["model"].update(config={}), r"model\.config"),
    "buffer a number": (lambda found: found["buffers"].update(mean=1.0), "buffers: not a dict of tensors by name"),
    "buffer without a name": (lambda found: found.update(buffers={1: torch.zeros(1)}), "not a dict of tensors by name"),
    "buffer a parameter": (lambda found: found["buffers"].update(head=torch.zeros(1)), "'head' is a parameter and a"),
    "no generator of torch": (lambda found: found["rng"].pop("torch"), "rng: states of the generators"),
    "torch's too wide": (drawn("torch", torch.zeros(5056, dtype=torch.int64)), "no states of torch's generators"),
    "cuda a number": (drawn("cuda", 3), "no states of torch's generators"),
    "python's short": (drawn("python", (3, WORDS, None)), "no state of Python's generator"),
    "python's index": (
        drawn("python", (3, np.append(WORDS, np.uint32(700)), None)), "no state of Python's generator"
    ),
    "numpy's index": (numpys({"key": WORDS, "pos": 1 << 40}), "no state of numpy's generator"),
    "numpy's words": (numpys({"key": WORDS[:5], "pos": 0}), "no state of numpy's generator"),
    "numpy's no dict": (drawn("numpy", [1]), "no state of numpy's generator"),
    "more": (lambda found: found.update({"\x1b[2Jmore": 1}), r"\\x1b\[2Jmore: Extra inputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_named(name: str) -> None:
    change, message = WRONG[name]
    wrong = body()
    change(wrong)
    with pytest.raises(ManifestError, match=f"^here has a wrong value: .*({message})"):
        parse_body(wrong, "here")
