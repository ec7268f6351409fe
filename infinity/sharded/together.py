"""Several ranks that are about to train one model: what they must agree on before anything is planned, and how all hear
of an error of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infinity.config import NvmeConfig, SwapConfig
from infinity.errors import DeviceRoomError, NotAvailableError, ResumeError
from infinity.io import durable
from infinity.io.directory import FINISHED_NAME, HEADER_NAME
from infinity.io.store import new_run
from infinity.plan.frequency import Frequency, rarest
from infinity.plan.planner import limits_of
from infinity.plan.problem import ALONE, Peers, secondary_bytes
from infinity.ranks.exchange import Exchange
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import Ranks, rank_and_world, require_ranks_met
from infinity.ranks.world import Alone, Among, World
from infinity.sharded.gradients import require_same
from infinity.sharded.stores import (
    clear_leftovers,
    clear_others,
    remove_generations,
    remove_rank_stores,
    require_none_pinned,
    run_and_steps_in,
)
from infinity.state.shard import Cut
from infinity.state.terms import Terms
from infinity.state.unit import Unit
from infinity.tiers.resources import make_directory

_SAME = ("master", "moments", "weights", "optimizer", "gradients", "overlap", "commit_every", "keep", "pins")
"""Keys of the swap config that all ranks must have the same values of."""
_MARGIN_S = 30.0  # a rank whose disk does not answer is told of before the others give that rank up


Tell = Callable[[str, Any], list[Any]]
"""Exchange.tell."""


@contextmanager
def meeting(deadline_s: float) -> Iterator[Tell]:
    """All ranks, before they offload a model: an error that leaves this context is told to the others. A process that
    is alone tells itself. All ranks call.

    Args:
        deadline_s: seconds after which a disk is given up (nvme.deadline_s).

    Raises:
        PeerError: another rank failed.
    """
    world = _world_of(Ranks.of_world(deadline_s=deadline_s + _MARGIN_S))
    try:
        yield world.tell
    except BaseException as error:
        world.fail(error)
        raise
    finally:
        world.close()


def peers_here() -> Peers:
    """Which slices are this process's, before the ranks have met."""
    rank, ranks = rank_and_world()
    return ALONE if ranks == 1 else Peers(Cut(ranks, rank), 1)


def _world_of(ranks: Ranks | None) -> World:
    return Alone() if ranks is None else Among(Exchange(ranks))


