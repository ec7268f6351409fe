"""Start of several ranks that train one model: the facts on which the ranks agree before they plan, and the exchange of
errors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infinity.base.accelerator import choice_of_rank, identity
from infinity.config import NvmeConfig, SwapConfig
from infinity.errors import ConfigError, DeviceRoomError, NotAvailableError, PlanError, ResumeError
from infinity.io import atomic_file
from infinity.io.directory import FINISHED_NAME, HEADER_NAME
from infinity.io.store import new_run
from infinity.plan.commit_frequency import CommitFrequency, rarest
from infinity.plan.plan import Plan
from infinity.plan.plan_input import NO_PEERS, PeerFacts, Sharing, secondary_bytes
from infinity.plan.planner import limits_of
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import Ranks, rank_and_world, require_ranks_met
from infinity.ranks.shared_memory import SharedMemory, open_shared_memory
from infinity.ranks.world import MultiRankWorld, SingleProcessWorld, World
from infinity.sharded.multi_rank_gradients import require_same
from infinity.sharded.rank_stores import (
    clear_leftovers,
    clear_others,
    remove_generations,
    remove_rank_stores,
    require_none_pinned,
    run_and_steps_in,
)
from infinity.sharded.shared_homes import SharedHomes
from infinity.sharded.shared_window import SharedWindow
from infinity.sharded.sharing_world import SharingWorld
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import RankPartition
from infinity.state.unit import Unit
from infinity.tiers.resources import make_directory
from infinity.tiers.weights_memory import RankResources

logger = logging.getLogger(__name__)

_SAME = ("master", "moments", "frozen", "weights", "optimizer", "gradients", "overlap", "commit_every", "keep", "pins")
"""Keys of the swap config whose values must be the same on all ranks."""

Tell = Callable[[str, Any], list[Any]]
"""Function with the arguments and the result of CollectiveQueue.tell."""


@contextmanager
def meeting(deadline_s: float) -> Iterator[Tell]:
    """Connect all ranks before they offload a model. All ranks must call this.

    Yields a Tell. An error that ends this context is reported to the other ranks. In a process without other ranks, the
    Tell returns only this process's own value.

    Args:
        deadline_s: seconds for which each rank waits for each other rank (SwapConfig.ranks_deadline_s).

    Raises:
        PeerError: another rank failed.
    """
    world = _world_of(Ranks.of_world(deadline_s=deadline_s))
    try:
        yield world.tell
    except BaseException as error:
        world.fail(error)
        raise
    finally:
        world.close()


def local_peers() -> PeerFacts:
    """Return the number of ranks and the slices of this process. Other ranks need not have called this."""
    rank, ranks = rank_and_world()
    return NO_PEERS if ranks == 1 else PeerFacts(RankPartition(ranks, rank), 1)


def _world_of(ranks: Ranks | None) -> World:
    return SingleProcessWorld() if ranks is None else MultiRankWorld(CollectiveQueue(ranks))


@dataclass(frozen=True)
class RankAgreement:
    """This process and the other ranks, if there are any.

    Attributes:
        world: the ranks.
        peers: number of ranks, and the slices of this process.
        run: id for a new run, the same on all ranks; "" when this process is alone.
        is_first: whether this process is the first of the ranks on this machine.
        memory: memory that the ranks can share; None if they cannot, or if this process is alone.
    """

    world: World
    peers: PeerFacts
    run: str = ""
    is_first: bool = True
    memory: SharedMemory | None = None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Return a context that reports errors to the other ranks. Without the report they would wait for this rank."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, DeviceRoomError):  # all ranks raise DeviceRoomError
                self.world.fail(error)
            self.world.close()
            raise

    def agreed(self, terms: OffloadArguments, units: Sequence[Unit]) -> RankAgreement:
        """Agree on the facts that must be the same in the plans of all ranks: the form of the states, and the memory of
        each rank.

        Each rank plans with the memory of the rank that has the least memory. All ranks must call this.

        Returns:
            This object with the agreed facts.

        Raises:
            PeerError: a rank has a different model or config, or has failed. The message names the rank.
        """
        peers = self.peers
        if not peers.sharded:
            return self
        facts = {
            "the model": _digest(units),
            "the optimizer to make room for": terms.optimizer,
            "the batch to make room for": None if terms.facts is None else list(dataclasses.astuple(terms.facts.batch)),
            "the generation that the run resumes from": terms.goes_on_from,
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
        near = None if terms.config.ranks.gather == "auto" and 2 * most > least[1] else peers.near
        return replace(self, peers=replace(peers, memory=(least[0], least[1]), near=near), run=runs[0])

    def nvme(self, config: NvmeConfig) -> NvmeConfig:
        """Return the config with the paths of this rank's store, which is a directory in each path of nvme.paths.

        Raises:
            ConfigError: a path cannot be used.
        """
        if not self.peers.sharded:
            return config
        for path in config.paths:
            make_directory(path)
        return config.model_copy(update={"paths": self._own(config)})

    def resources(self, plan: Plan) -> RankResources:
        """Return what the model gets from the ranks. All ranks must call this.

        Raises:
            NotAvailableError: the ranks cannot share as much memory as the plan needs.
            PeerError: another rank failed.
        """
        if self.memory is None:
            return RankResources(self.world, self.run)
        units, cut, arena = [unit.full for unit in plan.layout.units], self.peers.cut, plan.layout.arena
        if plan.peers.sharing == "transfers":
            window = SharedWindow(self.memory, cut, self.world, arena.shared_exchange, arena.shared_transfers)
            return RankResources(self.world, self.run, window)
        weights = SharedHomes(self.memory, units, cut, self.world, arena.shared_exchange)
        world = SharingWorld(self.world.collectives) if isinstance(self.world, MultiRankWorld) else self.world
        return RankResources(world, self.run, weights)

    def begin_run(self, config: NvmeConfig, *, replaces: str) -> None:
        """Prepare nvme.paths for a new run. All ranks call this.

        One rank of each machine removes the stores of runs with another number of ranks. The stores of a run that ended
        during its first commit are removed, too.

        Args:
            config: the NVMe config.
            replaces: value of OffloadArguments.replaces. If it is set, the stores of other numbers of ranks are kept,
                and older stores of this number of ranks are removed.

        Raises:
            StoreNotEmptyError: there is a store from which a run can be resumed.
            StoreLockedError: a run uses a store.
            ResumeError: a checkpoint folder pins a generation that would be removed.
            PeerError: another rank failed.
        """
        mine = self._own(config)
        if not replaces:
            self._remove_unresumable(mine)
        elif any((path / HEADER_NAME).exists() for path in mine):
            require_none_pinned(mine[0])
            remove_rank_stores([[path for path in mine if path.exists()]])
        self.world.tell("removing the rest of the stores", None)
        if not replaces and self.is_first:
            clear_others([path.expanduser().absolute() for path in config.paths], self.peers.cut.count)
        self.world.tell("opening the stores", None)

    def _remove_unresumable(self, mine: Sequence[Path]) -> None:
        """Remove manifests of generations that only some ranks have made.

        This is done only if every rank has a store of the same run, and no generation has been made by all ranks.
        """
        if not self.peers.sharded:
            return
        run, steps = run_and_steps_in(mine)
        told = self.world.tell("making the stores", (run, steps))
        if run and all(its == run for its, _ in told) and not _common(told):
            remove_generations(mine[0])

    def stores_are_open(self, config: NvmeConfig, *, resume: bool) -> None:
        """Clean nvme.paths after the stores are open: remove the file about an earlier run that has finished.

        With `resume`, also remove the stores of other numbers of ranks that are incomplete after an interrupted
        removal.

        Raises:
            SwapIOError: a file cannot be removed.
            StoreLockedError: a run uses a store.
        """
        if not self.is_first:
            return
        paths = [path.expanduser().absolute() for path in config.paths]
        for path in paths if self.peers.sharded else ():
            atomic_file.remove(path / FINISHED_NAME)
        if resume:
            clear_leftovers(paths, self.peers.cut.count)

    def require_resumable(self, config: NvmeConfig) -> None:
        """Check that the ranks can resume a run together. All ranks call this.

        Raises:
            ResumeError: the stores of the ranks have no generation in common. All ranks raise this error.
            PeerError: another rank failed.
        """
        if not self.peers.sharded:
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
        """Return this rank's directories."""
        cut = self.peers.cut
        return [rank_path(path.expanduser().absolute(), cut.index, cut.count) for path in config.paths]

    def planned(self, mine: Plan) -> tuple[CommitFrequency, PeerFacts]:
        """Agree on the steps that all ranks commit, and on whether they share all weights. All ranks must call this.

        Returns:
            The frequency of commits, and the facts for a plan that is the same in these respects on all ranks.

        Raises:
            PlanError: a rank has no room for a unit in memory.device.
            PeerError: another rank failed.
        """
        commits = mine.placement.commits
        if not self.peers.sharded:
            return commits, mine.peers
        told = self.world.tell("planning", [mine.peers.sharing, commits.every, commits.reason, commits.at_most])
        if None in told:
            raise PlanError(f"rank {told.index(None)} has too little memory.device for a unit; its message says more")
        at_home = all(theirs == "weights" for theirs, *_ in told)
        sharing: Sharing = "weights" if at_home else "nothing" if self.memory is None else "transfers"
        return rarest([CommitFrequency(*each) for _, *each in told]), replace(self.peers, sharing=sharing)


