"""The plan is told how many backward passes a step has, where the script says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from transformers import AutoModelForCausalLM

from infinity.access import opening
from tests.integrations.conftest import Launch
from tests.integrations.test_lightning import loader, made
from tests.integrations.test_lightning import trainer as lightning_trainer
from tests.integrations.training import Rows, trainer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number of passes that each plan was given."""
    plans: list[int | None] = []
    make_plan = opening.make_plan

    def make(*given: Any, **options: Any) -> Any:
        plans.append(given[1].accumulation_steps)
        return make_plan(*given, **options)

    monkeypatch.setattr(opening, "make_plan", make)
    return plans


@pytest.fixture
def _no_accelerator_of_an_earlier_test() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_no_accelerator_of_an_earlier_test")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"gradient_accumulation_steps": 1}, 1),
        ({"gradient_accumulation_steps": 3}, 3),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1)}, 1),
    ],
    ids=["nothing", "one", "three", "plugin"],
)
def test_by_an_accelerator(
    given: dict[str, Any], expected: int | None, checkpoint: Path, launch: Launch, told: list[int | None]
) -> None:
    """A script that leaves accelerate's 1 may add up passes itself."""
    with launch():
        accelerator = Accelerator(cpu=True, **given)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").train()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert told == [expected]


@pytest.mark.parametrize("passes", [1, 2])
def test_by_a_trainer(
    passes: int, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, told: list[int | None]
) -> None:
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", gradient_accumulation_steps=passes, max_steps=1).train()
    assert told == [passes]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [("Language", {}, 1), ("Language", {"accumulate_grad_batches": 2}, 2), ("StepsByHand", {}, None)],
    ids=["one", "two", "by hand"],
)
def test_by_lightning(
    kind: str,
    options: dict[str, Any],
    expected: int | None,
    checkpoint: Path,
    rows: Rows,
    launch: Launch,
    tmp_path: Path,
    told: list[int | None],
) -> None:
    import lightning.pytorch  # noqa: F401

    with launch():
        lightning_trainer(tmp_path, max_steps=1, **options).fit(made(kind, checkpoint), loader(rows))
    assert told == [expected]
