"""With vertical micro-batches the ring has room for all gradients that add up in it at the same time."""

from __future__ import annotations

import pytest
import torch

from infinity.config import load_config
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.unit import Unit
from tests.models import llama


def plan(*, tied: bool, vertical: bool, device: str = "64MiB") -> tuple[Plan, list[Unit]]:
    with torch.device("meta"):
        model = llama(tie_word_embeddings=tied)[0].bfloat16()
    found = discover(model)
    memory = {"device": device, "host": "1GiB"}
    config = load_config({"weights": "host", "optimizer": "host", "vertical": vertical, "memory": memory})
    made = make_plan(
        found.units, OffloadArguments(config, torch.device("cuda")), can_recompute=False, sites=found.sites
    )
    return made, list(found.units)


def fp32_bytes(unit: Unit) -> int:
    return sum(group.state_bytes(4) for group in unit.trainable_groups)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_add_up_are_beside_those_that_stay_and_those_that_come_again(tied: bool) -> None:
    made, units = plan(tied=tied, vertical=True)
    again = [unit for unit in units if tied and "embed_tokens" in unit.name]
    staying = [unit for unit in units if unit.stays]
    others = sorted(fp32_bytes(unit) for unit in units if unit not in again and unit not in staying)
    assert len(again) == tied
    assert staying
    expected = sum(map(fp32_bytes, [*again, *staying])) + sum(others[-2:])
    assert (made.budgets.ring.nbytes, made.budgets.ring.adds_up) == (expected, True)
    assert made.budgets.longest_ring_bytes == expected


def test_a_ring_that_does_not_add_up_is_for_two_units() -> None:
    made, units = plan(tied=True, vertical=False)
    assert made.budgets.ring.nbytes == sum(sorted(unit.gradient_bytes for unit in units)[-2:])
    assert not made.budgets.ring.adds_up


def test_a_small_device_has_a_ring_for_one_unit_and_knows_the_longest() -> None:
    roomy, units = plan(tied=True, vertical=True)
    largest = max(unit.gradient_bytes for unit in units)
    made, _ = plan(tied=True, vertical=True, device=f"{7 * largest}")
    assert (made.budgets.ring.nbytes, made.budgets.ring.adds_up) == (largest, False)
    assert made.budgets.longest_ring_bytes == roomy.budgets.ring.nbytes
