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
from tests.hostile.stores import PARTS, Case, cases_of, copied, put_through
from tests.sampling import seed


def check(case: Case) -> None:
    kind, root, work, number_of = case
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} headers {number_of}")
    paths = copied([root / "a", root / "b"], work)
    for path in draw.choice([paths[:1], paths[1:], paths]):
        mutate_document(path / HEADER_NAME, "store", 1, draw)
    put_through(kind, root, paths, work)
    shutil.rmtree(work)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_header_of_nobody_is_the_runs_bits_or_a_typed_error(part: int, runs: Runs, tmp_path: Path) -> None:
    assert failures(check, cases_of(part, {"plain": runs["plain"]}, tmp_path), tmp_path) == []
