"""Gradients of a device on their way to other ranks: through the ring into the box, before any rank reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity.sharded.outbox import GradientOutbox
from infinity.state.shard import RankPartition
from infinity.state.unit import ParameterPlace
from tests.sharded.sharing import SLICE_NUMEL
from tests.sim.queues import EAGER, LAZY, Policy, random_policy
from tests.tiers.rig import Rig
from tests.units.fakes import unit_of


class Collectives:
    """Counterpart of CollectiveQueue that does what comes before an operation.

    Attributes:
        sent: bytes that were sent.
    """

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def submit(self, operation: Any) -> Any:
        for each in operation.after:
            each()
        self.sent.append(operation.collective.send.numpy().tobytes())
        return self


@pytest.mark.parametrize("policy", [LAZY, EAGER, random_policy(0)], ids=str)
def test_every_piece_of_a_gradient_is_in_the_box_when_it_is_sent(rig: Callable[..., Rig], policy: Policy) -> None:
    """The first parameter gets two pieces; the gradient of the second is forgotten after it was packed."""
    made, collectives = rig(policy), Collectives()
    unit = unit_of(0, (2,))
    shard, queue = RankPartition(1, 0, SLICE_NUMEL).of(unit), made.gradients()
    queues: Any = collectives
    outbox = GradientOutbox([shard], [], queues, made.arena.lease(1 << 15, "boxes").space(), lambda _: None, queue)
    first, second = unit.groups[0].specs
    for piece in (1.0, 2.0):
        outbox.take(ParameterPlace(unit, 0, first), torch.full((first.numel,), piece))
    outbox.take(ParameterPlace(unit, 0, second), torch.full((second.numel,), 5.0))
    outbox.forget(0, second.name)
    outbox.send(0)
    (sent,) = collectives.sent
    found = torch.frombuffer(bytearray(sent), dtype=torch.float32)
    assert found[: first.numel].unique().tolist() == [3.0]
    assert found[second.offset : second.offset + second.numel].unique().tolist() == [0.0]
