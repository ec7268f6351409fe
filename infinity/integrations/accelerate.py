"""Changes of accelerate: models that are only evaluated, and saving and loading of checkpoint folders.

[Note: where an Accelerate loop resumes]
The model is offloaded when its optimizer is made. A loop makes its optimizer before `accelerator.load_state(folder)`
names the folder to resume from. Therefore `infinity run` must know the folder earlier: `infinity run --resume FOLDER
CONFIG SCRIPT` offloads the trained model from the generation that the folder pins. Later, `load_state(folder)` reads
everything except weights and states, because these are already restored.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from infinity.checkpoint.save_pretrained import save_pretrained
from infinity.coordinator import registry
from infinity.errors import ResumeError
from infinity.integrations.checkpoint_folders import CheckpointFolderSave, is_at, pins_for, unpinning_removed_folders
from infinity.integrations.patches import Patches, patched
from infinity.integrations.script_run import ScriptRun
from infinity.io.generation_pins import folder_path, require_marker
from infinity.runtime.deferred_parameters import is_deferred
from infinity.runtime.memory_fit import fits_memory


def replace_preparing(run: ScriptRun, patches: Patches, accelerator: ModuleType) -> None:
    """Replace methods of accelerate's Accelerator.

    With the replacements, a model that is prepared for evaluation is offloaded without optimizer states. Weights that
    autocast would convert in each forward are converted once, when the model is offloaded. Each folder that save_state
    writes pins a generation.
    """
    kind = accelerator.Accelerator
    patches.wrap(kind, "__init__", _init(run))
    patches.wrap(kind, "prepare_model", _prepare_model(run))
    patches.wrap(kind, "save_state", _save_state)
    patches.wrap(kind, "load_state", _load_state(run))


def replace_beginning(run: ScriptRun, patches: Patches, trainer: ModuleType) -> None:
    """Make a Trainer's settings take precedence over those of its Accelerator."""
    patches.wrap(trainer.Trainer, "create_accelerator_and_postprocess", _of_a_trainer(run))


def _init(run: ScriptRun) -> Callable[..., None]:
    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        run.made_accelerator()
        run.computes_in(self.mixed_precision)
        limit = self.project_configuration.total_limit
        run.add_facts(
            pins=pins_for(None if limit is None else max(int(limit), 1)),
            accumulation_steps=_accumulation_steps(self, inspect.signature(original).bind(self, *args, **kwargs)),
        )

    return init


def _accumulation_steps(accelerator: Any, given: inspect.BoundArguments) -> int | None:
    """Return the number of backward passes before a step.

    Return None if the number is accelerate's default of 1, because the script may then count backward passes itself.
    """
    said = "gradient_accumulation_steps" in given.arguments or "gradient_accumulation_plugin" in given.arguments
    steps: int = accelerator.gradient_accumulation_steps
    return steps if said or steps > 1 else None


def _of_a_trainer(run: ScriptRun) -> Callable[..., None]:
    """Return a replacement that keeps two settings of a Trainer, which its Accelerator would change.

    The settings are the number of checkpoint folders, and the number of backward passes before a step.
    """

    def create(original: Callable[..., None], self: Any) -> None:
        before = run.facts
        original(self)
        run.add_facts(pins=before.pins, accumulation_steps=before.accumulation_steps)

    return create


def _prepare_model(run: ScriptRun) -> Callable[..., Any]:
    def prepare(original: Callable[..., Any], self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        evaluated = kwargs.get("evaluation_mode", args[1] if len(args) > 1 else False)
        if evaluated and is_deferred(model) and model not in run.trained:
            run.references.add(model)
        return original(self, model, *args, **kwargs)

    return prepare


def _save_state(original: Callable[..., Any], self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    trained = _trained(self)
    if trained is None:
        return original(self, output_dir, *args, **kwargs)
    folder = _folder_to_save(self, output_dir)
    if folder is None:  # accelerate itself raises the error
        return original(self, output_dir, *args, **kwargs)
    with (
        CheckpointFolderSave(trained, folder) as saving,
        unpinning_removed_folders(trained),
        nullcontext() if fits_memory(trained) else _streamed(self, trained),
    ):
        location = original(self, output_dir, *args, **kwargs)
        saving.finish()
    return location


@contextmanager
def _streamed(accelerator: Any, model: nn.Module) -> Iterator[None]:
    """Make save_state call save_pretrained for `model`.

    Otherwise save_state would gather all weights of `model` in RAM.
    """

    def state_dict(original: Callable[..., Any], which: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return {} if which is model else original(which, *args, **kwargs)

    def write(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        weights.pop(models.index(model))
        save_pretrained(model, output_dir)

    handle = accelerator.register_save_state_pre_hook(write)
    try:
        with patched(accelerator, "get_state_dict", state_dict):
            yield
    finally:
        handle.remove()


def _load_state(run: ScriptRun) -> Callable[..., None]:
    def load(original: Callable[..., None], self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        trained, folder = _trained(self), _folder_to_load(self, input_dir)
        if trained is None or folder is None:
            original(self, input_dir, *args, **kwargs)
            return
        _require_there(trained, folder, run)

        def without(models: list[nn.Module], input_dir: str) -> None:
            models[:] = [model for model in models if model is not trained]

        handle = self.register_load_state_pre_hook(without)
        try:
            original(self, input_dir, *args, **kwargs)
        finally:
            handle.remove()

    return load


def _require_there(model: nn.Module, folder: Path, run: ScriptRun) -> None:
    """Raise ResumeError if the model does not have the states of the generation that a folder pins."""
    marker = require_marker(folder_path(folder))
    if is_at(model, marker):
        return
    resumed = run.began_from(model)
    how = f"infinity run --resume {folder} CONFIG SCRIPT"
    raise ResumeError(
        f"accelerator.load_state({str(folder)!r}): the model was "
        + (f"offloaded from {resumed}" if resumed is not None else "offloaded without a checkpoint")
        + f" when its optimizer was made, and its states are from step {registry.coordinator_of(model).steps}. "
        f"The folder names generation {marker.step} of run {marker.run[:8]}. Start the script with `{how}`: the model "
        "is then offloaded from that generation, and load_state reads everything else."
    )


def _trained(accelerator: Any) -> nn.Module | None:
    """Return the prepared model that is offloaded and has states; None if there is no such model."""
    for model in accelerator._models:
        if registry.is_offloaded(model) and any(parameter.requires_grad for parameter in model.parameters()):
            found: nn.Module = model
            return found
    return None


def _folder_to_save(accelerator: Any, output_dir: Any) -> Path | None:
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
    return None if output_dir is None else Path(output_dir)


def _folder_to_load(accelerator: Any, input_dir: Any) -> Path | None:
    if input_dir is not None:
        return Path(os.path.expanduser(input_dir))
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    there = [path for path in Path(accelerator.project_dir, "checkpoints").glob("checkpoint_*") if path.is_dir()]
    return max(there, key=lambda path: int(path.name.rsplit("_", 1)[1]), default=None)
