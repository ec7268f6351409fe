"""Headers with valid checksums and absurd content, on one part of a store or on both: what reads a store gives the
run's own bits or a typed error."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from infinity.io.directory import HEADER_NAME
from tests.hostile.conftest import Runs
from tests.hostile.limits import failures
from tests.hostile.mutations import mutate_document
from tests.hostile.stores import copied, put_through
from tests.sampling import number, seed

CASES = number(50, 1000, "INFINITY_HOSTILE")
_PARTS = 4

Case = tuple[str, str, int]


def check(case: Case) -> None:
    root, work, number_of = Path(case[0]), Path(case[1]), case[2]
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} headers {number_of}")
    paths = copied([root / "a", root / "b"], work)
    for path in draw.choice([paths[:1], paths[1:], paths]):
        mutate_document(path / HEADER_NAME, "store", 1, draw)
    put_through("plain", root, paths, work)
    shutil.rmtree(work)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
def test_a_header_of_nobody_is_the_runs_bits_or_a_typed_error(part: int, runs: Runs, tmp_path: Path) -> None:
    cases = [(str(runs["plain"]), str(tmp_path / str(each)), each) for each in range(part, CASES, _PARTS)]
    assert failures(check, cases, tmp_path) == []
