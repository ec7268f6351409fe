"""offload_from_checkpoint: continue a run from its portable copy, on any disks and with any swap config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from infinity import _native
from infinity.access.ingest import fill_moments
from infinity.access.resuming import continue_from
from infinity.checkpoint.generation import StoredGeneration
from infinity.checkpoint.portable import PortableCopy
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable import module_buffers
from infinity.errors import ResumeError
from infinity.runtime.experts import tile_as
from infinity.runtime.offload import close, offload_values
from infinity.runtime.tiles import by_rows
from infinity.state.moments import OptimizerName
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.training_step import StepFacts
from infinity.state.values import Source

Model = TypeVar("Model", bound=nn.Module)
Copy = PortableCopy | StoredGeneration
"""The source from which a run continues: a portable copy, or a generation in the stores of a run's old ranks."""


def offload_from_checkpoint(
    model: Model,
    directory: str | Path,
    config: str | Path | Mapping[str, Any] | SwapConfig | None = None,
    *,
    device: torch.device | str | None = None,
    optimizer: OptimizerName = "adamw",
    accumulation_steps: int | None = None,
    tokens: int | StepFacts | None = None,
    faults: Sequence[_native.Fault] = (),
) -> Model:
    """Offload a model and continue the run from the portable copy that `infinity checkpoint export` wrote.

    After this call, create the optimizer, schedulers and loaders as at the beginning of the run. Give schedulers and
    loaders to infinity.track, which returns the number of steps that are done. If `master` and `moments` in the config
    are the same as in the run, the result is bit-identical to a run that never stopped. The tiers of the states may
    differ. Before the model is offloaded, the complete copy is read and compared with its checksums.

    Args:
        model: the model, built as at the beginning of the run. The values of the model's parameters do not matter, and
            the parameters may be on the meta device. The model's weights may have another dtype than in the run. The
            model's persistent buffers are restored. Linear layers that were tiled in the run are tiled again
            (infinity.tile).
        directory: the portable copy.
        config: as for infinity.offload.
        device: as for infinity.offload.
        optimizer: as for infinity.offload.
        accumulation_steps: as for infinity.offload.
        tokens: as for infinity.offload.
        faults: as for infinity.offload.

    Returns:
        The same model.

    Raises:
        ResumeError: the directory is not a portable copy, is damaged or incomplete, or is a copy of another model.
        others: as for infinity.offload.
    """
    copy = PortableCopy.verified(directory)
    terms = OffloadArguments.of(config, device, optimizer, accumulation_steps, faults, tokens)
    return offload_from_copy(model, copy, terms)


def offload_from_copy(model: Model, copy: Copy, terms: OffloadArguments, *, files: Source | None = None) -> Model:
    """Offload a model and continue the run from an open source. See offload_from_checkpoint.

    Args:
        model: as for offload_from_checkpoint.
        copy: the source of weights, states and the loop's state.
        terms: the other arguments of offload_from_checkpoint, parsed.
        files: function that returns the complete weight of a parameter, by name. These weights are used instead of the
            weights of `copy`.
    """
    tile_as(model, copy.body.model.shapes())
    _require_same_model(model, copy)
    weights = copy.weight if files is None else by_rows(model, files)

    def source(name: str) -> torch.Tensor:
        master = copy.master(name)
        return weights(name) if master is None else master

    offload_values(model, terms, source, *([copy.encoded_forms] if isinstance(copy, StoredGeneration) else []))
    try:
        coordinator = registry.coordinator_of(model)
        _require_trained(coordinator, copy)
        fill_moments(coordinator, copy.moment)
        module_buffers.restore(model, copy.body.buffers)
        continue_from(coordinator, copy.manifest)
    except BaseException:
        close(model)
        raise
    return model


def _require_same_model(model: nn.Module, copy: Copy) -> None:
    saved = {name: tuple(shape) for name, shape in copy.body.model.shapes().items()}
    mine = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name in [*mine, *saved]:
        if saved.get(name) != mine.get(name):
            raise ResumeError(
                f"{copy.directory} is a copy of a {copy.body.model.class_name} whose '{name}' is "
                f"{saved.get(name, 'missing')}; in this {type(model).__name__} it is {mine.get(name, 'missing')}. "
                "Build the model that the run trained."
            )


def _require_trained(coordinator: Coordinator, copy: Copy) -> None:
    trained = {place.spec.name for _, place in coordinator.places() if place.group.trainable}
    for record in copy.body.optimizers:
        for name, progress in record.state.items():
            if progress.step and name not in trained:
                raise ResumeError(
                    f"the run trained '{name}', which is frozen in this model; set requires_grad before offloading"
                )
