"""Runs that are made once, and whose small files the tests change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.stores import BUILD, make_run

Runs = dict[str, Path]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return by kind of model: a directory with the run's swap directories "a" and "b", and the expected values."""
    made = {}
    for kind in BUILD:
        made[kind] = tmp_path_factory.mktemp(kind)
        make_run(kind, made[kind], [made[kind] / "a", made[kind] / "b"])
    return made
