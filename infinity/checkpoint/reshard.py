"""infinity.resume for a run that was trained by another number of ranks.

Each new rank reads its slices of the generation that the old ranks left. The new ranks commit a generation of their own
before the stores of the old ranks are removed.

[Note: why no crash loses the generation]
The new ranks do not change the stores of the old ranks until all new ranks have committed the generation to their own
stores (infinity.commit). After a crash before the commit, the next resume finds the generation of the old ranks and
starts over. After the commit, the manifests of the old ranks are removed before all other files of the old ranks. After
a crash between the commit and this removal, there are two generations of the same step, and the next resume uses the
generation of the new ranks. If the crashed resume was asked for an older generation by its step, the next resume must
ask for the same step again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from infinity import _native
from infinity.checkpoint.from_portable import offload_from_copy
from infinity.checkpoint.generation import StoredGeneration, newest_stored_generation, open_stores
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.durable.generation_body import parse_body
from infinity.errors import ManifestError, PlanError, ResumeError
from infinity.io.directory import generations_in, pinned_in
from infinity.io.manifest import read_manifest
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.runtime import offload
from infinity.runtime.commit_api import commit
from infinity.runtime.experts import tile_as
from infinity.sharded.rank_agreement import Tell, meeting
from infinity.sharded.rank_stores import (
    counts_in,
    ranks_text,
    remove_rank_stores,
    require_none_pinned,
    steps_of,
    stores_in,
)
from infinity.state.moments import OptimizerName
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.training_step import StepFacts

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def resume(
    model: Model,
    config: str | Path | Mapping[str, Any] | SwapConfig | None = None,
    *,
    device: torch.device | str | None = None,
    optimizer: OptimizerName = "adamw",
    accumulation_steps: int | None = None,
    tokens: int | StepFacts | None = None,
    step: int | None = None,
    folder: str | Path | None = None,
    faults: Sequence[_native.Fault] = (),
) -> Model:
    """Offload a model and resume a run that ended, regularly or not: weights and states come from the run's swap
    directory. After this call, create the optimizer, schedulers and loaders as at the beginning of the run. Give
    schedulers and loaders to infinity.track, which returns the number of steps that are done. The result is
    bit-identical to a run that never stopped.

    If the run had another number of ranks, each new rank reads its slices of the generation that the old ranks left.
    The new ranks commit a generation of their own before the stores of the old ranks are removed. In this case, all
    stores must be in the same nvme.paths, on disks that every rank can access. A new rank gets the RNG states and
    tracked objects of the old rank with the same number, or of rank 0 if there was no such rank.

    The complete generation is read once and compared with its checksums before the run continues. If the newest
    generation is damaged and the config keeps a previous generation, the previous generation is used and a warning is
    logged.

    Args:
        model: the model, built as at the beginning of the run. The values of the model's parameters do not matter, and
            the parameters may be on the meta device. The model's persistent buffers are restored. Linear layers that
            were tiled in the run are tiled again (infinity.tile).
        config: a swap config whose nvme.paths, master, moments, keep and pins are those of the run; all other values
            may differ.
        device: as for infinity.offload.
        optimizer: as for infinity.offload.
        accumulation_steps: as for infinity.offload.
        tokens: as for infinity.offload.
        faults: as for infinity.offload.
        step: step of the generation to resume from (see `infinity checkpoint list`); default: the newest complete
            generation.
        folder: a checkpoint folder: continue from the generation that this folder pins. Newer generations that other
            folders pin are kept.

    Returns:
        The same model.

    Raises:
        ResumeError: there is no generation to resume from, or the generation is damaged or does not fit the model or
            the config.
        DirtyStoreError: the run was made with commit_every: 0.
        others: as for infinity.offload.
    """
    terms = OffloadArguments.of(config, device, optimizer, accumulation_steps, faults, tokens)
    return resume_on(model, terms, step=step, folder=folder)


def resume_on(
    model: Model, terms: OffloadArguments, *, step: int | None = None, folder: str | Path | None = None
) -> Model:
    """Resume a run. `terms` has the parsed arguments of resume()."""
    config = terms.config
    tile_as_run(model, config)
    if folder is not None or not config.nvme.paths or config.commit_every == 0:
        return offload.resume(model, terms, step=step, folder=folder)
    with ExitStack() as held:
        with meeting(config.ranks_deadline_s) as tell:
            source = _source(config, step, tell, held)
        if source is None:
            return offload.resume(model, terms, step=step)
        offload_from_copy(model, source.copy, replace(terms, replaces=str(source)))
    try:
        _make_generation(model, source)
    except BaseException:
        offload.close(model)
        raise
    return model


@dataclass(frozen=True)
class _SourceGeneration:
    """A generation of a run with another number of ranks.

    Attributes:
        count: the number of ranks of the run that made the generation.
        paths: the directories that contain the stores of these ranks.
        copy: the generation, from which this rank can read while the stores are open.
    """

    count: int
    paths: list[Path]
    copy: StoredGeneration

    def __str__(self) -> str:
        manifest = self.copy.manifest
        return f"step {manifest.step} of run {manifest.run[:8]} of {ranks_text(self.count)}"


def tile_as_run(model: nn.Module, config: SwapConfig) -> None:
    """Tile a model in the same way as the run in the swap directory, even if infinity.offload chose the tiles of the
    run.

    All generations of a run have the same tiles, so the first manifest that can be read is used. If no manifest can be
    read, the later resume reports the problem.
    """
    if not config.nvme.paths:
        return
    path = rank_path(config.nvme.paths[0].expanduser().absolute(), *rank_and_world())
    for manifest in (*generations_in(path).values(), *pinned_in(path)):
        with suppress(ManifestError):
            tile_as(model, parse_body(read_manifest(manifest).body, manifest).model.shapes())
            return


def _source(config: SwapConfig, step: int | None, tell: Tell, held: ExitStack) -> _SourceGeneration | None:
    """Return the generation to continue from if a run with another number of ranks made it; otherwise None.

    Args:
        config: the swap config.
        step: step of the generation; None: the newest.
        tell: exchanges a value with all ranks.
        held: the stack that closes the stores when it is closed.

    Raises:
        ResumeError: the generation is incomplete, or not the same for all ranks.
        PeerError: another rank failed.
    """
    rank, _ = rank_and_world()
    paths = [path.expanduser().absolute() for path in config.nvme.paths]
    count = _others_in(paths[0], step, tell)
    if count is None:
        return None
    require_none_pinned(rank_path(paths[0], 0, count))
    stores = held.enter_context(open_stores(paths, config.nvme, count=count))
    source = _SourceGeneration(count, paths, newest_stored_generation(stores, step, rank=rank))
    told = tell("looking for a generation to resume from", str(source))
    if len(set(told)) > 1:
        raise ResumeError(
            f"the ranks would resume from different generations in {paths[0]}: {', '.join(sorted(set(told)))}"
        )
    logger.info("resuming %s", source)
    return source


def _others_in(path: Path, step: int | None, tell: Tell) -> int | None:
    """Return the number of ranks of the run to resume, if it differs from the number of ranks of this run; otherwise
    None.

    Generations that some ranks cannot see, because they are on local disks of other machines, do not count.
    """
    rank, world = rank_and_world()
    mine = generations_in(rank_path(path, rank, world))
    seen = {str(count): sorted(steps_of(path, count)) for count in counts_in(path) if count != world}
    told = tell("looking for generations", [sorted(mine), seen])
    own = set.intersection(*(set(steps) for steps, _ in told))
    found = {int(count): set.intersection(*(set(each.get(count, ())) for _, each in told)) for count in seen}
    newest = max(own if step is None else own & {step}, default=-1)
    wanted = {count: steps if step is None else steps & {step} for count, steps in found.items()}
    further = {count: max(steps) for count, steps in wanted.items() if steps and max(steps) > newest}
    return max(further, key=lambda count: (further[count], -count)) if further else None


def _make_generation(model: nn.Module, source: _SourceGeneration) -> None:
    """Commit a generation of this run on all ranks, and then remove the stores of the source."""
    rank, _ = rank_and_world()
    if not registry.coordinator_of(model).plan.placement.commit_every:
        raise PlanError(
            f"the run cannot resume in {source.paths[0]}: besides the generation that it resumes from ({source}) "
            "there is no room for new generations. Free space there."
        )
    commit(model)
    if rank == 0:
        # If removing the old stores fails, the run must not continue: a later resume could mistake the old generation
        # for the newest generation of this run.
        remove_rank_stores(stores_in(source.paths, source.count))
