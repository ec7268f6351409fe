"""`infinity finetune` under torchrun: this process is one of several ranks, of which rank 0 speaks for all."""

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
from infinity.sharded import together
from infinity.sharded.stores import ranks_said
from infinity.sharded.together import Tell

_WAIT_S = 24 * 3600.0
"""Seconds that ranks wait for one that is alive, and reads the text or writes the result. One that died is noticed."""

_LEADING = "what rank 0 is about to do"


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run; by itself where there is no other.

    Attributes:
        rank: of this process.
        count: of all.
    """

    rank: int = 0
    count: int = 1

    @property
    def speaks(self) -> bool:
        """Whether this process reads and writes what there is one of: the output, the report, the terminal."""
        return self.rank == 0

    def __str__(self) -> str:
        return ranks_said(self.count)


ALONE = World()


def told(model: nn.Module, what: str, value: Any) -> list[Any]:
    """What each rank tells, in the order of the ranks; JSON. All ranks call, outside of forward and backward. Raises
    PeerError."""
    return registry.coordinator_of(model).world.tell(what, value)


def lead(model: nn.Module, act: str, *arguments: str) -> None:
    """On rank 0: it is about to do something that takes all ranks, who `follow`. Raises PeerError."""
    told(model, _LEADING, [act, *arguments])


def follow(model: nn.Module, acts: dict[str, Callable[..., object]]) -> None:
    """On the other ranks: do what rank 0 says, until it says "end". Raises PeerError."""
    while True:
        act, *arguments = told(model, _LEADING, None)[0]
        if act == "end":
            return
        acts[act](*arguments)


def meeting() -> AbstractContextManager[Tell]:
    """What each rank tells all hear, and an error of one ends all. All ranks call. Raises PeerError."""
    return together.meeting(_WAIT_S)


@contextmanager
def joined() -> Iterator[World]:
    """The ranks that torchrun started meet, where it did; only the first of them prints to stdout.

    Raises:
        ConfigError: the environment is not that of a rank.
        InfinityError: the ranks do not find each other.
    """
    rank, world_size = rank_and_world()
    count = os.environ.get("WORLD_SIZE", "1")
    if world_size > 1 or count == "1":  # whoever called main has made the group
        yield World(rank, world_size)
        return
    try:
        world = World(int(os.environ["RANK"]), int(count))
    except (KeyError, ValueError):
        raise ConfigError(
            f"WORLD_SIZE is {count}, and RANK does not say which rank this is: start several ranks with torchrun"
        ) from None
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise InfinityError(f"rank {world.rank} of {count} does not find the others: {error}") from error
    try:
        with contextlib.ExitStack() as silent:
            if not world.speaks:
                silent.enter_context(contextlib.redirect_stdout(silent.enter_context(open(os.devnull, "w"))))
            yield world
    finally:
        dist.destroy_process_group()
