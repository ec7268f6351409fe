"""Turns of several contenders that are compared in one run of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peers.process import Worker


@contextmanager
def started(workers: Sequence[Worker]) -> Iterator[None]:
    """Run the workers within the context.

    The workers set up at the same time, and each worker makes one step.
    """
    running: list[Worker] = []
    try:
        for worker in workers:
            worker.start()
            running.append(worker)
        for worker in workers:
            worker.wait_ready()
            worker.step()
        yield
    finally:
        for worker in reversed(running):
            worker.stop()


def rounds_of(workers: Sequence[Worker], rounds: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the measurements of each worker by name, once per round. Every round begins with another worker."""
    for turn in _turns(workers, rounds):
        yield {worker.name: worker.step() for worker in turn}


def with_replays(workers: Sequence[Worker], rounds: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield measurements as `rounds_of` does, with a `replay` of each worker that supports it: the bytes of the
    worker's step, moved without computing."""
    for turn in _turns(workers, rounds):
        found = {}
        for worker in turn:
            found[worker.name] = worker.step()
            if worker.facts["replays"]:
                found[worker.name]["replay"] = worker.replay()
        yield found


def _turns(workers: Sequence[Worker], rounds: int) -> Iterator[list[Worker]]:
    for number in range(rounds):
        turn = number % len(workers)
        yield [*workers[turn:], *workers[:turn]]