def _common(told: Sequence[tuple[str, Sequence[int]]]) -> set[int]:
    """Return the steps of which all ranks have a manifest."""
    return set.intersection(*(set(steps) for _, steps in told))


def meet_ranks(config: SwapConfig, device: torch.device) -> RankAgreement:
    """Connect to the other ranks, if there are any. All ranks must call this.

    Raises:
        NotAvailableError: the ranks cannot share memory, and their devices or ranks.wire: host need it.
        ConfigError: torchrun has started several processes, but they have made no process group; or two ranks compute
            on one device.
        PeerError: a rank failed. The message names the rank.
    """
    require_ranks_met()
    ranks = Ranks.of_world(config.ranks.gather, deadline_s=config.ranks_deadline_s)
    world = _world_of(ranks)
    if ranks is None:
        return RankAgreement(world, NO_PEERS)
    near = RankPartition(ranks.gather.size, ranks.gather.position) if ranks.gather.size < ranks.world else None
    peers = PeerFacts(RankPartition(ranks.world, ranks.rank), ranks.local_world, near=near)
    agreement = RankAgreement(world, peers, is_first=ranks.local_rank == 0)
    with agreement.telling():
        _require_alike(world, ranks, device, config.ranks.wire)
        memory, refused = _shared_memory(world, ranks, config)
        if refused and config.ranks.wire == "auto" and ranks.local_world == ranks.world and world.leads:
            logger.warning("ranks.wire: gloo, as %s; results are the same", refused)
        if memory is None and (device.type != "cpu" or config.ranks.wire == "host"):
            wanted = "ranks.wire: host" if device.type == "cpu" else "a model on GPUs with several ranks"
            raise NotAvailableError(f"{wanted} needs memory that all ranks share, but {refused}")
        if device.type != "cpu" and near is not None and world.leads:
            logger.warning("ranks.gather: %s has no effect on GPUs: weights come from all ranks", config.ranks.gather)
        sharing: Sharing = "nothing" if memory is None else "weights"
        return replace(agreement, peers=replace(peers, sharing=sharing), memory=memory)


