"""Helpers of the tests of portable copies: a run, and access to its copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

import infinity
from tests.models import Batch, gpt2, llama, loss_of, mixtral, tied_llama

MODELS = {"llama": llama, "tied_llama": tied_llama, "mixtral": mixtral, "gpt2": gpt2}
STEPS = 2
Config = Callable[..., dict[str, Any]]


def train(model: nn.Module, optim: Any, batch: Batch, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def begin(model: nn.Module, batch: Batch, config: dict[str, Any], steps: int = STEPS) -> tuple[Any, Any]:
    """Train `steps` steps; the fp32 masters of the weights are more precise than the weights."""
    infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, seed=7)
    infinity.track(torch.optim.lr_scheduler.StepLR(optim, 100), model=model)
    train(model, optim, batch, steps)
    return model, optim


def stored(directory: Path, batch: Batch, model: nn.Module, config: dict[str, Any], steps: int = STEPS) -> Path:
    """Run `steps` steps and close the model; return the swap directory."""
    begin(model, batch, config, steps)
    infinity.close(model)
    return Path(config["nvme"]["paths"][0])


def go_on(model: nn.Module, batch: Batch, steps: int) -> list[float]:
    """Continue an imported run with an optimizer whose hyperparameters differ from the run's; return the losses."""
    optim = infinity.AdamW(model.parameters(), lr=0.5, seed=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 100)
    assert infinity.track(scheduler, model=model) == STEPS
    return train(model, optim, batch, steps)


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "to_torch_adamw.py"
    spec = importlib.util.spec_from_file_location("to_torch_adamw", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found
