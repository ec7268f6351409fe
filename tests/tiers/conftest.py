"""Fixtures for tests of the parts of a device tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.sim.fixtures import simulate
from tests.sim.host import follow_the_host
from tests.sim.queues import LAZY, Policy
from tests.sim.watch import watched
from tests.tiers.rig import Rig

__all__ = ["rig", "simulate"]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Provide a function that makes rigs, with the arguments of WorkloadRunner.

    At the end of the test, the rigs are closed, and all uses of memory must have been ordered.
    """
    made: list[Rig] = []
    with ExitStack() as entered:

        def make(policy: Policy = LAZY, **options: Any) -> Rig:
            one = Rig(policy, **options)
            made.append(one)
            follow_the_host(monkeypatch, one.sim)
            entered.enter_context(watched(one.sim))
            return one

        yield make
        for one in made:
            one.close()
    for one in made:
        one.sim.check()
