"""The trainers of `infinity finetune`; and the table of what they use of TRL's that no documentation promises: it is
there, takes what it is given, is named where it is gone, and nothing else is used."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers.trainer_callback import TrainerState
from trl import SFTTrainer

import infinity
from infinity.cli.trainer import require_points
from infinity.cli.trainers import FinetuneSFTTrainer
from infinity.errors import PeerError
from infinity.integrations.patch_table import ATTRIBUTES, FINETUNE, POINTS
from tests.cli.test_finetune import job as job
from tests.cli.test_finetune import run

SOURCES = Path(infinity.__file__).parent / "cli"
OF_TRAINERS = [
    SOURCES / f"{name}.py"
    for name in ("evaluation_callback", "step_watch", "trackers", "trainer", "trainers", "training")
]
TABLE = {where.rpartition(".")[2]: point for point in POINTS if point.who == FINETUNE for where in point.where}
OWN_ATTRIBUTES = [attribute for attribute, row in ATTRIBUTES.items() if FINETUNE in row.who]


@pytest.mark.parametrize("name", TABLE)
def test_a_point_is_there_and_takes_what_it_is_given(name: str) -> None:
    taken = TABLE[name].takes
    parameters = [each for each in inspect.signature(getattr(SFTTrainer, name)).parameters if each != "self"]
    assert tuple(parameters[: len(taken)]) == taken
    require_points()


@pytest.mark.parametrize("name", TABLE)
def test_a_point_that_is_gone_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = TABLE[name].where[0]
    module, kind, _ = place.rsplit(".", 2)
    monkeypatch.delattr(getattr(importlib.import_module(module), kind), name)
    with pytest.raises(infinity.NotAvailableError, match=rf"^{re.escape(place)} does not exist.*=="):
        require_points()


@pytest.mark.parametrize(("owner", "name"), OWN_ATTRIBUTES)
def test_an_attribute_is_one_of_theirs(owner: str, name: str) -> None:
    module, _, made = owner.rpartition(".")
    assert f"self.{name} = " in inspect.getsource(getattr(importlib.import_module(module), made))


def private_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Those that a module uses of any object, and those that it defines."""
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            sets = isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
            (own if sets else used).add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            own.add(node.name)
    return ({each for each in names if each.startswith("_") and not each.startswith("__")} for names in (used, own))


def test_nothing_else_is_used() -> None:
    listed = {*TABLE, *(name for _, name in OWN_ATTRIBUTES)}
    theirs: dict[str, Any] = {}
    for path in OF_TRAINERS:
        used, own = private_names(ast.parse(path.read_text()))
        theirs |= dict.fromkeys((used - own) | {name for name in own if hasattr(SFTTrainer, name)}, path.name)
    assert {name: file for name, file in theirs.items() if name not in listed} == {}
    assert listed <= theirs.keys()


REPLACED = [
    *("get_train_dataloader", "training_step", "evaluate", "save_model", "loss_is_scaled_for_ga", "get_batch_samples"),
    *("compute_loss", "prediction_step", "_save_checkpoint", "_load_from_checkpoint", "_get_grad_norm"),
]


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_the_librarys(name: str) -> None:
    assert getattr(SFTTrainer, name) is not getattr(FinetuneSFTTrainer, name)


def test_no_batch_lets_the_host_wait_and_gradients_are_read_by_their_update_only(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, item = FinetuneSFTTrainer.compute_loss, torch.Tensor.item
    waited: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> Any:
        waited.append(tensor)
        return item(tensor)

    def computed(*given: Any, **named: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", noted)
            return compute(*given, **named)

    monkeypatch.setattr(FinetuneSFTTrainer, "compute_loss", computed)
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *_: pytest.fail("transformers computes a norm"))
    assert run(job | {"--steps": 1, "--gradient-accumulation": 2}) == 0
    assert waited == []


class Alone(FinetuneSFTTrainer):
    """The other ranks are gone."""

    def __init__(self) -> None: ...

    def _save_rng_state(self, output_dir: str) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


def test_a_rank_that_is_gone_before_the_first_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="Connection closed by peer"):
        Alone().go_on(tmp_path, evaluate=True, save=False)


def test_a_generation_keeps_of_a_trainers_state_what_a_run_goes_on_with() -> None:
    args = SimpleNamespace(max_steps=9, logging_steps=2, eval_steps=None, save_steps=3)
    kept = {"epoch": 0.5, "global_step": 4, "train_batch_size": 2, "num_input_tokens_seen": 7, "total_flos": 8.0}
    kept |= {"best_metric": 1.5, "best_global_step": 3}
    of_this_process = {"is_world_process_zero": False, "log_history": [{"step": 1}], "max_steps": 5, "save_steps": 1}
    ended: Any = SimpleNamespace(args=args, state=TrainerState(**kept, **of_this_process))
    longer: Any = SimpleNamespace(args=args, state=TrainerState())
    state = FinetuneSFTTrainer.state_dict(ended)
    assert json.loads(state["state"]) == kept
    FinetuneSFTTrainer.load_state_dict(longer, state)
    assert longer.state == TrainerState(**kept, max_steps=9, logging_steps=2, save_steps=3)
