"""The order of a run's sequences."""

from __future__ import annotations

from infinity.cli.order import SequenceSampler


def test_each_pass_has_every_sequence_in_another_order() -> None:
    order = list(SequenceSampler(10, 25, seed=0))
    assert [sorted(order[first : first + 10]) for first in (0, 10)] == [list(range(10))] * 2
    assert order[:10] != order[10:20]
    assert len(order) == 25


def test_a_longer_run_begins_as_a_shorter_one_and_another_seed_otherwise() -> None:
    assert list(SequenceSampler(10, 25, seed=0))[:12] == list(SequenceSampler(10, 12, seed=0))
    assert list(SequenceSampler(10, 10, seed=0)) != list(SequenceSampler(10, 10, seed=1))
