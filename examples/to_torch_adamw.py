"""Continuation of a run in plain PyTorch, from the copy that `infinity checkpoint export` wrote.

The script needs transformers and torch.optim.AdamW. It does not need infinity.

    model, optimizer = load("exported")

The weights are the run's fp32 masters, if it had any. The optimizer has the run's steps, moments and hyperparameters.
The model and its states must fit in memory: 16 bytes per parameter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "maximize")


class OptimizerFiles:
    """Tensors in the `optimizer` folder of an export, by name, and the index with their files."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory / "optimizer"
        self.index: dict[str, Any] = json.loads((self.folder / "optimizer.safetensors.index.json").read_text())
        self.names = self.index["weight_map"]

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.names[name], framework="pt") as file:
            return file.get_tensor(name).clone()


def load(directory: str | Path) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Return the model in fp32 and its optimizer in the final state of the run.

    Args:
        directory: the exported copy.

    Raises:
        ValueError: the run was not trained with one infinity.AdamW.
    """
    files = OptimizerFiles(Path(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    load_masters(model, files)
    return model, make_optimizer(model, files)


def load_masters(model: torch.nn.Module, files: OptimizerFiles) -> None:
    """Replace weights that were rounded to bf16 or fp16 by their fp32 master values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}.master" in files.names:
                parameter.copy_(files.read(f"{name}.master"))


def make_optimizer(model: torch.nn.Module, files: OptimizerFiles) -> torch.optim.AdamW:
    """Return a torch.optim.AdamW with the parameter groups, steps and moments of the run."""
    saved = files.index["metadata"]["optimizers"]
    if [optimizer["class_name"] for optimizer in saved] != ["AdamW"]:
        raise ValueError(f"the run was trained with {[optimizer['class_name'] for optimizer in saved]}, not one AdamW")
    groups, steps = saved[0]["param_groups"], saved[0]["steps"]
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in group["params"]], **{key: group[key] for key in HYPERPARAMETERS}}
            for group in groups
        ]
    )
    packed = optimizer.state_dict()
    names = [name for group in groups for name in group["params"]]
    packed["state"] = {
        index: {
            "step": torch.tensor(float(steps[name])),
            "exp_avg": files.read(f"{name}.exp_avg"),
            "exp_avg_sq": files.read(f"{name}.exp_avg_sq"),
        }
        for index, name in enumerate(names)
        if steps.get(name)
    }
    optimizer.load_state_dict(packed)
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="folder that `infinity checkpoint export` wrote")
    parser.add_argument("output", type=Path, help="file for torch.save: the state_dicts of model and optimizer")
    options = parser.parse_args()
    model, optimizer = load(options.directory)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.output)
    print(f"wrote {len(optimizer.state)} parameters with their states to {options.output}")


if __name__ == "__main__":
    main()
