"""With weights that all ranks share, one rank uses the model while the others are busy elsewhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import infinity
from tests.conftest import weights_of
from tests.models import llama
from tests.ranks.workers import run
from tests.runtime.over_ranks import digest

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")


def alone(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = infinity.offload(llama(2)[0], config)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(12).reshape(1, 12) % 32
    found: dict[str, Any] = {}
    for step in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        optim.zero_grad()
        done = Path(folder, f"{step} is done")
        if rank == 1:
            while not done.exists():
                time.sleep(0.05)
            continue
        with torch.no_grad():
            found["loss"] = model(input_ids=ids, labels=ids).loss.item()
        found["tokens"] = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
        infinity.save_pretrained(model, f"{folder}/{step}")
        found["weights"] = {name: digest(value) for name, value in weights_of(model).items()}
        with infinity.gathered(model, model.lm_head):
            found["head"] = digest(model.lm_head.weight)
        done.touch()
    infinity.save_pretrained(model, f"{folder}/all")
    assert Path(folder, "all", "model.safetensors").exists()
    infinity.close(model)
    return found


@pytest.mark.parametrize("overlap", ["off", "during_backward"])
def test_rank_0_evaluates_generates_and_saves_while_rank_1_waits_for_it(tmp_path: Path, overlap: str) -> None:
    config = {
        "weights": "host",
        "optimizer": "host",
        "memory": {"host": "256MiB", "device": "64MiB"},
        "overlap": overlap,
    }
    found, _ = run(2, alone, str(tmp_path), config | {"commit_every": 0})
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "1")
    ids = torch.arange(12).reshape(1, 12) % 32
    with torch.no_grad():
        assert saved(input_ids=ids, labels=ids).loss.item() == found["loss"]
    assert saved.generate(ids, max_new_tokens=4, do_sample=False).tolist() == found["tokens"]
    assert digest(saved.lm_head.weight) == found["head"]
    assert {name: digest(value) for name, value in saved.state_dict().items()} == found["weights"]


def evaluating_on_rank_1(folder: str) -> tuple[float | None, list[str]]:
    """Return the loss of an evaluation on rank 1 alone, and the names in the directory to which all ranks save."""
    torch.manual_seed(0)
    rank, found = dist.get_rank(), None
    memory = {"host": "256MiB", "device": "64MiB"}
    model = infinity.offload(llama(2)[0], {"weights": "host", "optimizer": "host", "memory": memory, "commit_every": 0})
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(12).reshape(1, 12) % 32
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        optim.zero_grad()
        if rank == 1:
            with torch.no_grad():
                found = model(input_ids=ids, labels=ids).loss.item()
    infinity.save_pretrained(model, f"{folder}/{rank}")
    infinity.close(model)
    return found, sorted(path.name for path in Path(folder).iterdir())


def test_rank_1_evaluates_alone_and_of_several_directories_that_of_rank_0_is_written(tmp_path: Path) -> None:
    (_, names), (loss, same) = run(2, evaluating_on_rank_1, str(tmp_path))
    assert names == same == ["0"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    ids = torch.arange(12).reshape(1, 12) % 32
    with torch.no_grad():
        assert saved(input_ids=ids, labels=ids).loss.item() == loss


def late(folder: str) -> bool:
    """Save on both ranks, long after rank 0 on rank 1. Return whether rank 0 has ended by then."""
    torch.manual_seed(0)
    memory = {"host": "256MiB", "device": "64MiB"}
    model = infinity.offload(llama(2)[0], {"weights": "host", "optimizer": "host", "memory": memory, "commit_every": 0})
    rank, parent = dist.get_rank(), Path(folder, "pid")
    if rank == 0:
        parent.write_text(str(os.getpid()))
    else:
        end = time.monotonic() + 30
        while not (parent.exists() and _has_ended(int(parent.read_text() or 0))) and time.monotonic() < end:
            time.sleep(0.05)
    ended = rank == 1 and _has_ended(int(parent.read_text()))
    infinity.save_pretrained(model, f"{folder}/saved")
    infinity.close(model)
    return ended


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_rank_learns_that_rank_0_has_saved_even_if_rank_0_has_ended(tmp_path: Path) -> None:
    """The process of rank 0 hosts the store of torch.distributed, through which the ranks tell each other this."""
    assert run(2, late, str(tmp_path)) == [False, True]
