"""Device memory: pieces know who used their bytes last, and streams wait for each other there, not the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from infinity.sizes import PAGE_BYTES
from infinity.tiers.slab import SlabLease, StreamUses
from tests.sim.queues import EAGER
from tests.tiers.rig import Rig


def lease(rig: Rig, pages: int, *, from_top: bool = False) -> SlabLease:
    made = rig.slab.try_lease(pages * PAGE_BYTES, from_top=from_top)
    assert made is not None
    return made


def test_memory_that_was_never_used_is_waited_for_by_nobody(rig: Callable[..., Rig]) -> None:
    assert lease(rig(), 8).after == ()


def test_a_lease_names_the_last_uses_of_its_own_bytes_and_no_others(rig: Callable[..., Rig]) -> None:
    made = rig()
    first, second, third = (lease(made, 2) for _ in range(3))
    events = [made.sim.record(made.sim.stream()) for _ in range(3)]
    for each, event in zip((first, second, third), events, strict=True):
        made.slab.give_back(each, [event])
    assert lease(made, 2, from_top=True).after == ()
    assert lease(made, 2).after == (events[0],)
    assert lease(made, 3).after == (events[1], events[2])
    assert lease(made, 1).after == (events[2],)


def test_uses_are_named_to_everybody_who_takes_a_part_of_the_bytes(rig: Callable[..., Rig]) -> None:
    made = rig()
    whole, event = lease(made, 8), made.sim.record(made.sim.stream())
    made.slab.give_back(whole, [event])
    assert [lease(made, 4).after for _ in range(2)] == [(event,), (event,)]


def test_leases_that_go_onward_wait_for_the_oldest_uses(rig: Callable[..., Rig]) -> None:
    made, events = rig(), []
    for turn in range(9):
        each = made.slab.try_lease(3 * PAGE_BYTES, onward=True)
        assert each is not None
        assert each.after == (tuple(events[-2:-1]) if turn > 1 else ())
        events.append(made.sim.record(made.sim.stream()))
        made.slab.give_back(each, [events[-1]])


def test_what_was_reached_is_forgotten(rig: Callable[..., Rig]) -> None:
    made = rig(EAGER)
    for pages in (8, 7, 6, 5, 4):
        made.slab.give_back(lease(made, pages), [made.sim.record(made.sim.stream())])
    assert len(made.slab._left) == 1  # the last
    assert made.slab.free_bytes == made.slab.nbytes


def test_bytes_that_are_used_again_forget_who_used_them_before(rig: Callable[..., Rig]) -> None:
    made = rig()
    stream = made.sim.stream()
    for _ in range(50):
        each = lease(made, 2)
        made.slab.give_back(each, [made.sim.record(stream)])
    assert len(made.slab._left) == 1
    assert made.sim.counts["synchronize"] == 0


def test_a_slab_without_room_gives_nothing(rig: Callable[..., Rig]) -> None:
    made = rig()
    assert made.slab.try_lease(9 * PAGE_BYTES) is None
    one = lease(made, 5)
    assert made.slab.try_lease(4 * PAGE_BYTES) is None
    made.slab.give_back(one, [])
    with pytest.raises(AssertionError, match="released twice"):
        made.slab.give_back(one, [])


def test_what_a_transformation_of_torch_leases_has_memory_of_its_own(rig: Callable[..., Rig]) -> None:
    """Within torch.func.jvp what is sliced has none."""
    made, leases = rig(), []

    def fetches(x: torch.Tensor) -> torch.Tensor:
        leases.append(lease(made, 1))
        return x * 2

    torch.func.jvp(fetches, (torch.ones(2),), (torch.ones(2),))
    assert leases[0].memory.data_ptr() == lease(made, 1).memory.data_ptr() - PAGE_BYTES


def test_each_tensor_of_a_lease_has_a_storage_of_its_own(rig: Callable[..., Rig]) -> None:
    made = rig()
    one = lease(made, 1)
    first, second = one.tensor(), one.tensor()
    assert first.data_ptr() == second.data_ptr() == one.memory.data_ptr()
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


# -- uses --------------------------------------------------------------------------------------------------------------


def test_a_stream_waits_once_and_another_stream_waits_too(rig: Callable[..., Rig]) -> None:
    made = rig()
    sim, ready = made.sim, made.sim.record(made.sim.stream())
    uses = StreamUses(sim, lambda: [ready])
    uses.begin()
    uses.begin()
    assert made.waits == [(sim.current(), ready)]
    side = sim.stream()
    with sim.on(side):
        uses.begin()
        uses.begin()
    assert made.waits[1:] == [(side, ready)]


def test_each_stream_has_a_last_use_behind_all_that_it_queued(rig: Callable[..., Rig]) -> None:
    made = rig()
    sim, side = made.sim, made.sim.stream()
    uses = StreamUses(sim, lambda: [])
    one = lease(made, 1)
    uses.begin()
    one.memory.fill_(1)
    sim.wait(side, sim.record(sim.current()))
    with sim.on(side):
        uses.begin()
        one.memory.add_(1)
    made.slab.give_back(one, uses.events())
    again = lease(made, 1)
    assert len(again.after) == 2
    third = sim.stream()
    for event in again.after:
        sim.wait(third, event)
    with sim.on(third):
        again.memory.fill_(3)


def test_a_use_after_a_rest_counts_anew(rig: Callable[..., Rig]) -> None:
    made = rig()
    uses = StreamUses(made.sim, lambda: [])
    uses.begin()
    before = uses.events()
    assert uses.events() == before  # nothing was used in between
    uses.begin()
    assert uses.events() != before
    assert len(uses.events()) == 1