@dataclass(frozen=True)
class Together:
    """This process, among others or alone.

    Attributes:
        run: the id of the run that all ranks begin, if they begin one; "" where this process is alone.
        is_first: of the ranks on this machine.
    """

    world: World
    peers: Peers
    run: str = ""
    is_first: bool = True

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error that leaves this context is told to the other ranks, who wait for this one."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, DeviceRoomError):  # which all ranks have
                self.world.fail(error)
            self.world.close()
            raise

    def agreed(self, terms: Terms, units: Sequence[Unit]) -> Together:
        """With what all plans have in common: the form of the states, and the memory that each rank may take, which is
        that of the rank that has the least. All ranks call.

        Raises:
            NotAvailableError: several ranks cannot do this yet.
            PeerError: a rank has another model or config, or failed; names it.
        """
        peers = self.peers
        if not peers.together:
            return self
        facts = {
            "the model": _digest(units),
            "the optimizer to make room for": terms.optimizer,
            "what the run goes on from": terms.goes_on_from,
            **{key: getattr(terms.config, key) for key in _SAME},
        }
        limits = limits_of(terms.config, terms.device, peers)
        copies = 0 if peers.near is None else secondary_bytes(units, peers.near)
        told = [facts, new_run(), limits.device, limits.host, copies]
        runs, least, most = list[str](), [limits.device, limits.host], 0
        for rank, (theirs, run, *memory, theirs_copies) in enumerate(self.world.tell("offloading the model", told)):
            require_same(theirs, facts, rank, "Give all ranks the same model and swap config.")
            runs.append(run)
            least, most = list(map(min, least, memory)), max(most, theirs_copies)
        if any(unit.encoded_bytes for unit in units):
            raise NotAvailableError(
                "frozen weights in 4 or 8 bits with several ranks are not available yet: set frozen: bf16, or start "
                "one process without torchrun"
            )
        near = None if terms.config.ranks.gather == "auto" and 2 * most > least[1] else peers.near
        return replace(self, peers=replace(peers, memory=(least[0], least[1]), near=near), run=runs[0])

    def nvme(self, config: NvmeConfig) -> NvmeConfig:
        """Each rank has a store of its own, in a directory of its own in each of nvme.paths. Raises ConfigError."""
        if not self.peers.together:
            return config
        for path in config.paths:
            make_directory(path)
        return config.model_copy(update={"paths": self._own(config)})

    def begin_anew(self, config: NvmeConfig, *, replaces: str) -> None:
        """A run begins: remove what runs of another number of ranks left in nvme.paths, once for each machine, and
        what the ranks of a run left that ended in its first commit. All ranks call.

        Args:
            replaces: as Terms: the stores of other ranks stay then, and what this number of ranks left
                before is older, and goes.

        Raises:
            StoreNotEmptyError, StoreLockedError, ResumeError: it is needed.
            PeerError: another rank failed.
        """
        mine = self._own(config)
        if not replaces:
            self._remove_what_no_rank_can_resume(mine)
        elif any((path / HEADER_NAME).exists() for path in mine):
            require_none_pinned(mine[0])
            remove_rank_stores([[path for path in mine if path.exists()]])
        self.world.tell("removing what is left in the stores", None)
        if not replaces and self.is_first:
            clear_others([path.expanduser().absolute() for path in config.paths], self.peers.cut.count)
        self.world.tell("opening the stores", None)

    def _remove_what_no_rank_can_resume(self, mine: Sequence[Path]) -> None:
        """Where every rank has a store of one run, and each manifest is missing on some rank, no generation was ever
        made: the manifests go."""
        if not self.peers.together:
            return
        run, steps = run_and_steps_in(mine)
        told = self.world.tell("making the stores", (run, steps))
        if run and all(its == run for its, _ in told) and not _common(told):
            remove_generations(mine[0])

    def stores_are_open(self, config: NvmeConfig, *, resume: bool) -> None:
        """What an earlier run said of its end is not true of the one that has begun here; and where a run goes on, what
        an interrupted removal has left of stores of other ranks goes. Raises SwapIOError, StoreLockedError."""
        if not self.is_first:
            return
        paths = [path.expanduser().absolute() for path in config.paths]
        for path in paths if self.peers.together else ():
            durable.remove(path / FINISHED_NAME)
        if resume:
            clear_leftovers(paths, self.peers.cut.count)

    def require_resumable(self, config: NvmeConfig) -> None:
        """All ranks call.

        Raises:
            ResumeError: the ranks have no stores of one run, with a generation that all of them have; on every rank.
            PeerError: another rank failed.
        """
        if not self.peers.together:
            return
        told = self.world.tell("looking for the stores", run_and_steps_in(self._own(config)))
        where = ", ".join(map(str, config.paths))
        without = [rank for rank, (run, _) in enumerate(told) if not run]
        if without:
            raise ResumeError(
                f"nothing to resume in {where}: rank {without[0]} has no store there with generations of a run of "
                f"{len(told)} ranks"
            )
        other = [rank for rank, (run, _) in enumerate(told) if run != told[0][0]]
        if other:
            raise ResumeError(
                f"nothing to resume in {where}: the stores of ranks 0 and {other[0]} are of different runs. Give every "
                "rank the directories of one run."
            )
        if not _common(told):
            have = "; ".join(
                f"rank {rank}: {', '.join(map(str, steps)) or 'none'}" for rank, (_, steps) in enumerate(told)
            )
            raise ResumeError(f"nothing to resume in {where}: no generation was made by all ranks ({have})")

    def _own(self, config: NvmeConfig) -> list[Path]:
        """This rank's directories."""
        cut = self.peers.cut
        return [rank_path(path.expanduser().absolute(), cut.index, cut.count) for path in config.paths]

    def commits(self, mine: Frequency) -> Frequency:
        """How often all ranks commit. All ranks call. Raises PeerError."""
        if not self.peers.together:
            return mine
        told = self.world.tell("planning", [mine.every, mine.reason, mine.at_most])
        return rarest([Frequency(*each) for each in told])


def _common(told: Sequence[tuple[str, Sequence[int]]]) -> set[int]:
    """The steps of which all ranks have a manifest."""
    return set.intersection(*(set(steps) for _, steps in told))


def come_together(config: SwapConfig, device: torch.device) -> Together:
    """Find the other ranks, if there are any. All ranks call.

    Raises:
        NotAvailableError: several ranks cannot do this yet.
        ConfigError: torchrun started several processes, and they have not met.
        PeerError: a rank failed; names it.
    """
    require_ranks_met()
    ranks = Ranks.of_world(config.ranks.gather, deadline_s=config.nvme.deadline_s + _MARGIN_S)
    world = _world_of(ranks)
    if ranks is None:
        return Together(world, ALONE)
    near = Cut(ranks.gather.size, ranks.gather.position) if ranks.gather.size < ranks.world else None
    peers = Peers(Cut(ranks.world, ranks.rank), ranks.local_world, near=near)
    together = Together(world, peers, is_first=ranks.local_rank == 0)
    with together.telling():
        if device.type != "cpu":
            raise NotAvailableError(
                "a model on a GPU with several ranks is not available yet; use device='cpu', or one process"
            )
    return together


def _digest(units: Sequence[Unit]) -> str:
    """Of the names, shapes and dtypes of all parameters, and how they are put into units."""
    told = [
        (unit.name, str(group.dtype), group.trainable, group.moments, spec.name, list(spec.shape))
        for unit in units
        for group in unit.groups
        for spec in group.specs
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
