"""Weights are gathered over all ranks once a step, then over those of a machine, or from this rank's own copy: the bits
are the same."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.errors import InfinityError
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.operations import AllGather
from infinity.sharded import rank_agreement
from tests.ranks.workers import run
from tests.runtime import over_ranks
from tests.runtime.over_ranks import DEPTH, TIERS, batch, digest, offloaded, train

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

MACHINES = {2: "ab", 3: "aab", 4: "abab"}


def _on_machines(machines: str) -> None:
    """Make this process take part as if it ran on its machine of `machines`."""
    real = rank_agreement.Ranks.of_world
    machine = machines[dist.get_rank()]
    rank_agreement.Ranks.of_world = functools.partial(real, machine=machine)  # type: ignore[method-assign]


def on_rank(folder: str, config: dict[str, Any], micro: int, ranks: int, machines: str, options: dict[str, Any]) -> Any:
    _on_machines(machines)
    return train(folder, config, micro, ranks, **options)


def _config(tiers: dict[str, Any], gather: str, machines: str, kind: str) -> dict[str, Any]:
    """Slots for two of the three blocks."""
    here = machines.count(machines[0])
    mib = (2 if kind == "float32" else 1) * here
    return tiers | {"ranks": {"gather": gather}, "memory": {"host": f"{64 * len(machines)}MiB", "device": f"{mib}MiB"}}


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("gather", ["auto", "none", "node", "world"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", ["off", "before_forward", "during_backward", "auto"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
@pytest.mark.parametrize("recomputed", [False, True])
def test_ranks_train_the_bits_of_one_process_wherever_their_weights_come_from(
    tmp_path: Path,
    tiers: dict[str, Any],
    ranks: int,
    gather: str,
    micro: int,
    dtype: str,
    overlap: str,
    max_grad_norm: float | None,
    recomputed: bool,
) -> None:
    machines = MACHINES[ranks]
    config = _config(tiers, gather, machines, dtype) | {"overlap": overlap}
    options = {"dtype": dtype, "max_grad_norm": max_grad_norm, "model": {"recomputed": recomputed}}
    losses, norms, weights = train(str(tmp_path / "one"), config, micro, ranks, **options)  # type: ignore[arg-type]
    found = run(ranks, on_rank, str(tmp_path / "all"), config, micro, ranks, machines, options)
    assert found == [(losses[rank::ranks], norms, weights) for rank in range(ranks)]


@pytest.mark.parametrize("gather", [pytest.param("none", marks=pytest.mark.long), "node"])
def test_frozen_and_unused_weights_and_evaluations_between_steps(tmp_path: Path, gather: str) -> None:
    config = _config(TIERS[3], gather, "aab", "float32")
    options = {"disturbed": True, "some": True, "model": {"frozen": True, "twice": True}}
    _, norms, weights = train(str(tmp_path / "one"), config, 1, 3, **options)  # type: ignore[arg-type]
    for found in run(3, on_rank, str(tmp_path / "all"), config, 1, 3, "aab", options):
        assert found[1:] == (norms, weights)


class Small(nn.Module):
    """Blocks of two slices, of which the third rank of a machine has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(300, 300) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def of_small_blocks(folder: str, gather: str, machines: str) -> dict[str, str]:
    if machines:
        _on_machines(machines)
    config = {"ranks": {"gather": gather}, "memory": {"host": "512MiB", "device": f"{max(len(machines) - 1, 1)}MiB"}}
    where = {**TIERS[3], "commit_every": 0, "nvme": {"paths": [folder]}}
    model = infinity.offload(Small(), where | config, device="cpu")
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.ones(2, 300)).backward()
        optim.step()
        optim.zero_grad()
    with infinity.gathered(model, model):
        weights = {name: digest(parameter) for name, parameter in model.named_parameters()}
    infinity.close(model)
    return weights


@pytest.mark.parametrize("gather", [*(pytest.param(each, marks=pytest.mark.long) for each in ("auto", "none")), "node"])
def test_a_rank_that_has_no_slice_of_anything_gathers_as_the_others_do(tmp_path: Path, gather: str) -> None:
    expected = of_small_blocks(str(tmp_path / "one"), gather, "")
    assert run(4, of_small_blocks, str(tmp_path / "all"), gather, "aaab") == [expected] * 4


