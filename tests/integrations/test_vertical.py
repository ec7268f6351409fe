"""`vertical: true`: the micro-batches of a Trainer's step go through one unit after the other."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import infinity
from infinity.coordinator import registry
from infinity.integrations.transformers import Trainer as OffloadedTrainer
from infinity.runtime import micro_batches
from tests import sampling
from tests.integrations.conftest import Launch
from tests.integrations.test_architectures import LANGUAGE
from tests.integrations.test_chunked_loss import made
from tests.integrations.training import Rows, log_of, trainer

WAYS: dict[str, dict[str, Any]] = {
    "clipping": {"max_grad_norm": 0.5, "lr_scheduler_type": "cosine"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "a last step of fewer": {"per_device_train_batch_size": 5, "max_steps": -1, "num_train_epochs": 2},
}


def is_vertical(model: Any) -> bool:
    return micro_batches._known[model].chain is not None


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_norms_are_those_of_the_plain_script(
    way: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    logs = []
    for context in (nullcontext(), launch(vertical=True)):
        with context as run:
            one = trainer(
                checkpoint, rows, tmp_path / "out", gradient_accumulation_steps=4, **({"max_steps": 3} | WAYS[way])
            )
            one.train()
            logs.append(log_of(one))
            if run is not None:
                assert is_vertical(one.model)
                assert registry.coordinator_of(one.model).plan.forecast.passes == 1
    assert len(logs[0]) >= 4
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-6, atol=1e-6)


def test_the_weights_are_read_once_for_all(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    read = []
    for number, vertical in enumerate((False, True)):
        paths = {"paths": [str(tmp_path / f"swap{number}")]}
        with launch(vertical=vertical, overlap="off", commit_every=0, nvme=paths):
            one = trainer(checkpoint, rows, tmp_path / "out", gradient_accumulation_steps=8, max_steps=3)
            one.train()
            read.append(infinity.statistics(one.model).weight_bytes_read)
    assert read[1] < read[0] / 3


def test_a_trainer_of_infinity_has_it_from_its_config(
    checkpoint: Path, rows: Rows, swap_config: Any, tmp_path: Path
) -> None:
    plain = trainer(checkpoint, rows, tmp_path / "out", gradient_accumulation_steps=2)
    config = swap_config(vertical=True)
    ours = OffloadedTrainer(model=plain.model, args=plain.args, train_dataset=rows, swap_config=config)
    ours.train()
    assert is_vertical(ours.model)
    infinity.close(ours.model)


def test_a_step_with_two_backward_passes_is_an_error_that_says_what_to_set(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    class Twice(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, *others, **options)
            loss.backward(retain_graph=True)
            return loss

    with launch(vertical=True):
        one = trainer(checkpoint, rows, tmp_path / "out", gradient_accumulation_steps=2)
        twice = Twice(model=one.model, args=one.args, train_dataset=rows)
        with pytest.raises(infinity.ModelError, match="2 backward passes for a micro-batch.*Set vertical: false"):
            twice.train()


def test_a_trainer_that_prepares_inputs_step_by_step_keeps_the_ordinary_order(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Buffered(Trainer):
        _step = 0
        seen: list[int] = []  # noqa: RUF012

        def _prepare_inputs(self, inputs: Any) -> Any:
            self.seen.append(self._step)
            return super()._prepare_inputs(inputs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self._step += 1
            return loss

    with launch(vertical=True):
        one = trainer(checkpoint, rows, tmp_path / "out", gradient_accumulation_steps=2, max_steps=2)
        buffered = Buffered(model=one.model, args=one.args, train_dataset=rows)
        buffered.train()
    assert buffered.seen == [0, 1, 2, 3]
    assert "vertical: true does nothing for Buffered" in caplog.text


def test_micro_batches_of_a_step_that_was_interrupted_are_forgotten(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    class Interrupted(Trainer):
        calls = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    logs = []
    for interrupted in (False, True):
        paths = {"paths": [str(tmp_path / f"swap{interrupted}")]}
        with launch(vertical=True, nvme=paths):
            one = trainer(checkpoint, rows, tmp_path / "out", gradient_accumulation_steps=4, max_steps=2)
            kind = Interrupted if interrupted else Trainer
            other = kind(model=one.model, args=one.args, train_dataset=rows)
            if interrupted:
                with pytest.raises(KeyboardInterrupt):
                    other.train()
            other.train()
            logs.append(log_of(other))
    assert logs[0] == logs[1]


FEW = ["Qwen3Moe", "Gemma2", "GPTNeoX", "Falcon"]


@pytest.mark.parametrize("name", FEW + sampling.some([name for name in LANGUAGE if name not in FEW]))
def test_the_layers_of_every_causal_model_form_a_chain(name: str, offload: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 96, (2, 24 - index), generator=generator) for index in range(3)]
    losses = []
    for vertical in (False, True):
        model = offload(made(name), nvme={"paths": [str(tmp_path / f"swap{vertical}")]})
        optim = infinity.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            found = infinity.backward(model, partial(loss_of, model), batches, vertical=vertical)
            optim.step()
            optim.zero_grad()
        losses.append(torch.stack(found))
        assert is_vertical(model) == vertical
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss / 3