def ranks_share_memory(config: SwapConfig) -> bool:
    """Return whether the ranks can share memory; False without other ranks. All ranks call this.

    Raises:
        PeerError: a rank failed. The message names the rank.
    """
    ranks = Ranks.of_world(config.ranks.gather, deadline_s=config.ranks_deadline_s)
    if ranks is None:
        return False
    agreement = RankAgreement(_world_of(ranks), NO_PEERS)
    with agreement.telling():
        memory, _ = _shared_memory(agreement.world, ranks, config)
    agreement.world.close()
    if memory is not None:
        memory.close()
    return memory is not None


def _require_alike(world: World, ranks: Ranks, device: torch.device, wire: str) -> None:
    """Check that all ranks have the same wire and devices of one type, and that each has a device of its own."""
    if ranks.world == 1:
        return
    own = "" if device.type == "cpu" else identity(device)
    mine = [wire, str(device), device.type, f"{ranks.node} {own}" if own else ""]
    told = world.tell("comparing the devices", mine)
    for rank, (theirs, name, kind, place) in enumerate(told):
        if theirs != told[0][0]:
            raise ConfigError(
                f"rank {rank} has ranks.wire: {theirs}, and rank 0 has {told[0][0]}: give all ranks the same config"
            )
        if kind != told[0][2]:
            raise ConfigError(
                f"rank 0 computes on {told[0][1]}, but rank {rank} on {name}: all ranks need GPUs, or none"
            )
        first = next(other for other, (*_, its) in enumerate(told) if its == place)
        if place and first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} compute on the same device ({told[first][1]} and {name}). "
                f"{choice_of_rank(device, ranks.local_rank)}, or start no more ranks than the machine has devices."
            )


def _shared_memory(world: World, ranks: Ranks, config: SwapConfig) -> tuple[SharedMemory | None, str]:
    """Return memory that all ranks share, or None and the reason why there is none; "" if there is one rank."""
    if ranks.world == 1:
        return None, ""
    if config.ranks.wire == "gloo":
        return None, "the swap config has ranks.wire: gloo"
    if ranks.local_world < ranks.world:
        return None, "the ranks are on several machines"
    return open_shared_memory(world)


def _digest(units: Sequence[Unit]) -> str:
    """Return a digest of the names, shapes, dtypes and codecs of all parameters, and of their assignment to units."""
    told = [
        (unit.name, str(group.dtype), group.trainable, group.moments, group.codec, spec.name, list(spec.shape))
        for unit in units
        for group in unit.groups
        for spec in group.specs
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
