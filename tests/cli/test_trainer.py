"""What the trainer of `infinity finetune` uses of TRL's that no documentation promises is there."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from trl import SFTTrainer

from infinity.cli.trainer import Trainer
from infinity.errors import PeerError

USED = {
    "_maybe_log_save_evaluate": ["self", "tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval"],
    "_save_rng_state": ["self", "output_dir"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
}


@pytest.mark.parametrize("name", USED)
def test_a_method_that_is_called_or_replaced_takes_what_it_is_given(name: str) -> None:
    assert list(inspect.signature(getattr(SFTTrainer, name)).parameters)[: len(USED[name])] == USED[name]


@pytest.mark.parametrize("name", ["get_train_dataloader", "training_step", "compute_loss", "evaluate", "save_model"])
def test_a_method_that_is_replaced_is_one_of_the_librarys(name: str) -> None:
    assert getattr(SFTTrainer, name) is not getattr(Trainer, name)


class Alone(Trainer):
    """The other ranks are gone."""

    def __init__(self) -> None: ...

    def _save_rng_state(self, output_dir: str) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


def test_a_rank_that_is_gone_before_the_first_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="Connection closed by peer"):
        Alone().go_on(tmp_path, evaluate=True, save=False)
