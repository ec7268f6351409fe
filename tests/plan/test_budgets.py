"""Memory that is needed at once is counted when the model is offloaded: the budget a PlanError names works, to the
page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.config import load_config
from infinity.errors import PlanError
from infinity.plan.budgets import needed_at_once
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.sizes import PAGE_BYTES, exact_bytes, parse_bytes
from infinity.state.discover import HookedModule, discover
from infinity.state.offload_arguments import OffloadArguments
from tests.conftest import weights_of

WIDTH = 32  # a square matrix in fp32 is a page


class Blocks(nn.Module):
    """Blocks of several matrices each; `shared` ones also have the matrix of an earlier block.

    Args:
        outer: the model itself multiplies by the matrix of this block, before and after all blocks.
        spans: blocks are recomputed in the backward, one by one, or not.
    """

    def __init__(
        self, pages: tuple[int, ...], shared: dict[int, int], outer: int | None = None, *, recomputed: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))) for count in pages
        )
        for index, of in shared.items():
            self.blocks[index].append(self.blocks[of][0])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.outer = None if outer is None else self.blocks[outer][0].weight
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        x = x if self.outer is None else x @ self.outer
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x))
        x = x if self.outer is None else x @ self.outer
        return (x * self.scale).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks alone": lambda: Blocks((1, 3, 2, 1), {}),
    "a shared matrix": lambda: Blocks((2, 1, 1, 1), {3: 0}),
    "a shared matrix, recomputed": lambda: Blocks((2, 1, 1, 1), {3: 0}, recomputed=True),
    "all share one": lambda: Blocks((3, 1, 2, 1, 1), {1: 0, 2: 0, 3: 0, 4: 0}),
    "two pairs": lambda: Blocks((2, 3, 1, 1, 2), {3: 0, 4: 1}),
    "used around all": lambda: Blocks((1, 2, 2, 3), {}, outer=2),
    "used around all, recomputed": lambda: Blocks((1, 2, 2, 3), {3: 0}, outer=2, recomputed=True),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for seed in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        model(x.requires_grad_()).backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            model(x)
    return weights_of(model)


def advised(error: PlanError, key: str) -> int:
    found = re.search(rf"memory\.{key} to (\w+)", str(error))
    assert found is not None, error
    nbytes = parse_bytes(found[1])
    assert isinstance(nbytes, int)
    return nbytes


@pytest.mark.covering(strength=1, most=4)
@pytest.mark.parametrize("overlap", ["off", "during_backward"])
@pytest.mark.parametrize("name", MODELS)
def test_the_device_budget_that_is_advised_works_and_one_page_less_is_refused(
    name: str, overlap: str, offload: Any
) -> None:
    def memory(device: int) -> dict[str, Any]:
        return {"memory": {"device": device, "host": "64MiB"}, "overlap": overlap}

    with pytest.raises(PlanError, match="Raise memory.device") as caught:
        offload(built(name), **memory(PAGE_BYTES))
    least = advised(caught.value, "device")
    with pytest.raises(PlanError) as caught:
        offload(built(name), **memory(least - PAGE_BYTES))
    assert advised(caught.value, "device") == least
    weights = trained(offload(built(name), **memory(least)))
    expected = trained(infinity.offload(built(name), {"weights": "host", "optimizer": "host"}))
    assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())


def plan(memory: dict[str, int], **config: Any) -> Plan:
    found = discover(Blocks((1, 3, 2, 1), {3: 0}))
    given = {"nvme": {"paths": ["/tmp/never-made"]}, "memory": memory, "commit_every": 0} | config
    cpu = torch.device("cpu")
    return make_plan(found.units, OffloadArguments(load_config(given), cpu), can_recompute=False, sites=found.sites)


CONFIGS: list[dict[str, Any]] = [
    {"weights": "nvme", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "nvme", "gradients": "host", "update": {"tile": "4KiB"}},
    {"weights": "nvme", "optimizer": "host", "gradients": "nvme", "commit_every": 1},
    {"weights": "host", "optimizer": "nvme", "moments": "int8"},
    {"weights": "host", "optimizer": "host", "gradients": "host"},
    {"overlap": "during_backward", "commit_every": 2, "keep": 2},
    {"update": {"tile": "4KiB"}, "nvme": {"paths": ["/tmp/never-made"], "checksums": False}},
]


@pytest.mark.covering(most=4)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_host_budget_that_is_advised_fits_one_page_less_does_not_and_all_larger_ones_do(
    config: dict[str, Any],
) -> None:
    device = 1 << 20
    with pytest.raises(PlanError, match="raise memory.host") as caught:
        plan({"device": device, "host": 1}, **config)
    least = advised(caught.value, "host")
    with pytest.raises(PlanError) as caught:
        plan({"device": device, "host": least - PAGE_BYTES}, **config)
    assert advised(caught.value, "host") == least
    for more in [*range(60), 100, 200, 400, 800, 1600]:
        host = least + more * PAGE_BYTES
        assert plan({"device": device, "host": host}, **config).host_bytes <= host


def test_the_largest_two_modules_are_counted_with_what_is_around_them_and_what_stays() -> None:
    found = discover(Blocks((1, 2, 2, 3), {}))
    of = {unit.name: unit for unit in found.units}
    assert [unit.name for unit in found.units if unit.stays] == ["remainder"]

    def needed(fetched: set[str], *sites: tuple[str, set[str]]) -> tuple[int, list[str]]:
        made = [HookedModule(name, nn.Module(), tuple(of[unit].index for unit in units)) for name, units in sites]
        result = needed_at_once(found.units, made, {of[name].index for name in fetched})
        return sum(unit.weight_bytes for unit in result) // PAGE_BYTES, [unit.name for unit in result]

    every = set(of)
    a, b, c, d = (f"blocks.{index}" for index in range(4))
    alone = [(name, {name}) for name in of]
    assert needed(every, *alone) == (6, [b, d, "remainder"])
    assert needed(every - {d}, *alone) == (5, [b, c, "remainder"])
    assert needed(set(), *alone) == (0, [])
    assert needed(every, (a, {a, b, c}), (d, {d}), (b, {b})) == (9, [a, b, c, d, "remainder"])
    assert needed(every, (a, {a, d}), (c, {c, d}), (b, {b})) == (8, [b, c, d, "remainder"])
    assert needed(every, ("", {c}), (a, {a}), (b, {b}), (d, {d})) == (8, [b, c, d, "remainder"])
    assert needed(every, ("x", {c}), ("x.y.z", {d}), ("xy", {a})) == (7, [a, c, d, "remainder"])


@pytest.mark.parametrize(("nbytes", "text"), [(1, "4KiB"), (135168, "132KiB"), (2 << 20, "2MiB"), (3 << 30, "3GiB")])
def test_exact_bytes_are_read_back_as_they_are(nbytes: int, text: str) -> None:
    assert exact_bytes(nbytes) == text
    assert parse_bytes(text) == max(nbytes, PAGE_BYTES)
