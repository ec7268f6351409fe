"""The filling of a new model's homes."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from infinity.base.heap import HeapTrimmer
from infinity.coordinator import registry
from tests.checkpoint.conftest import config_in
from tests.models import llama


def test_holes_of_the_heap_are_looked_for_after_each_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[HeapTrimmer] = []
    monkeypatch.setattr(HeapTrimmer, "check", lambda trimmer: checks.append(trimmer))
    model, _ = llama(layers=3)
    infinity.offload(model, config_in(tmp_path)("swap"))
    units = registry.coordinator_of(model).units
    infinity.close(model)
    assert len(checks) == len(units) > 3


def test_holes_of_the_original_weights_go_back_once_all_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(HeapTrimmer, "check", lambda trimmer: calls.append("check"))
    monkeypatch.setattr(HeapTrimmer, "restart", lambda trimmer: calls.append("restart"))
    model, _ = llama(layers=3)
    infinity.offload(model, config_in(tmp_path)("swap"))
    infinity.close(model)
    assert calls[-1] == "restart"
    assert calls.count("restart") == 1
