"""Manifests with valid checksums and absurd content: each is listed, verified, exported, resumed, carried on and
removed, to the run's own bits or to a typed error."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from infinity.io.directory import generations_in
from tests.hostile.conftest import Runs
from tests.hostile.limits import failures
from tests.hostile.mutations import mutate_document
from tests.hostile.stores import PARTS, Case, cases_of, copied, put_through
from tests.sampling import seed


def check(case: Case) -> None:
    kind, root, work, number_of = case
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} manifests {number_of}")
    paths = copied([root / "a", root / "b"], work)
    newest, *older = generations_in(paths[0]).values()
    for path in (newest, *(older if draw.random() < 0.5 else ())):
        mutate_document(path, "generation", 2, draw)
    put_through(kind, root, paths, work)
    shutil.rmtree(work)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_manifest_of_nobody_is_the_runs_bits_or_a_typed_error(part: int, runs: Runs, tmp_path: Path) -> None:
    assert failures(check, cases_of(part, runs, tmp_path), tmp_path) == []
