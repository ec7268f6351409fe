"""Results of a script, read with plain libraries: the losses, the weights, and the logits of the saved models."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.unchanged.scripts import SAVED, STEPS, Job

_COMPARED = ("loss", "eval_loss", "grad_norm", "reward_std")

History = dict[tuple[int, str], float]


def history_of(job: Job) -> History:
    """Return the script's losses and gradient norms, by step and name. If several runs have the same step, the value of
    the last run is returned.
    """
    reported: History = {}
    for line in _lines(job):
        for name in _COMPARED:
            if line.get(name) not in (None, ""):
                reported[int(line["step"]), name] = float(line[name])
    return reported


def _lines(job: Job) -> list[dict[str, Any]]:
    state = job.output / "trainer_state.json"
    if state.exists():
        return list(json.loads(state.read_text())["log_history"])
    metrics = sorted(job.output.glob("lightning_logs/version_*/metrics.csv"), key=_version)
    if metrics:  # Lightning counts the steps before the current one
        rows = [row for path in metrics for row in csv.DictReader(path.read_text().splitlines())]
        return [row | {"step": int(row["step"]) + 1} for row in rows]
    return [json.loads(line) for line in job.log.read_text().splitlines() if line.startswith('{"step"')]


def first_step_of_last_run(job: Job) -> int:
    """Return the first step of Lightning's last run. Lightning writes separate metrics for each run."""
    last = max(job.output.glob("lightning_logs/version_*/metrics.csv"), key=_version)
    return 1 + min(int(row["step"]) for row in csv.DictReader(last.read_text().splitlines()))


def _version(path: Path) -> int:
    return int(path.parent.name.removeprefix("version_"))


def completions_of(job: Job) -> list[str]:
    """Return the token ids of every completion that GRPO sampled, in their order."""
    return (job.output / "completions.jsonl").read_text().splitlines()


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    """Return the final weights or adapters."""
    return load_file(job.output / ("adapter_model.safetensors" if job.script.adapters else "model.safetensors"))


def saved_by(job: Job) -> list[Path]:
    """Return the checkpoints, and the model that was saved at the end."""
    return [job.checkpoint(step) for step in range(SAVED, STEPS + 1, SAVED)] + [job.output]


def _state_dict_in(saved: Path) -> dict[str, torch.Tensor]:
    if saved.is_dir():
        return load_file(saved / "model.safetensors")
    states = torch.load(saved, weights_only=True)["state_dict"]
    return {name.removeprefix("model."): value for name, value in states.items()}  # "model": attribute of the module


@torch.no_grad()
def logits_of(job: Job, saved: Path) -> torch.Tensor:
    """Return the logits of a saved model. The model is loaded with the library that saved it."""
    dtype, model_class = getattr(torch, job.dtype), getattr(transformers, job.script.model_class)
    if job.script.adapters:
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(saved, dtype=dtype)
    elif saved.suffix == ".ckpt" or not (saved / "config.json").exists():  # Lightning or Accelerate saved the model
        model = model_class.from_pretrained(job.inputs / "checkpoint", dtype=dtype)
        model.load_state_dict(_state_dict_in(saved))
    else:
        model = model_class.from_pretrained(saved, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} <= {dtype, torch.float32}
    ids = torch.arange(3, 67).reshape(2, 32)
    return model.eval()(input_ids=ids).logits.float()
