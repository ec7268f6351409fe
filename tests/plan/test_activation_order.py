"""Order in which the memory of a forward comes back, and what stays."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from infinity.plan.activation_order import ActivationOrder, KeptMemory


def forward(
    order: ActivationOrder, sizes: Sequence[int], *, in_use: Collection[int] = (), back: Sequence[int] = ()
) -> tuple[KeptMemory, list[int]]:
    """Do a forward, and return it with the numbers that stayed. `back` come back, if they moved."""
    kept = order.begin()
    stayed = [number for number, nbytes in enumerate(sizes) if order.stays(kept, nbytes)]
    order.end(kept, in_use)
    for number in back:
        if number not in stayed:
            kept.came_back(number)
    return kept, stayed


def test_the_last_comes_back_first_until_a_backward_is_known() -> None:
    order = ActivationOrder(0)
    kept, stayed = forward(order, [1] * 6)
    assert stayed == []
    assert list(kept.following()) == [5, 4, 3, 2, 1, 0]
    for number in (1, 5, 3):
        kept.came_back(number)
    assert list(kept.following()) == [4, 2, 0]


def test_a_known_backward_is_repeated() -> None:
    order, vertical = ActivationOrder(0), [4, 5, 2, 3, 0, 1]
    forward(order, [1] * 6, back=vertical)
    forward(order, [1] * 6, back=vertical)
    kept, _ = forward(order, [1] * 6)
    assert list(kept.following()) == vertical
    kept.came_back(4)
    assert list(kept.following()) == vertical[1:]


def test_the_last_bytes_stay() -> None:
    order = ActivationOrder(5)
    assert forward(order, [2, 2, 2, 2], back=[3, 2, 1, 0])[1] == []
    forward(order, [2, 2, 2, 2])
    kept, stayed = forward(order, [2, 2, 2, 2])
    assert stayed == [2, 3]
    assert list(kept.following()) == [1, 0]


def test_what_is_in_use_at_the_end_stays_first_as_far_as_there_is_room() -> None:
    order = ActivationOrder(5)
    for _ in range(2):
        forward(order, [2, 9, 2, 2], in_use=[0, 1])
    assert forward(order, [2, 9, 2, 2], in_use=[0])[1] == [0, 3]
    assert forward(order, [2, 9, 2, 2])[1] == [0, 3]
    assert forward(order, [2, 9, 2, 2])[1] == [2, 3]  # number 0 was in use no longer


def test_larger_memory_stays_only_within_the_room() -> None:
    order = ActivationOrder(4)
    for _ in range(2):
        forward(order, [2, 2, 2])
    assert forward(order, [3, 3, 3])[1] == [1]


def test_forwards_that_take_turns_are_told_apart() -> None:
    order = ActivationOrder(0)
    for _ in range(3):
        forward(order, [1] * 3, back=[0, 1, 2])
        forward(order, [1] * 4, back=[3, 0, 2, 1])
    assert list(forward(order, [1] * 3, back=[0, 1, 2])[0].order) == [0, 1, 2]
    assert list(forward(order, [1] * 4)[0].order) == [3, 0, 2, 1]
