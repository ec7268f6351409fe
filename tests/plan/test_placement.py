"""States rest in RAM as far as they fit, chosen unit by unit and counted to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.plan.placement import TierSplit
from infinity.plan.plan import Plan
from infinity.plan.plan_input import as_far_as
from infinity.plan.planner import make_plan
from infinity.sizes import PAGE_BYTES
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments

WIDTHS = (1024, 256, 1024, 512)
"""Units of different sizes, in the order of the forward."""
NUMELS = [1024 * width for width in WIDTHS]
NUMEL = sum(NUMELS)


def plan(host: int, device: str = "cpu", **config: Any) -> Plan:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(1024, width, bias=False) for width in WIDTHS).bfloat16()
    given: dict[str, Any] = {
        "nvme": {"paths": ["/tmp/never-made"]},
        "commit_every": 0,
        "overlap": "off",  # nothing is reserved for it
        "memory": {"device": "16MiB", "host": host},
        "update": {"tile": "1MiB"},  # so large that staging is three tiles for every budget here
    }
    loaded = load_config(given | config)
    return make_plan(
        discover(blocks, loaded.moments).units, OffloadArguments(loaded, torch.device(device)), can_recompute=False
    )


def cost(nbytes: int, *, committed: bool = False) -> int:
    """Return the RAM that moving states of this size to RAM takes: without generations, less the checksums that they
    needed."""
    return nbytes if committed else nbytes - nbytes // 1024


LEAST = plan(1 << 26, weights="nvme", optimizer="nvme").host_bytes
STATES = [10 * numel for numel in NUMELS]


def test_the_first_units_come_first_and_what_does_not_fit_is_passed_over() -> None:
    assert as_far_as([(0, 5), (1, 9), (2, 4), (3, 1)], room=10) == {0, 2, 3}
    assert as_far_as([(0, 5)], room=4) == frozenset()


@pytest.mark.parametrize("every", [0, 1])
def test_one_page_too_few_is_one_unit_fewer(every: int) -> None:
    options = {"weights": "nvme", "commit_every": every}
    room = plan(1 << 26, optimizer="nvme", **options).host_bytes
    first, third = (cost(STATES[index], committed=every > 0) for index in (0, 2))
    # Smaller ones fill what the first leaves.
    assert plan(room + first - 1, **options).placement.optimizer.in_ram == {1, 3}
    assert plan(room + first, **options).placement.optimizer.in_ram == {0}
    two = room + first + cost(STATES[1], committed=every > 0)
    assert plan(two, **options).placement.optimizer.in_ram == {0, 1}
    assert plan(two - 1, **options).placement.optimizer.in_ram == {0}
    assert plan(two + third, **options).placement.optimizer.in_ram == {0, 1, 2}
    everything = room + cost(10 * NUMEL, committed=every > 0)
    assert plan(everything, **options).placement.optimizer.tier == "host"
    assert plan(everything - 1, **options).placement.optimizer.tier == "nvme"
    assert plan(everything - 1, **options).placement.optimizer.in_ram == {0, 1, 2}


def test_weights_come_before_states_and_gradients_before_both() -> None:
    made = plan(LEAST + cost(2 * NUMEL) - PAGE_BYTES).placement
    assert made.form.gradient_fp32
    assert (made.weights, made.optimizer.in_ram) == (TierSplit("nvme", frozenset({0, 1, 2})), frozenset())
    made = plan(LEAST + cost(2 * NUMEL) + cost(STATES[1])).placement
    assert (made.weights.tier, made.optimizer) == ("host", TierSplit("nvme", frozenset({1})))
    assert made.form.gradient_fp32
    tight = plan(LEAST - PAGE_BYTES)
    assert not tight.placement.form.gradient_fp32
    assert tight.layout.arena.gradients == 2 * NUMEL
    assert tight.layout.arena.weights  # the room that fp32 gradients left


@pytest.mark.parametrize("every", [0, 1, 4])
@pytest.mark.parametrize("extra", [0, 3 << 20, 7 << 20, 12 << 20, 20 << 20, 1 << 26])
def test_bytes_follow_what_is_in_ram(extra: int, every: int) -> None:
    made = plan(LEAST + extra, commit_every=every)
    weights = sum(2 * NUMELS[index] for index in made.placement.weights.in_ram)
    states = sum(STATES[index] for index in made.placement.optimizer.in_ram)
    assert (made.layout.arena.weights, made.layout.arena.states) == (weights, states)
    assert made.forecast.read_bytes == 3 * (2 * NUMEL - weights) + 10 * NUMEL - states
    committed = (weights + states) // every if every else 0
    assert made.forecast.written_bytes == 2 * NUMEL - weights + 10 * NUMEL - states + committed
    assert made.layout.swap.nbytes == (24 * NUMEL if every else 12 * NUMEL - weights - states)
    assert made.host_bytes <= made.budgets.limits.host
    slots = made.budgets.slot_bytes if made.placement.weights.tier == "nvme" else 0
    staging = made.budgets.staging.nbytes
    assert made.layout.arena.nbytes == weights + states + made.layout.arena.gradients + staging + slots


def test_int8_moments_let_more_units_fit() -> None:
    def with_room(moments: str) -> Plan:
        room = plan(1 << 26, weights="nvme", optimizer="nvme", moments=moments).host_bytes
        return plan(room + (12 << 20), weights="nvme", moments=moments)

    exact, small = with_room("fp32"), with_room("int8")
    assert exact.placement.optimizer.in_ram < small.placement.optimizer.in_ram


def test_what_is_asked_for_is_not_cached_in_part() -> None:
    made = plan(1 << 30, weights="nvme", optimizer="nvme")
    assert (made.placement.weights.in_ram, made.placement.optimizer.in_ram) == (frozenset(), frozenset())
    assert made.forecast.step_bytes == 28 * NUMEL
    made = plan(1 << 30, weights="host", optimizer="host")
    assert (len(made.placement.weights.in_ram), len(made.placement.optimizer.in_ram)) == (4, 4)


def test_on_a_gpu_the_landing_of_uploads_is_left_free() -> None:
    for extra in (3 << 20, 9 << 20, 1 << 26):
        made = plan(LEAST + extra, "cuda")
        on_nvme = [2 * numel for index, numel in enumerate(NUMELS) if index not in made.placement.weights.in_ram]
        assert made.budgets.upload_bytes == 2 * max(on_nvme, default=0)
        assert made.host_bytes <= made.budgets.limits.host


def test_the_share_is_described() -> None:
    text = plan(LEAST + cost(2 * NUMEL) + cost(STATES[1])).describe()
    assert "2.50 MiB of it in RAM (1 of 4 units)" in text
    assert "of it in RAM" not in plan(1 << 30, weights="nvme", optimizer="nvme").describe()
    assert "of it in RAM" not in plan(1 << 30).describe()
