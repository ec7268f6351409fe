"""Identity of the ranks: this rank's number, the ranks on the same machine, and the process groups.

[Note: stages are two groups]
States are sharded over a group W of ranks. The first gather of a unit's weights after an update is over W. Later
gathers, until the next update, are over a group G. If G is W, this is ZeRO-3. If G is only this rank, this is ZeRO-2.
If G is the ranks of one machine, this is hpZ (ZeRO++) or MiCS. There is no separate mode for ZeRO-1, because gradients
are always reduced unit by unit. (Rajbhandari et al., ZeRO, 2020, §5; Wang et al., ZeRO++, 2023, §3.)

torch.distributed does the communication. Data are moved in a process group of the device's backend, which is gloo for
host memory. Control messages always use gloo. If G is W, gathers and exchanges use the same communicator, because two
communicators that are used at the same time may block each other (nccl#195).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from infinity.base.fork import refuse_in_forked_child
from infinity.base.interrupt import interrupts_deferred
from infinity.errors import ConfigError, NotAvailableError, PeerError
from infinity.ranks.watch import PeerWatch, private

Gathered = Literal["auto", "world", "node", "none"]

_MARGIN_S = 60.0  # gloo's deadline is later, so that the error is that of the collective queue, which names the rank
_numbers = itertools.count()  # the same on all ranks, because they offload their models in the same order


def require_one_process(command: str) -> None:
    """Raise NotAvailableError if torchrun has started several processes, because each would train a separate model."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise NotAvailableError(f"{command} with several ranks is not available yet: start it without torchrun")


def require_ranks_met() -> None:
    """Raise ConfigError if torchrun has started several processes and they have made no process group.

    Without a process group, each process would train a separate model.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1" and rank_and_world() == (0, 1):
        raise ConfigError(
            f"{count} processes run this script, but torch.distributed is not initialized when the model is offloaded. "
            "Make the Accelerator or the TrainingArguments first, or call torch.distributed.init_process_group; or "
            "start the script without torchrun"
        )


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank in torch.distributed's default group, and the group's size; (0, 1) if there is no
    group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def has_others() -> bool:
    """Return whether torch.distributed's default group has other ranks."""
    return rank_and_world()[1] > 1


@dataclass(frozen=True)
class RankGroup:
    """Subset of the ranks.

    Attributes:
        ranks: numbers of the group's ranks in the world, ascending.
        position: position of this rank in `ranks`. This rank always belongs to the group.
    """

    ranks: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        return len(self.ranks)


