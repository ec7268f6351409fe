"""The handle in `.grad`, as far as it can be tested alone."""

from __future__ import annotations

from typing import Any

import torch

from infinity.coordinator.gradient_handle import _LastValueCache


def test_the_last_number_is_that_of_the_tensor_also_when_another_thread_asks_in_between() -> None:
    last, other = _LastValueCache(), torch.tensor(3.0)

    class Number:
        """A tensor whose version is read when the other thread runs."""

        def item(self) -> float:
            return 2.0

        @property
        def _version(self) -> int:
            assert last.of(other) == 3.0
            return 0

    number: Any = Number()
    assert [last.of(number), last.of(number)] == [2.0, 2.0]


def test_the_last_number_follows_a_change_in_place() -> None:
    last, number = _LastValueCache(), torch.tensor(2.0)
    assert last.of(number) == 2.0
    number.mul_(2)
    assert last.of(number) == 4.0
