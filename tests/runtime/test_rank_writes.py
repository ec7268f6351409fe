"""Weights that several ranks change by hand, each with its slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.errors import ModelError, NotAvailableError
from tests.ranks.workers import run
from tests.runtime.over_ranks import TIERS, Blocks, batch, digest, offloaded

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

STEPS, WRITES = 4, (1, 2)
NVME = TIERS[3] | {"commit_every": 1}


def weights_of(model: Any) -> dict[str, str]:
    with infinity.gathered(model, model):
        return {name: digest(parameter) for name, parameter in model.named_parameters()}


def step(model: Any, optim: Any, at: int, dtype: torch.dtype) -> None:
    """With two batches, of each rank one or of one process both."""
    several = dist.is_initialized()
    for index in (dist.get_rank(),) if several else range(2):
        model(batch(at, index, dtype)).backward()
    if not several:
        optim.grad_scale = torch.tensor(2.0)
    optim.step()
    vars(optim).pop("grad_scale", None)
    optim.zero_grad()


def write(model: Any, at: int) -> None:
    with infinity.gathered(model, model.blocks[1], model.head, write=True):
        model.blocks[1].up.weight.data[at::3] *= 0.5
        model.head.bias.data.fill_(0.25 * at)


def written(folder: str, config: dict[str, Any], dtype: str, when: str) -> dict[str, str]:
    """Weights after steps between which some are changed, before the step's update or after it."""
    kind = getattr(torch, dtype)
    model = offloaded(folder, config, kind)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for at in range(STEPS):
        if at in WRITES and when == "between":
            write(model, at)
        step(model, optim, at, kind)
        if at in WRITES and when == "after":
            write(model, at)
    model.load_state_dict({name: value * 0.5 for name, value in infinity.state_dict(model)})
    step(model, optim, STEPS, kind)
    weights = weights_of(model)
    infinity.close(model)
    return weights


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gather", ["world", "none"])
@pytest.mark.parametrize("options", [{"commit_every": 1, "overlap": "during_backward"}, {"overlap": "off"}])
@pytest.mark.parametrize("when", ["between", "after"])
def test_what_ranks_write_trains_on_as_in_one_process(
    tmp_path: Path, tiers: dict[str, Any], dtype: str, gather: str, options: dict[str, Any], when: str
) -> None:
    config = tiers | options
    if config["weights"] == config["optimizer"] == "host":
        config["commit_every"] = 0
    expected = written(str(tmp_path / "one"), config, dtype, when)
    config = config | {"ranks": {"gather": gather}}
    assert run(2, written, str(tmp_path / "all"), config, dtype, when) == [expected] * 2


def differing(folder: str, how: str) -> tuple[str, bool]:
    model = offloaded(folder, NVME)
    before = weights_of(model)
    try:
        with infinity.gathered(model, model.blocks[1], write=True):
            if how == "values":
                model.blocks[1].up.weight.data.add_(dist.get_rank())
            elif dist.get_rank():
                model.blocks[1].up.weight.data = torch.zeros(2, 2)
    except ModelError as error:
        told = str(error)
    same = weights_of(model) == before
    write(model, 1)  # in the same way on all ranks
    assert weights_of(model) != before
    infinity.close(model)
    return told, same


@pytest.mark.parametrize(
    ("how", "says"),
    [("values", "'blocks.1.up.weight' has other values on rank 1"), ("shape", "'blocks.1.up.weight' has shape (2, 2)")],
)
def test_ranks_that_write_different_things_write_nothing_and_the_same_things_all(
    tmp_path: Path, how: str, says: str
) -> None:
    for told, same in run(2, differing, str(tmp_path), how):
        assert says in told
        assert same


def committed(folder: str) -> tuple[dict[str, str], dict[str, str], int]:
    """Weights of a generation, those that were written after it, and after which step a resumed run begins."""
    model = offloaded(folder, NVME)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    step(model, optim, 0, torch.float32)
    infinity.commit(model)
    before = weights_of(model)
    write(model, 1)
    after = weights_of(model)
    with pytest.raises(NotAvailableError, match="cannot make it again"):
        infinity.commit(model)
    infinity.close(model)
    model = infinity.resume(Blocks(torch.float32), NVME | {"nvme": {"paths": [folder]}}, device="cpu")
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    began = infinity.track(model=model)
    assert weights_of(model) == before
    write(model, 1)
    step(model, optim, 1, torch.float32)
    infinity.commit(model)
    after_step = weights_of(model)
    infinity.close(model)
    model = infinity.resume(Blocks(torch.float32), NVME | {"nvme": {"paths": [folder]}}, device="cpu")
    assert weights_of(model) == after_step
    infinity.close(model)
    return before, after, began


def test_a_generation_that_ranks_made_stays_as_it_was_when_they_write(tmp_path: Path) -> None:
    (before, after, began), other = run(2, committed, str(tmp_path))
    assert (before, after, began) == other
    assert before != after
    assert began == 1
