"""The small run that tests of the command line change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_finetune import job

__all__ = ["job"]


@pytest.fixture
def picture() -> None:
    """Runs of this test draw their loss curve."""


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drawing takes as long as several steps."""
    if "picture" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:  # its own: tests undo theirs
        patch.setattr("infinity.cli.report._plot", _leave_blank)
        yield


def _leave_blank(facts: object, evaluations: object, path: Path) -> None:
    path.touch()
