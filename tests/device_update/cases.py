"""Random states and segments for the native kernel and for the update on a device."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch

from infinity import _native
from infinity.device_update.compared_updates import raw
from infinity.device_update.states import DeviceStates

CPU = torch.device("cpu")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
FORMS: dict[str, tuple[torch.dtype, Any]] = {
    "fp32": (torch.float32, "weight"),
    "split16": (torch.bfloat16, "split16"),
    "bf16": (torch.bfloat16, "fp32"),
    "fp16": (torch.float16, "fp32"),
}
GRADS = list(NAMES)
RULES: list[Any] = ["adamw", "adam", "lion", "adagrad", "sgd"]
HYPER: dict[str, list[Any]] = {
    "lr": [1e-3, 0.3, 0.0, 1e-5],
    "beta1": [0.9, 0.0, 0.99],
    "beta2": [0.999, 0.0, 0.95, 0.9999999],
    "eps": [1e-8, 0.0, 1e-40, 0.1],
    "weight_decay": [0.01, 0.0, 3.0],
    "dampening": [0.0, 0.1],
    "lr_decay": [0.0, 0.1],
    "initial_accumulator": [0.0, 0.5],
    "nesterov": [False, True],
    "maximize": [False, True],
    "grad_scale": [1.0, 0.37, 1 / 65536],
    "step": [1, 2, 1000],
    "fresh": [None, None, False, True],
}


def values(chance: np.random.Generator, numel: int, low: int, high: int, signed: bool = True) -> torch.Tensor:
    """Return fp32 values with exponents from `low` to `high` - 1, from their bits; -127 gives denormals and zeros."""
    bits = chance.integers(low + 127 << 23, high + 127 << 23, numel, np.uint32)
    signs = chance.integers(0, 2 if signed else 1, numel, np.uint32) << np.uint32(31)
    return torch.from_numpy((bits | signs).view(np.float32))


def rounded(full: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values in a dtype, rounded as infinity rounds weights."""
    if dtype == torch.float32:
        return full
    result = torch.empty(len(full), dtype=dtype)
    _native.round_weights(raw(full), raw(result), NAMES[dtype])  # type: ignore[arg-type]
    return result


def states(form: str, grad: torch.dtype, numel: int, seed: int, *, tiny: bool = False) -> DeviceStates:
    """Return random states; some of them are denormal or zero if `tiny`, and all gradients are finite."""
    chance, (dtype, master) = np.random.default_rng(seed), FORMS[form]
    low = -127 if tiny else -10
    full = values(chance, numel, low, 2)
    residual = None if master == "weight" else full.clone()
    weight = rounded(full, dtype)
    if master == "split16":
        residual = torch.empty(numel, dtype=torch.int16)
        _native.encode_split16(raw(full), raw(weight), raw(residual))
    moments = values(chance, numel, low, 0), values(chance, numel, low, 0, signed=False)
    return DeviceStates(master, weight, residual, *moments, rounded(values(chance, numel, low, 1), grad))


def segments(rule: Any, numel: int, seed: int, **fixed: Any) -> list[_native.Segment]:
    """Return segments with random hyperparameters; some are skipped, and some elements belong to none."""
    chance = random.Random(seed)
    cuts = sorted({0, numel, *(chance.randrange(numel + 1) for _ in range(chance.randrange(6)))})
    result = []
    for begin, end in itertools.pairwise(cuts):
        options = {name: chance.choice(choices) for name, choices in HYPER.items()} | fixed
        options["nesterov"] = options["nesterov"] and options["dampening"] == 0
        result.append(_native.Segment(begin, end, rule=rule, skip=chance.random() < 0.2, **options))
    return [segment for segment in result if len(result) == 1 or chance.random() < 0.9]


def native(here: DeviceStates, given: list[_native.Segment], pool: _native.ThreadPool) -> bool:
    """Do the step in the native kernel."""
    weight, residual, exp_avg, exp_avg_sq, grad = (None if each is None else raw(each) for each in here.tensors)
    return _native.optimizer_update(
        weight,
        residual,
        exp_avg,
        exp_avg_sq,
        grad,
        weight_dtype=NAMES[here.weight.dtype],  # type: ignore[arg-type]
        master=here.master,
        grad_dtype=NAMES[here.grad.dtype],  # type: ignore[arg-type]
        segments=given,
        pool=pool,
    )


def bits(given: DeviceStates) -> list[np.ndarray]:
    """Return the bits of the master, the weight and the moments, with the same bits for all NaNs."""
    tensors = [given.weight, given.exp_avg, given.exp_avg_sq]
    if given.master == "split16":
        assert given.residual is not None
        master = torch.empty(len(given.weight))
        _native.decode_split16(raw(given.weight), raw(given.residual), raw(master))
        tensors.append(master)
    elif given.residual is not None:
        tensors.append(given.residual)
    result = []
    for tensor in tensors:
        assert tensor is not None
        copied = tensor.clone()
        copied[copied.isnan()] = float("nan")
        result.append(raw(copied))
    return result


def assert_equal(here: DeviceStates, there: DeviceStates, why: Any) -> None:
    for index, (one, other) in enumerate(zip(bits(here), bits(there), strict=True)):
        assert np.array_equal(one, other), (index, why)
