"""Fixtures of the tests of the command line's small runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_finetune import job

__all__ = ["job"]


@pytest.fixture
def picture() -> None:
    """Let the runs of this test draw their loss curve."""


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace the loss curve by an empty file, because drawing takes as long as several steps."""
    if "picture" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:  # a separate MonkeyPatch, because tests undo the fixture's
        patch.setattr("infinity.cli.run_report._plot", _leave_blank)
        yield


def _leave_blank(facts: object, evaluations: object, path: Path) -> None:
    path.touch()
