"""Under `infinity run` a script of several ranks needs no DistributedDataParallel, and may still name it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList, Trainer, TrainingArguments

from infinity.config import load_config
from infinity.coordinator import registry
from infinity.errors import ConfigError, NotAvailableError, PeerError
from infinity.integrations.distributed_data_parallel import ranks_of
from infinity.integrations.launcher import installed, launch
from infinity.integrations.resume_hint import by_trainer
from infinity.sharded.rank_stores import counts_in
from tests.integrations.conftest import Launch
from tests.integrations.training import SAVING, trainer
from tests.ranks.workers import ended, run

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

RANKS = 2
IDS = torch.arange(24).reshape(4, 6)


def config(root: str) -> Any:
    return load_config(
        {
            "weights": "nvme",
            "optimizer": "nvme",
            "memory": {"device": "2MiB", "host": "128MiB"},
            "nvme": {"paths": [f"{root}/swap"]},
            "commit_every": 1,
        }
    )


def by_hand(checkpoint: str, root: str) -> tuple[list[float], int, list[int]]:
    """Train in a loop of a script that uses DistributedDataParallel."""
    rank = dist.get_rank()
    with installed(config(root)):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        assert wrapped is model
        assert wrapped.module is model
        optim = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        losses = training(wrapped, optim, IDS[rank::RANKS])
        ranks = ranks_of(model)
        wrapped.module.save_pretrained(f"{root}/saved", is_main_process=rank == 0)
        assert "module.lm_head.weight" not in wrapped.module.state_dict()
        other = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert isinstance(other, DistributedDataParallel)
    dist.barrier()
    return losses, ranks, counts_in(Path(root, "swap"))


def training(model: Any, optim: torch.optim.Optimizer, ids: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_loop_with_ddp_trains_as_one_process_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), IDS)
    told = run(RANKS, by_hand, str(checkpoint), str(tmp_path))
    assert [sum(each) / RANKS for each in zip(*(losses for losses, _, _ in told), strict=True)] == pytest.approx(
        expected, rel=1e-5
    )
    assert [rest for _, *rest in told] == [[RANKS, []]] * RANKS
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for mine, theirs in zip(saved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def shuffled(checkpoint: str, root: str, folder: str | None) -> list[list[int]]:
    """Return the rows of each step of an Accelerate loop that saves after the second step, or continues from there."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    torch.manual_seed(3)
    with installed(config(root), None if folder is None else Path(folder)):
        accelerator = Accelerator(cpu=True)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows: Any = [{"input_ids": torch.full((6,), index)} for index in range(24)]
        loader = DataLoader(rows, batch_size=2, shuffle=True)
        model, optim, loader = accelerator.prepare(model, optim, loader)
        if folder is not None:
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader, 2)
        taken = []
        for step, batch in enumerate(loader):
            taken.append(batch["input_ids"][:, 0].tolist())
            accelerator.backward(model(**batch, labels=batch["input_ids"]).loss)
            optim.step()
            optim.zero_grad()
            if folder is None and step == 1:
                accelerator.save_state(f"{root}/state")
        return taken


def test_an_accelerate_loop_that_goes_on_has_the_rows_of_one_that_never_stopped(
    checkpoint: Path, tmp_path: Path
) -> None:
    every = run(RANKS, shuffled, str(checkpoint), str(tmp_path), None)
    rest = run(RANKS, shuffled, str(checkpoint), str(tmp_path), str(tmp_path / "state"))
    assert rest == [taken[2:] for taken in every]


class _Until(StoppingCriteria):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.tokens)


def generated(model: Any, rank: int) -> list[list[int]]:
    """Generate from different prompts, on each rank until it has another number of tokens."""
    stopping = StoppingCriteriaList([_Until(8 + 6 * rank)])
    options = {"do_sample": False, "max_new_tokens": 20, "stopping_criteria": stopping, "pad_token_id": 0}
    return model.generate(IDS[rank : rank + 1], **options).tolist()


def generating(checkpoint: str, root: str) -> list[list[int]]:
    with installed(config(root)):
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        first = generated(model, dist.get_rank())
        assert registry.is_offloaded(model)
        assert generated(model, dist.get_rank()) == first
        return first


def test_ranks_generate_sequences_of_other_lengths(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    expected = [generated(model, rank) for rank in range(RANKS)]
    assert len({len(each[0]) for each in expected}) == RANKS
    assert run(RANKS, generating, str(checkpoint), str(tmp_path)) == expected


def failing(checkpoint: str, root: str) -> None:
    with installed(config(root)):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        training(model, optim, IDS[:2])
        if dist.get_rank() == 1:
            raise KeyError("of the script")
        training(model, optim, IDS[:2])


def test_an_error_of_the_script_on_one_rank_ends_the_others(checkpoint: Path, tmp_path: Path) -> None:
    first, second = ended(RANKS, failing, str(checkpoint), str(tmp_path))
    assert isinstance(first.error, PeerError)
    assert "rank 1" in str(first.error)
    assert "KeyError" in str(first.error)
    assert isinstance(second.error, KeyError)


COLLECTIVE = """
import sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.arange(12).reshape(2, 6)
model(input_ids=ids, labels=ids).loss.backward()
if dist.get_rank() == 0:
    raise KeyError("of a callback")
dist.all_reduce(torch.ones(1))
"""


def launched(script: str, checkpoint: str, root: str) -> None:
    launch(config(root), Path(script), [checkpoint], None, by_trainer)


def test_a_collective_of_the_script_fails_with_the_error_of_the_other_rank(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COLLECTIVE)
    first, second = ended(RANKS, launched, str(script), str(checkpoint), str(tmp_path))
    assert isinstance(first.error, KeyError)
    assert isinstance(second.error, PeerError)
    assert second.error.cause == "rank 0 failed: KeyError: 'of a callback'"


def test_ranks_that_have_not_met_are_told(checkpoint: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with launch():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with pytest.raises(ConfigError, match="2 processes run this script, but torch.distributed is not initialized"):
            torch.optim.AdamW(model.parameters())


def with_the_best_weights(checkpoint: str, root: str) -> tuple[float, float]:
    """Train with a Trainer for which a higher loss is better. Return the best loss of the held-out rows, and that of
    the final model."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(4, 1)]
    with installed(config(root)):
        made = trainer(Path(checkpoint), rows, Path(root, "out"), **SAVING, **options, load_best_model_at_end=True)
        made.train()
        best = made.state.best_metric
        assert made.state.best_global_step == 2
        last = made.evaluate()["eval_loss"]
        made.save_model()
    return best, last


def test_a_trainer_of_several_ranks_ends_with_the_best_weights(checkpoint: Path, tmp_path: Path) -> None:
    for best, last in run(RANKS, with_the_best_weights, str(checkpoint), str(tmp_path)):
        assert last == pytest.approx(best, rel=1e-6)


def test_what_takes_one_process_is_refused_at_the_beginning(
    checkpoint: Path, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity.integrations.lightning import InfinityStrategy

    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_, **__: None)
    with launch(), pytest.raises(NotAvailableError, match="push_to_hub"):
        trainer(checkpoint, [{"input_ids": IDS[0], "labels": IDS[0]}] * 8, tmp_path, push_to_hub=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotAvailableError, match="Lightning"):
        InfinityStrategy({"nvme": {"paths": [str(tmp_path)]}})
