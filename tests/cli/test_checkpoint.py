"""`infinity checkpoint`: what it says of directories, all that are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import main
from tests.models import llama


def test_every_directory_that_is_named_is_listed(offload: Any, tmp_path: Path, capsys: Any) -> None:
    offload(llama()[0])
    swap = str(tmp_path / "swap")
    assert main(["checkpoint", "list", swap]) == 0
    assert main(["checkpoint", "list", swap, str(tmp_path / "none")]) == 2
    assert "none holds no store of infinity" in capsys.readouterr().err


@pytest.mark.parametrize("act", ["list", "verify", "export", "remove"])
@pytest.mark.parametrize("place", ["missing", "empty", "file", "file/below", "/dev/zero", "\x1b[31mred"])
def test_what_is_no_store_is_named_and_left_alone(act: str, place: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    more = ["--output", str(tmp_path / "out")] if act == "export" else []
    assert main(["checkpoint", act, str(tmp_path / place), *more]) == 2
    error = capsys.readouterr().err
    assert "holds no store of infinity" in error
    assert error.isprintable() or error.rstrip("\n").isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "mine"
