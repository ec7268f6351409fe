"""Rank 0 prints an error of the input, which all ranks have in common, once for all ranks."""

from __future__ import annotations

import pickle

import pytest

from infinity.cli.rank_errors import is_told_by_rank_0
from infinity.errors import InfinityError, PeerError


def of_rank(rank: int, kind: str) -> PeerError:
    return PeerError(f"rank {rank} failed: {kind}: a reason", (rank,), kind=kind)


@pytest.mark.parametrize(
    ("rank", "error", "told"),
    [
        ("1", of_rank(0, "StoreNotEmptyError"), True),
        ("1", of_rank(0, "DirtyStoreError"), True),  # a ResumeError
        ("1", pickle.loads(pickle.dumps(of_rank(0, "PlanError"))).again(), True),
        ("1", of_rank(0, "SwapIOError"), False),
        ("1", of_rank(0, "KeyError"), False),
        ("2", of_rank(1, "StoreNotEmptyError"), False),
        ("0", of_rank(0, "StoreNotEmptyError"), False),
        ("1", PeerError("rank 0 died", (0,)), False),
        ("1", InfinityError("another"), False),
    ],
)
def test_a_rank_is_quiet_when_rank_0_has_an_error_of_the_input(
    rank: str, error: InfinityError, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert is_told_by_rank_0(error) == told
