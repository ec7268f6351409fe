"""The options of `infinity plan`. This module imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.cli import options as types
from infinity.cli.options import argument
from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.public_models import PRESETS
from infinity.state.moments import OptimizerName

_MODEL = "directory of a Hugging Face checkpoint (its config.json is enough), a hub id, or one of "


@dataclass(frozen=True)
class PlannedModel:
    """The model and the swap config to plan for."""

    model: str = argument(_MODEL + ", ".join(PRESETS), types.name, required=True)
    config: Path | None = argument("swap config (YAML or JSON); default: every key's default", types.path)
    set: tuple[str, ...] = argument(
        "change keys of the swap config, such as moments=int8", types.text, (), nargs="+", metavar="KEY=VALUE"
    )
    swap_dir: tuple[Path, ...] = argument(
        "directories that replace nvme.paths of the swap config", types.path, (), nargs="+", metavar="DIR"
    )
    revision: str | None = argument("revision of the hub's model: a branch, a tag or a commit", types.word)
    trust_remote_code: bool = argument("run the Python files that come with the model")
    json: bool = argument("print everything as JSON")
    verbose: bool = argument("log the attempts of the planner")


@dataclass(frozen=True)
class PlannedMachine:
    """The machine to plan for. The default is this machine."""

    machine: str | None = argument("another machine, with rates from data sheets", types.word, choices=MACHINES)
    cpu: bool = argument("plan for the CPU even if there is a GPU")
    ranks: int | None = argument("processes that train together on the machine", types.whole(1, 64), metavar="N")


@dataclass(frozen=True)
class PlannedTraining:
    """The sizes and options of the training."""

    batch_size: int = argument("sequences per micro-batch (default 1)", types.whole(1, types.TOKENS_MAX), 1)
    sequence_length: int = argument("tokens per sequence (default 1024)", types.whole(1, types.TOKENS_MAX), 1024)
    micro_batches: int = argument(
        "micro-batches that go through each layer together (default 1)",
        types.whole(1, types.TOKENS_MAX),
        1,
        metavar="N",
    )
    gradient_accumulation: int = argument("backward passes per step (default 1)", types.whole(1, types.TOKENS_MAX), 1)
    dtype: str | None = argument(f"dtype of the weights ({types.DEFAULT_DTYPE})", types.word, choices=types.DTYPE_NAMES)
    optimizer: OptimizerName = argument("default adamw", types.word, "adamw", choices=types.OPTIMIZERS)
    lora: int | None = argument(
        "train adapters of rank R for a frozen model", types.whole(1, types.LORA_MAX), metavar="R"
    )
    lora_experts: bool = argument("train adapters of the experts of a mixture, too", needs="lora")
    frozen: str | None = argument("how the frozen weights rest", types.word, choices=types.FROZEN_NAMES, needs="lora")
    clips: bool = argument("assume that gradients are clipped in most steps")


@dataclass(frozen=True)
class PlanOptions(PlannedTraining, PlannedMachine, PlannedModel):
    """All options of `infinity plan`."""
