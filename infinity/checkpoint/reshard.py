"""infinity.resume for a run that was trained by another number of ranks.

Each rank takes its slices of the generation that the other ranks left. The ranks make a generation of their own before
the stores of the others are removed.

[Note: why no crash loses the generation]
The stores of the other ranks are only read until all ranks have made the generation in their own stores
(infinity.commit). After a crash before that, the next resume finds the others' generation and starts over. After the
commit, the others' manifests are removed before any of their other files. After a crash between the commit and this
removal, there are two generations of one step, and the next resume takes its own. If an older generation was asked for
by its step, that resume must ask for it again.
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
from infinity.durable.records import parse_body
from infinity.errors import ManifestError, PlanError, ResumeError
from infinity.io.directory import generations_in, pinned_in
from infinity.io.manifest import read_manifest
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.runtime import offload
from infinity.runtime.tiles import tile_as
from infinity.runtime.track import commit
from infinity.sharded.rank_agreement import Tell, meeting
from infinity.sharded.stores import (
    counts_in,
    ranks_text,
    remove_rank_stores,
    require_none_pinned,
    steps_of,
    stores_in,
)
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
    """Offload a model and resume a run that ended, regularly or not: weights and states come from its swap directory.

    Then create the optimizer, schedulers and loaders as at the beginning of the run and give schedulers and loaders to
    infinity.track, which returns the number of steps that are done. The result is bit-identical to a run that never
    stopped.

    If the run had another number of ranks, each rank takes its slices of the generation that those ranks left. The
    ranks make a generation of their own before the stores of the others are removed. All stores must be in the same
    nvme.paths then, on disks that every rank can access. Random numbers and tracked objects are those of the rank with
    the same number, or of rank 0 if there was none.

    The complete generation is read once and compared with its checksums before the run continues. If the newest
    generation is damaged, the previous one is used with a warning, if the config keeps one.

    Args:
        model: built as at the beginning of the run. The values of its parameters do not matter, and they may be on the
            meta device. Its persistent buffers are restored. Linear layers that the run had in tiles are tiled
            (infinity.tile).
        config: with the nvme.paths of the run, and its master, moments, keep and pins; everything else may have
            changed.
        device: as for infinity.offload.
        optimizer: as for infinity.offload.
        accumulation_steps: as for infinity.offload.
        faults: as for infinity.offload.
        step: the generation to take, see `infinity checkpoint list`; default: the newest complete one.
        folder: a checkpoint folder that pins a generation: continue from that one. Newer generations that other folders
            pin are kept.

    Returns:
        The same model.

    Raises:
        ResumeError: there is nothing to resume, it is damaged, or it does not fit the model or the config.
        DirtyStoreError: the run was made with commit_every: 0.
        others: as for infinity.offload.
    """
    return resume_on(model, Terms.of(config, device, optimizer, accumulation_steps, faults), step=step, folder=folder)


def resume_on(model: Model, terms: Terms, *, step: int | None = None, folder: str | Path | None = None) -> Model:
    """Resume a run on terms that are already parsed. See resume()."""
    config = terms.config
    tile_as_run(model, config)
    if folder is not None or not config.nvme.paths or config.commit_every == 0:
        return offload.resume(model, terms, step=step, folder=folder)
    with ExitStack() as held:
        with meeting(config.nvme.deadline_s) as tell:
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
class _Source:
    """A generation of a run with another number of ranks.

    Attributes:
        count: the number of ranks of that run.
        paths: the directories that contain their stores.
        copy: the generation as this rank uses it, while the stores are open.
    """

    count: int
    paths: list[Path]
    copy: StoredGeneration

    def __str__(self) -> str:
        manifest = self.copy.manifest
        return f"step {manifest.step} of run {manifest.run[:8]} of {ranks_text(self.count)}"


def tile_as_run(model: nn.Module, config: SwapConfig) -> None:
    """Tile a model as the run in the swap directory is tiled, also if infinity.offload chose the tiles.

    All generations of a run have the same tiles, so the first manifest that can be read is used. If none can be read,
    resuming reports the problem.
    """
    if not config.nvme.paths:
        return
    path = rank_path(config.nvme.paths[0].expanduser().absolute(), *rank_and_world())
    for manifest in (*generations_in(path).values(), *pinned_in(path)):
        with suppress(ManifestError):
            tile_as(model, parse_body(read_manifest(manifest).body, manifest).model.shapes())
            return


def _source(config: SwapConfig, step: int | None, tell: Tell, held: ExitStack) -> _Source | None:
    """Return the generation to continue from, if it is of a run with another number of ranks; otherwise None.

    Args:
        config: the swap config.
        step: step of the generation; None: the newest.
        tell: exchanges a value with all ranks.
        held: the stack that closes the stores.

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
    source = _Source(count, paths, newest_stored_generation(stores, step, rank=rank))
    told = tell("looking for a generation to resume from", str(source))
    if len(set(told)) > 1:
        raise ResumeError(
            f"the ranks would resume from different generations in {paths[0]}: {', '.join(sorted(set(told)))}"
        )
    logger.info("resuming %s", source)
    return source


def _others_in(path: Path, step: int | None, tell: Tell) -> int | None:
    """Return the number of ranks of the run to resume, if it differs from this run's; otherwise None.

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


def _make_generation(model: nn.Module, source: _Source) -> None:
    """Make a generation of this run on all ranks; then remove the stores of the source."""
    rank, _ = rank_and_world()
    if not registry.coordinator_of(model).plan.placement.commit_every:
        raise PlanError(
            f"the run cannot resume in {source.paths[0]}: besides the generation that it resumes from ({source}) "
            "there is no room for new generations. Free space there."
        )
    commit(model)
    if rank == 0:
        # If this fails, the run must not continue: the old generation could be mistaken for its newest one.
        remove_rank_stores(stores_in(source.paths, source.count))
