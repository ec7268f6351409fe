"""What the trainer of `infinity finetune` uses of TRL's that no documentation promises is there."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers.trainer_callback import TrainerState
from trl import SFTTrainer

from infinity.cli.trainers import Sft
from infinity.errors import PeerError
from tests.cli.test_finetune import job as job
from tests.cli.test_finetune import run

USED = {
    "_maybe_log_save_evaluate": ["self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval"],
    "_save_rng_state": ["self", "output_dir"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_get_grad_norm": ["self", "model"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "prediction_step": ["self", "model", "inputs"],
}


@pytest.mark.parametrize("name", USED)
def test_a_method_that_is_called_or_replaced_takes_what_it_is_given(name: str) -> None:
    assert list(inspect.signature(getattr(SFTTrainer, name)).parameters)[: len(USED[name])] == USED[name]


REPLACED = ["get_train_dataloader", "training_step", "evaluate", "save_model", "loss_is_scaled_for_ga", *list(USED)[2:]]


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_the_librarys(name: str) -> None:
    assert getattr(SFTTrainer, name) is not getattr(Sft, name)


def test_no_batch_lets_the_host_wait_and_gradients_are_read_by_their_update_only(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, item = Sft.compute_loss, torch.Tensor.item
    waited: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> Any:
        waited.append(tensor)
        return item(tensor)

    def computed(*given: Any, **named: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", noted)
            return compute(*given, **named)

    monkeypatch.setattr(Sft, "compute_loss", computed)
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *_: pytest.fail("transformers computes a norm"))
    assert run(job | {"--steps": 1, "--gradient-accumulation": 2}) == 0
    assert waited == []


class Alone(Sft):
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
    state = Sft.state_dict(ended)
    assert json.loads(state["state"]) == kept
    Sft.load_state_dict(longer, state)
    assert longer.state == TrainerState(**kept, max_steps=9, logging_steps=2, save_steps=3)