def counted(folder: str, config: dict[str, Any], machines: str) -> tuple[list[Counter[tuple[str, bool]]], int, int]:
    """By step, how often each unit was gathered, over W and over G; bytes of the copies as planned; ranks of G."""
    _on_machines(machines)
    counts, submit = [], CollectiveQueue.submit

    def counting(self: CollectiveQueue, operation: Any) -> Any:
        if isinstance(operation.collective, AllGather) and counts:
            counts[-1][operation.name, operation.collective.near] += 1
        return submit(self, operation)

    CollectiveQueue.submit = counting  # type: ignore[method-assign]
    model = offloaded(folder, config)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        counts.append(Counter())
        for turn in range(2):
            model(batch(step, 2 * turn + dist.get_rank(), torch.float32)).backward()
        optim.step()
        optim.zero_grad()
    plan = registry.coordinator_of(model).plan
    infinity.close(model)
    return counts, plan.layout.arena.secondary, 0 if plan.peers.near is None else plan.peers.near.count


@pytest.mark.parametrize(
    ("gather", "machines", "near"),
    [("none", "aa", 1), pytest.param("node", "aabb", 2, marks=pytest.mark.long), ("auto", "abab", 2)],
)
def test_weights_come_from_all_ranks_once_a_step(tmp_path: Path, gather: str, machines: str, near: int) -> None:
    config = _config(TIERS[3], gather, machines, "float32")
    for counts, copies, count in run(len(machines), counted, str(tmp_path), config, machines):
        assert count == near
        assert copies > 0
        for each in counts[1:-1]:  # what is fetched ahead of the next step counts for the step before
            for block in range(DEPTH):
                assert each[f"unit 'blocks.{block}'", False] == 1
            assert sum(n for (_, again), n in each.items() if again) >= DEPTH


def kept(folder: str, config: dict[str, Any], machines: str) -> tuple[int, int, int, int]:
    """Elements and bytes that this rank keeps, bytes of its copies, and elements of the blocks."""
    _on_machines(machines)
    model = offloaded(folder, config, torch.bfloat16)
    plan = registry.coordinator_of(model).plan
    infinity.close(model)
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    return plan.layout.numel, plan.layout.swap.nbytes, plan.layout.arena.secondary, blocks


@pytest.mark.parametrize(
    ("gather", "machines", "near"),
    [
        ("none", "aa", 1),
        pytest.param("none", "aaaa", 1, marks=pytest.mark.long),
        ("node", "aabb", 2),
        pytest.param("world", "aaaa", 4, marks=pytest.mark.long),
        ("world", "aa", 2),
    ],
)
def test_states_are_cut_over_all_ranks_and_copies_over_those_of_g(
    tmp_path: Path, gather: str, machines: str, near: int
) -> None:
    config = _config(TIERS[3], gather, machines, "bfloat16") | {"overlap": "off"}
    found = run(len(machines), kept, str(tmp_path), config, machines)
    numel, padding = sum(each[0] for each in found), 1.01  # to whole blocks of 256 elements, and to pages
    assert 12 * numel <= sum(each[1] for each in found) <= 12 * numel * padding
    whole = 2 * found[0][3]
    for index, (_, _, copies, _) in enumerate(found):
        if gather == "world":
            assert copies == 0
        elif near == 1:
            assert whole <= copies <= whole * padding
        elif index % 2 == 0:  # both ranks of a machine have all of it together
            assert whole <= copies + found[index + 1][2] <= whole * padding


@pytest.mark.parametrize(
    ("gather", "machines"), [("auto", "aa"), pytest.param("node", "aa", marks=pytest.mark.long), ("world", "ab")]
)
def test_without_ranks_nearer_than_others_there_are_no_copies(tmp_path: Path, gather: str, machines: str) -> None:
    config = _config(TIERS[3], gather, machines, "float32")
    for counts, copies, count in run(len(machines), counted, str(tmp_path), config, machines):
        assert (copies, count) == (0, 0)
        assert not any(again for each in counts for _, again in each)


def refused(folder: str, config: dict[str, Any], machines: str) -> tuple[str, int]:
    _on_machines(machines)
    over_ranks.DEPTH = 8
    try:
        model = offloaded(folder, config)
    except InfinityError as error:
        return str(error), 0
    plan = registry.coordinator_of(model).plan
    infinity.close(model)
    return "", plan.layout.arena.secondary


def test_copies_that_have_no_room_are_left_out_or_named(tmp_path: Path) -> None:
    config = _config(TIERS[3], "auto", "ab", "float32")
    config |= {"update": {"tile": "64KiB", "threads": 1}, "gradients": "nvme"}
    config["memory"]["host"] = "6500KiB"
    auto, asked = (
        run(2, refused, str(tmp_path), config | {"ranks": {"gather": gather}}, "ab") for gather in ("auto", "node")
    )
    assert auto == [("", 0)] * 2
    for text, _ in asked:
        assert "for copies of weights (ranks.gather)" in text
        assert "set ranks: {gather: world}" in text
