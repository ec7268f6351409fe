"""`infinity finetune` under torchrun: this process is one of several ranks. Rank 0 prints and writes for all ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from infinity.coordinator import registry
from infinity.errors import ConfigError, InfinityError
from infinity.ranks.ranks import rank_and_world
from infinity.sharded import rank_agreement
from infinity.sharded.rank_agreement import Tell
from infinity.sharded.rank_stores import ranks_text

_WAIT_S = 24 * 3600.0
"""Seconds for which ranks wait for a rank that is still running.

For example, rank 0 may read the text or write the result. The death of a rank is noticed earlier.
"""

_LEADING = "the next action of rank 0"


@dataclass(frozen=True)
class RunRank:
    """The position of this process among the ranks of a run. The default is a run with one process.

    Attributes:
        rank: rank of this process.
        count: number of ranks.
    """

    rank: int = 0
    count: int = 1

    @property
    def speaks(self) -> bool:
        """Whether this process writes the output and the report, and prints to the terminal, for all ranks."""
        return self.rank == 0

    def __str__(self) -> str:
        return ranks_text(self.count)


def gather_values(model: nn.Module, what: str, value: Any) -> list[Any]:
    """Send a value to all ranks, and return the values of all ranks in their order.

    All ranks must call this, and not during a forward or backward.

    Args:
        model: the offloaded model.
        what: name of the value. The name must be the same on all ranks.
        value: the value, which JSON must be able to represent.

    Raises:
        PeerError: another rank failed.
    """
    return registry.coordinator_of(model).world.tell(what, value)


def lead(model: nn.Module, act: str, *arguments: str) -> None:
    """On rank 0, tell the other ranks which collective operation comes next.

    Rank 0 calls this before the operation. The other ranks are in `follow`.

    Args:
        model: the offloaded model.
        act: name of the operation, which is a key of `acts` in `follow`; or "end".
        arguments: arguments of the operation.

    Raises:
        PeerError: another rank failed.
    """
    gather_values(model, _LEADING, [act, *arguments])


def follow(model: nn.Module, acts: dict[str, Callable[..., object]]) -> None:
    """Do the operations that rank 0 names by `lead`, until rank 0 names "end". All ranks but rank 0 call this.

    Args:
        model: the offloaded model.
        acts: function of each operation, by the name of the operation.

    Raises:
        PeerError: another rank failed.
    """
    while True:
        act, *arguments = gather_values(model, _LEADING, None)[0]
        if act == "end":
            return
        acts[act](*arguments)


def meeting() -> AbstractContextManager[Tell]:
    """Return a context manager.

    All ranks can exchange values in its block, before a model is offloaded. All ranks call this.

    An error of one rank ends the block on all ranks.

    Raises:
        PeerError: another rank failed.
    """
    return rank_agreement.meeting(_WAIT_S)


@contextmanager
def joined() -> Iterator[RunRank]:
    """If torchrun started this process, connect the ranks. Yield the position of this process among the ranks.

    If this call connects the ranks, only rank 0 can print to stdout in the block.

    Raises:
        ConfigError: the environment says that there are several ranks, but not which rank this process is.
        InfinityError: the ranks do not find each other.
    """
    rank, world_size = rank_and_world()
    count = os.environ.get("WORLD_SIZE", "1")
    # the caller of main has already made the process group, or there is only one process
    if world_size > 1 or count == "1":
        yield RunRank(rank, world_size)
        return
    try:
        world = RunRank(int(os.environ["RANK"]), int(count))
    except (KeyError, ValueError):
        raise ConfigError(
            f"WORLD_SIZE is {count}, and RANK does not say which rank this is: start several ranks with torchrun"
        ) from None
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise InfinityError(f"rank {world.rank} of {count} cannot reach the others: {error}") from error
    try:
        with contextlib.ExitStack() as silent:
            if not world.speaks:
                silent.enter_context(contextlib.redirect_stdout(silent.enter_context(open(os.devnull, "w"))))
            yield world
    finally:
        dist.destroy_process_group()
