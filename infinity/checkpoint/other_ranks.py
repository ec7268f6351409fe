"""infinity.resume where the run was trained by another number of ranks: each rank takes its slices of the generation
that the others left, and the ranks have a generation of their own before the others' stores go.

[Note: why no crash loses the generation]
The stores of the other ranks are only read until all ranks have made the generation in stores of their own
(infinity.commit). After a crash before that, the next resume finds the others' generation, and begins anew. Then the
others' manifests go, before anything else of theirs. After a crash between the two there are two generations of one
step, and the next resume takes its own; where an older generation was asked for by its step, that resume must ask for
it again.
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
from infinity.checkpoint.carry_on import carry_on
from infinity.checkpoint.generation import StoredGeneration, newest_whole, opened
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.durable.records import parse_body
from infinity.errors import ManifestError, PlanError, ResumeError
from infinity.io.directory import generations_in, pinned_in
from infinity.io.manifest import read_manifest
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.runtime import offload
from infinity.runtime.tiles import tile_as
from infinity.runtime.track import commit
from infinity.sharded.stores import (
    counts_in,
    ranks_said,
    remove_rank_stores,
    require_none_pinned,
    steps_of,
    stores_in,
)
from infinity.sharded.together import Tell, meeting
from infinity.state.moments import OptimizerName
from infinity.state.terms import Terms

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def resume(
    model: Model,
    config: str | Path | Mapping[str, Any] | SwapConfig | None = None,
    *,
    device: torch.device | str | None = None,
    optimizer: OptimizerName = "adamw",
    accumulation_steps: int | None = None,
    step: int | None = None,
    folder: str | Path | None = None,
    faults: Sequence[_native.Fault] = (),
) -> Model:
    """infinity.offload for a run that ended, well or not: weights and states come from its swap directory.

    Then make the optimizer, schedulers and loaders as at the beginning of the run and give the latter to
    infinity.track, which returns how many steps are done. What follows has the bits of a run that never stopped.

    Where the run had another number of ranks, each rank takes its slices of what they left, of which the ranks make a
    generation of their own before the others' stores go. All of them must be in the same nvme.paths then, on disks
    that every rank sees. Random numbers and what is tracked are those of the rank of the same number, or of rank 0
    where there was none.

    Everything is read once and compared with its checksums before the run goes on; where the newest generation is
    damaged the one before is taken, if the config keeps one, and a warning says so.

    Args:
        model: as it was at the beginning of the run; the values of its parameters do not matter, and they may be on
            the meta device. Its persistent buffers are restored. Linear layers that the run had in tiles are tiled
            (infinity.tile).
        config: with the nvme.paths of the run, and its master, moments, keep and pins; everything else may have
            changed.
        device, optimizer, accumulation_steps, faults: as infinity.offload.
        step: the generation to take, see `infinity checkpoint list`; default: the newest that is whole.
        folder: a checkpoint folder that pins a generation: go on from that one. Newer generations that other folders
            pin stay.

    Returns:
        The same model.

    Raises:
        ResumeError: there is nothing to resume, it is damaged, or it does not go with the model or the config.
        DirtyStoreError: the run was made with commit_every: 0.
        others: as infinity.offload.
    """
    return resume_on(model, Terms.of(config, device, optimizer, accumulation_steps, faults), step=step, folder=folder)


def resume_on(model: Model, terms: Terms, *, step: int | None = None, folder: str | Path | None = None) -> Model:
    """resume() on terms that are read."""
    config = terms.config
    tile_as_run(model, config)
    if folder is not None or not config.nvme.paths or config.commit_every == 0:
        return offload.resume(model, terms, step=step, folder=folder)
    with ExitStack() as held:
        with meeting(config.nvme.deadline_s) as tell:
            source = _source(config, step, tell, held)
        if source is None:
            return offload.resume(model, terms, step=step)
        carry_on(model, source.copy, replace(terms, replaces=str(source)))
    try:
        _make_generation(model, source)
    except BaseException:
        offload.close(model)
        raise
    return model


@dataclass(frozen=True)
class _Source:
    """A generation of another number of ranks.

    Attributes:
        count: of them.
        paths: the directories that their stores are in.
        copy: as this rank takes it; while the stores are open.
    """

    count: int
    paths: list[Path]
    copy: StoredGeneration

    def __str__(self) -> str:
        manifest = self.copy.manifest
        return f"step {manifest.step} of run {manifest.run[:8]} of {ranks_said(self.count)}"


def tile_as_run(model: nn.Module, config: SwapConfig) -> None:
    """Tile a model as the run in the swap directory is tiled, also where infinity.offload chose that. All generations
    of a run are alike, so one manifest that can be read says it; where none can, resuming says what is wrong."""
    if not config.nvme.paths:
        return
    path = rank_path(config.nvme.paths[0].expanduser().absolute(), *rank_and_world())
    for manifest in (*generations_in(path).values(), *pinned_in(path)):
        with suppress(ManifestError):
            tile_as(model, parse_body(read_manifest(manifest).body, manifest).model.shapes())
            return


def _source(config: SwapConfig, step: int | None, tell: Tell, held: ExitStack) -> _Source | None:
    """What the run goes on from, where that is no generation of as many ranks.

    Args:
        held: closes the stores.

    Raises:
        ResumeError: it is not whole, or not the same for all ranks.
        PeerError: another rank failed.
    """
    rank, _ = rank_and_world()
    paths = [path.expanduser().absolute() for path in config.nvme.paths]
    count = _others_in(paths[0], step, tell)
    if count is None:
        return None
    require_none_pinned(rank_path(paths[0], 0, count))
    stores = held.enter_context(opened(paths, config.nvme, count=count))
    source = _Source(count, paths, newest_whole(stores, step, rank=rank))
    told = tell("looking for what to go on from", str(source))
    if len(set(told)) > 1:
        raise ResumeError(
            f"the ranks would go on from different generations in {paths[0]}: {', '.join(sorted(set(told)))}"
        )
    logger.info("resuming %s", source)
    return source


def _others_in(path: Path, step: int | None, tell: Tell) -> int | None:
    """How many ranks the run had that is to be resumed, where that is another number than of this one. What not all
    ranks see, on disks of their own, is no generation."""
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


def _make_generation(model: nn.Module, source: _Source) -> None:
    """All ranks make a generation of their own; then the stores of the source go."""
    rank, _ = rank_and_world()
    if not registry.coordinator_of(model).plan.placement.commit_every:
        raise PlanError(
            f"the run cannot go on in {source.paths[0]}: beside the generation that it goes on from ({source}) there "
            "is no room for those that it would make. Free space there."
        )
    commit(model)
    if rank == 0:
        # Where that fails the run must not go on: the old generation could be taken for its newest one.
        remove_rank_stores(stores_in(source.paths, source.count))
