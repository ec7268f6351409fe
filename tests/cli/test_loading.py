"""The lines about what a run loads before its first step."""

from __future__ import annotations

import pytest

from infinity.cli.loading import loading


def test_a_line_has_the_seconds_only_if_loading_took_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([10.0, 44.6, 50.0, 50.2])
    monkeypatch.setattr("infinity.cli.loading.time.monotonic", lambda: next(times))
    for what in ("libraries", "model"):
        with loading(what):
            pass
    assert capsys.readouterr().out == "libraries loaded in 35 s\nmodel loaded\n"


def test_nothing_is_called_loaded_that_failed_to_load(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), loading("model"):
        raise KeyError
    assert capsys.readouterr().out == ""
