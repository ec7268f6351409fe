"""The checker of happens-before, in cases made by hand and compared with a check of all pairs of accesses."""

from __future__ import annotations

import gc
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.clocks import Access, Actor, Memory, Order, Unordered

HERE = ("here.py", 1)


def use(order: Order, actor: Actor, begin: int, end: int, *, write: bool, text: str = "use") -> None:
    order.use(actor, begin, end, write=write, text=text, place=HERE)


def test_two_writes_of_different_actors_must_be_ordered() -> None:
    order = Order()
    one, other = order.actor("one"), order.actor("other")
    use(order, one, 0, 8, write=True)
    with pytest.raises(Unordered):
        use(order, other, 7, 9, write=True)


def test_the_error_names_both_uses() -> None:
    order = Order()
    one, other = order.actor("up"), order.actor("compute")
    order.use(one, 0, 8, write=True, text="copy of 8 bytes", place=("a.py", 3))
    with pytest.raises(Unordered) as error:
        order.use(other, 4, 12, write=False, text="aten.mm", place=("b.py", 5))
    message = str(error.value)
    assert "read (aten.mm) by compute at b.py:5" in message
    assert "write (copy of 8 bytes) by up at a.py:3" in message
    assert "4 bytes at 0x4" in message


def test_who_joins_a_snapshot_is_behind_it() -> None:
    order = Order()
    one, other = order.actor("one"), order.actor("other")
    use(order, one, 0, 8, write=True)
    order.join(other, order.snapshot(one))
    use(order, other, 0, 8, write=True)


def test_what_comes_after_the_snapshot_is_not_ordered() -> None:
    order = Order()
    one, other = order.actor("one"), order.actor("other")
    snapshot = order.snapshot(one)
    use(order, one, 0, 8, write=True)
    order.join(other, snapshot)
    with pytest.raises(Unordered):
        use(order, other, 0, 8, write=False)


def test_reads_need_no_order_and_a_write_needs_it_with_each_of_them() -> None:
    order = Order()
    one, two, writer = order.actor("one"), order.actor("two"), order.actor("writer")
    use(order, one, 0, 8, write=False)
    use(order, two, 0, 8, write=False)
    order.join(writer, order.snapshot(two))
    with pytest.raises(Unordered, match="by one"):
        use(order, writer, 0, 8, write=True)


def test_what_is_forgotten_is_used_anew() -> None:
    order = Order()
    one, other = order.actor("one"), order.actor("other")
    use(order, one, 0, 8, write=True)
    order.memory.forget(0, 4)
    use(order, other, 0, 4, write=True)
    with pytest.raises(Unordered):
        use(order, other, 4, 5, write=True)


def test_the_clock_does_not_grow_with_requests_that_ended() -> None:
    order = Order()
    host = order.actor("host")
    for index in range(100):
        request = order.actor(f"request {index}", behind=host)
        use(order, request, 0, 8, write=True)
        order.join(host, order.end(request))
        use(order, host, 0, 8, write=True)
    assert len(host.clock) == 2


def test_a_request_that_nobody_waited_for_stays_apart() -> None:
    order = Order()
    host = order.actor("host")
    first = order.actor("first", behind=host)
    use(order, first, 0, 8, write=True)
    order.end(first)
    second = order.actor("second", behind=host)
    with pytest.raises(Unordered, match="by first"):
        use(order, second, 0, 8, write=True)


ACTORS = 4
BYTES = 12
uses = st.tuples(
    st.just("use"), st.integers(0, ACTORS - 1), st.integers(0, BYTES - 1), st.integers(1, BYTES), st.booleans()
)
records = st.tuples(st.just("record"), st.integers(0, ACTORS - 1))
waits = st.tuples(st.just("wait"), st.integers(0, ACTORS - 1), st.integers(0, 30))
requests = st.tuples(st.just("request"), st.integers(0, BYTES - 1), st.integers(1, BYTES), st.booleans())


@given(st.lists(st.one_of(uses, uses, records, waits, waits, requests), max_size=60))
def test_it_finds_what_all_pairs_of_all_accesses_find(program: list[tuple]) -> None:
    """The model keeps, for each step, the set of all steps that happen before it."""
    order = Order()
    actors = [order.actor(f"actor {index}") for index in range(ACTORS)]
    before: list[set[int]] = [set() for _ in actors]
    events: list[tuple[set[int], object]] = []
    seen: list[tuple[int, int, int, bool]] = []

    def found(who: set[int], begin: int, end: int, write: bool) -> bool:
        return any(
            step not in who and (write or wrote) and first < end and begin < last for step, first, last, wrote in seen
        )

    for step, (what, *rest) in enumerate(program):
        if what == "record":
            events.append((set(before[rest[0]]), order.snapshot(actors[rest[0]])))
        elif what == "wait" and events:
            known, snapshot = events[rest[1] % len(events)]
            before[rest[0]] |= known
            order.join(actors[rest[0]], snapshot)
        elif what in ("use", "request"):
            who, *where = rest if what == "use" else (0, *rest)
            begin, nbytes, write = where
            end = min(begin + nbytes, BYTES)
            actor = actors[who] if what == "use" else order.actor("request", behind=actors[0])
            expected = found(before[who], begin, end, write)
            if expected:
                with pytest.raises(Unordered):
                    use(order, actor, begin, end, write=write)
                return
            use(order, actor, begin, end, write=write)
            seen.append((step, begin, end, write))
            if what == "use":
                before[who].add(step)
            else:
                events.append((before[0] | {step}, order.end(actor)))


@pytest.mark.parametrize("seed", range(20))
def test_segments_are_disjoint_and_have_bytes_whatever_is_used(seed: int) -> None:
    """A use of 0 bytes once left an empty segment, and later uses were then reported as unordered with it."""
    chance, memory, everything = random.Random(seed), Memory(), dict.fromkeys(range(4), 1000)
    for turn in range(200):
        begin = chance.randrange(40)
        end = begin + chance.randrange(12)
        if chance.random() < 0.2:
            memory.forget(begin, end)
        else:
            access = Access("a", chance.randrange(4), turn, chance.random() < 0.5, "a use", ("file", 1))
            assert memory.use(begin, end, access, everything) is None
        segments = [(segment.begin, segment.end) for segment in memory._segments]
        assert all(first < last for first, last in segments)
        assert all(last <= first for (_, last), (first, _) in itertools.pairwise(segments))
        assert memory._begins == [first for first, _ in segments]


def test_a_finalizer_that_forgets_memory_does_not_disturb_a_use_under_way() -> None:
    """The garbage collector runs when an object is made, also during a use, and may collect a closed model's arena."""
    memory, order = Memory(), Order()
    actor, threshold = order.actor("the host"), gc.get_threshold()

    class Arena:
        def __init__(self, begin: int) -> None:
            self.begin, self.itself = begin, self

        def __del__(self) -> None:
            memory.forget(self.begin, self.begin + 8)

    try:
        for turn in range(400):
            at = turn * 40 % 4096
            access = Access("the host", actor.index, actor.now, turn % 3 == 0, "use", HERE)
            gc.disable()
            Arena(at // 2)
            gc.set_threshold(gc.get_count()[0] + turn % 5)
            gc.enable()
            memory.use(at, at + 100, access, actor.clock)
            gc.disable()
            begins = [(segment.begin, segment.end) for segment in memory._segments]
            assert begins == sorted(begins)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(begins))
            assert memory._begins == [begin for begin, _ in begins]
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