class Ranks:
    """All ranks, and the place of this process among them.

    Attributes:
        rank, world: number of this rank, and number of ranks.
        local_rank, local_world: number of this rank, and number of ranks, on this machine. Budgets are divided by
            `local_world`.
        node: number of this machine. Machines are numbered in the order of their first ranks.
        control: group of all ranks, over gloo, for data other than tensors.
        gather: group G, over which later gathers of weights run until the next update: the world (ZeRO-3), the ranks of
            this machine (hpZ, MiCS), or this rank alone (ZeRO-2).
        shard: group W, over which states are sharded and gradients are exchanged: the world.
        deadline_s: seconds for which each rank waits for each other rank.
        watch: communication outside of collectives.
    """

    def __init__(self, rank: int, world: int, watch: PeerWatch, deadline_s: float) -> None:
        self.rank, self.world, self.watch, self.deadline_s = rank, world, watch, deadline_s
        self.local_rank, self.local_world, self.node = 0, 1, 0
        self.control = self.shard = self.gather = RankGroup(tuple(range(world)), rank)
        self._assembled = 0
        self._talking: ProcessGroup | None = None
        self._moving: dict[tuple[int, ...], ProcessGroup] = {}
        self._closed = False

    @classmethod
    def of_world(
        cls,
        gather: Gathered = "auto",
        *,
        deadline_s: float = 330.0,
        machine: str | None = None,
        even_alone: bool = False,
    ) -> Ranks | None:
        """Return the ranks of torch.distributed's default group. All ranks must call this.

        The result is None if there is no group, or if the group has only one rank.

        Args:
            gather: ranks that form the group G; auto: the ranks of one machine.
            deadline_s: seconds for which each rank waits for each other rank (SwapConfig.ranks_deadline_s).
            machine: name of this machine, which is the same for all its ranks; by default the host's name and boot id.
            even_alone: whether the ranks are returned even if the group has only one rank.

        Raises:
            PeerError: a rank did not make this call within the deadline, or died. The message names the rank.
        """
        rank, world = rank_and_world()
        if world == 1 and not (even_alone and dist.is_initialized()):
            return None
        store = distributed_c10d._get_default_store()
        host, hosted_by = _host_of(store)
        watch = PeerWatch(
            private(store, f"infinity/{next(_numbers)}") if world > 1 else store, rank, world, host, hosted_by
        )
        ranks = cls(rank, world, watch, deadline_s)
        try:
            ranks._meet(machine or _machine(), gather)
        except BaseException:
            ranks.close()
            raise
        return ranks

    def _meet(self, machine: str, gather: Gathered) -> None:
        """Find out which ranks have the same machine, and make the process groups."""
        mine = {"machine": machine, "pid": os.getpid(), "pids": _pids(), "gather": gather, "boot": _boot()}
        told = self._assemble("torch.distributed's groups", json.dumps(mine), self.deadline_s)
        all_: dict[int, dict[str, Any]] = {rank: json.loads(payload) for rank, payload in sorted(told.items())}
        for rank, other in all_.items():
            if other["gather"] != gather:
                raise PeerError(
                    f"rank {rank} gathers over '{other['gather']}', but rank {self.rank} over '{gather}': ranks.gather "
                    "must be the same on all ranks",
                    (rank,),
                )
        same = {"boot": mine["boot"], "pids": mine["pids"]}
        near = {r: other["pid"] for r, other in all_.items() if r != self.rank and same.items() <= other.items()}
        self.watch.look_at(near)
        nodes: dict[str, list[int]] = {}
        for rank, other in all_.items():
            nodes.setdefault(other["machine"], []).append(rank)
        here = nodes[machine]
        self.node, self.local_world, self.local_rank = list(nodes).index(machine), len(here), here.index(self.rank)
        if self.world > 1:
            self._talking = self._new_group(range(self.world))
            self._moving[self.shard.ranks] = self._new_group(range(self.world))
        if gather == "none":
            self.gather = RankGroup((self.rank,), 0)
        elif gather != "world":
            self.gather = RankGroup(tuple(here), self.local_rank)
            for members in nodes.values():  # every rank must take part in making each group
                if 1 < len(members) < self.world:
                    made = self._new_group(members)
                    if members is here:
                        self._moving[self.gather.ranks] = made

    def _new_group(self, members: Any) -> ProcessGroup:
        timeout = timedelta(seconds=self.deadline_s + _MARGIN_S)
        try:
            return cast(ProcessGroup, dist.new_group(list(members), timeout=timeout, backend="gloo"))
        except Exception as error:
            what = "making a process group"
            raise self.watch.inquire("connection", what, str(error)).again() from error

    def group_of(self, group: RankGroup) -> ProcessGroup:
        """Return the process group in which the ranks of W or G move data. `group` must have at least two ranks."""
        return self._moving[group.ranks]

    @property
    def talking(self) -> ProcessGroup:
        """Process group of all ranks for control messages. There must be at least two ranks."""
        assert self._talking is not None
        return self._talking

    def assemble(self, name: str, timeout_s: float | None = None) -> None:
        """Wait until all ranks make this call with the same name. No operation may be in flight.

        Args:
            name: the activity that begins, for messages: "offload", "resume".
            timeout_s: seconds to wait; None: the deadline of `of_world`.

        Raises:
            PeerError: ranks did not make this call, or are at another activity. The message names these ranks.
        """
        self._assemble(name, "", self.deadline_s if timeout_s is None else timeout_s)

    def _assemble(self, name: str, payload: str, timeout_s: float) -> dict[int, str]:
        refuse_in_forked_child()
        self._assembled += 1
        return self.watch.assembled(self._assembled, name, payload, timeout_s)

    def close(self, *, idle: bool = True) -> None:
        """Destroy all process groups. Needs no communication. A second call does nothing.

        Args:
            idle: whether no collective is in flight. If a collective is in flight, the groups are destroyed only when
                the process ends, because gloo would wait for the end of the collective and would block the interpreter.
        """
        if self._closed:
            return
        with interrupts_deferred():
            self._closed = True
            self.watch.close()
            groups = [*self._moving.values()] + ([self._talking] if self._talking is not None else [])
            for group in groups:
                if not idle:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                try:
                    dist.destroy_process_group(group)
                except (ValueError, AssertionError):
                    continue  # the user has destroyed all groups
            self._moving.clear()
            self._talking = None


def _machine() -> str:
    """Return the name of this machine. Two containers on one host count as two machines, with separate budgets."""
    return f"{socket.gethostname()} {_boot()}"


def _boot() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _pids() -> str:
    """Return an id of the PID namespace, in which process ids are unique."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unknown to {os.getpid()}"


def _host_of(store: Store) -> tuple[str, int | None]:
    """Return a description of the host of torch.distributed's store, and the rank that hosts the store; None if no rank
    hosts it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return type(store).__name__, None
    where = f"{store.host}:{store.port}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"{where}, which the launcher hosts", None
    return f"{where}, which the process of rank 0 hosts", 0
