"""The saved config of a model is the one that was read, although a trainer changes it meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.cli.test_finetune import job as job
from tests.cli.test_finetune import run
from tests.models import llama, mixtral


def config_in(directory: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((directory / name).read_text())
    return {key: value for key, value in values.items() if key not in ("dtype", "transformers_version")}


@pytest.mark.parametrize("model", [llama(1)[0], mixtral()[0]], ids=["dense", "mixture"])
def test_configs_are_as_they_were(model: nn.Module, job: dict[str, Any], tmp_path: Path) -> None:
    model.bfloat16().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    before = {name: config_in(tmp_path / "model", name) for name in ("config.json", "generation_config.json")}
    assert before["config.json"]["use_cache"]
    assert run(job | {"--steps": 2}, "--save-every", "1") == 0
    for place in (tmp_path / "out", tmp_path / "out-steps" / "checkpoint-1"):
        assert {name: config_in(place, name) for name in before} == before
    assert not list((tmp_path / "out-steps").glob("**/README.md"))
