"""States and weights that rest in RAM in part: the same bits, and as much less traffic as the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import load_config
from infinity.coordinator import registry
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from infinity.units.weights import Residency
from tests.conftest import states_of, weights_of
from tests.models import ARCHITECTURES, loss_of

FORMS = [("llama", torch.bfloat16, {}), ("llama", torch.float32, {}), ("mixed", None, {})]
FORMS += [("gpt2", torch.bfloat16, {"moments": "int8"}), ("llama", torch.bfloat16, {"master": "fp32"})]
TILE = {"tile": "1MiB", "threads": 1}
DEVICE = "400KiB"
Result = tuple[list[float], dict[str, torch.Tensor], Plan]


class Placed:
    """Trains a small model in some placement."""

    def __init__(self, path: Path, name: str = "llama", dtype: Any = torch.bfloat16, **form: Any) -> None:
        self._name, self._dtype, self._form, self._path = name, dtype, form, path

    def model(self) -> Any:
        torch.manual_seed(0)
        model, self.batch = ARCHITECTURES[self._name]()
        return model.to(self._dtype).train()

    def config(self, host: int, **config: Any) -> dict[str, Any]:
        memory = {"device": DEVICE, "host": host}
        nvme = {"paths": [str(self._path)]}
        given = {"activations": "keep", "memory": memory, "nvme": nvme, "update": TILE, "commit_every": 0}
        return given | self._form | config

    def least(self, **config: Any) -> Plan:
        """Return the plan with only the required memory in RAM, at the least memory.host for it."""
        units, host = discover(self.model(), self._form.get("moments", "fp32")).units, 0
        given = self.config(8 << 20, weights="nvme", optimizer="nvme") | config
        while given["memory"]["host"] != host:  # the staging follows the budget
            host = given["memory"]["host"]
            found = make_plan(units, OffloadArguments(load_config(given), torch.device("cpu")), can_recompute=False)
            given["memory"]["host"] = found.host_bytes - found.budgets.staging.ahead_bytes
        return found

    def offloaded(self, host: int, **config: Any) -> tuple[Any, infinity.AdamW]:
        model = infinity.offload(self.model(), self.config(host, **config))
        return model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    def step(self, model: Any, optim: infinity.AdamW) -> float:
        loss = loss_of(model, self.batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.item()

    def train(self, host: int, steps: int = 4, **config: Any) -> Result:
        model, optim = self.offloaded(host, **config)
        losses = [self.step(model, optim) for _ in range(steps)]
        found = losses, weights_of(model) | states_of(model), infinity.statistics(model).plan
        infinity.close(model, discard=True)
        return found


def assert_same(found: Result, expected: Result) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, values in found[1].items():
        assert torch.equal(values, expected[1][name]), name


def shares(least: Plan) -> list[int]:
    """Budgets that hold nothing more, some weights, some states, all."""
    weights, states = least.layout.weight_bytes, least.layout.state_bytes
    base = least.host_bytes
    return [base, base + weights // 2, base + weights + states // 3, base + weights + 4 * states // 5, 8 << 20]


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("name", "dtype", "form"), FORMS)
def test_any_share_in_ram_ends_in_the_same_bits(
    name: str, dtype: Any, form: Any, every: int, tmp_path: Path, computes_on: Any
) -> None:
    placed = Placed(tmp_path, name, dtype, commit_every=every, **form)
    expected = placed.train(8 << 20, 3, weights="host", optimizer="host")
    held = []
    for host in shares(placed.least()):
        found = placed.train(host, 3)
        assert_same(found, expected)
        held.append((found[2].layout.arena.weights, found[2].layout.arena.states))
    assert held == sorted(held)
    assert held[-1] == (expected[2].layout.weight_bytes, expected[2].layout.state_bytes)
    if computes_on is None:  # on a device the plan has memory for copies, and leaves it to others
        assert held[0] == (0, 0)
        assert 0 < held[1][0] < held[-1][0]
        assert 0 < held[2][1] < held[3][1] < held[-1][1]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("form", [{}, {"moments": "int8"}])
def test_traffic_falls_with_the_share_as_planned(form: Any, every: int, tmp_path: Path) -> None:
    """Counted by the engine, a step and its commit."""
    placed = Placed(tmp_path, commit_every=every, overlap="off", **form)
    for host in shares(placed.least()):
        model, optim = placed.offloaded(host)
        placed.step(model, optim)
        before = infinity.statistics(model)
        placed.step(model, optim)
        if every:
            infinity.commit(model)
        after = infinity.statistics(model)
        read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
        forecast = after.plan.forecast
        assert written == forecast.written_bytes
        if after.plan.placement.weights.tier == "host":
            assert read == forecast.read_bytes
        else:  # a unit that ends the forward and begins the backward is read once
            assert forecast.read_bytes - 2 * after.plan.layout.weight_bytes < read <= forecast.read_bytes
        assert after.cached_bytes == after.plan.layout.arena.states
        assert after.cached_weight_bytes == after.plan.layout.arena.weights
        infinity.close(model, discard=True)


@pytest.mark.cpu_only("a device fetches them, too")
def test_units_in_ram_are_not_fetched_and_stay(tmp_path: Path) -> None:
    placed = Placed(tmp_path, overlap="off")
    least = placed.least()
    model, optim = placed.offloaded(least.host_bytes + least.layout.weight_bytes // 2)
    coordinator = registry.coordinator_of(model)
    placed.step(model, optim)
    reads = infinity.statistics(model).weight_bytes_read
    for index in infinity.statistics(model).plan.placement.weights.in_ram:
        assert coordinator.units[index].weights.slot is not None
        coordinator.begin_use(index)
        coordinator.end_use(index)
    slot_bytes = coordinator.plan.budgets.slot_bytes
    assert infinity.statistics(model).weight_bytes_read - reads <= slot_bytes  # prefetches
    fetched = sum(
        record.full.weight_bytes
        for record in coordinator.units
        if record.full.index not in coordinator.resources.plan.placement.weights.in_ram
        and record.weights.residency is not Residency.RELEASED
    )
    assert coordinator.resources.arena.free_bytes + fetched == slot_bytes
    infinity.close(model, discard=True)


def test_a_run_is_resumed_with_another_share(tmp_path: Path) -> None:
    placed = Placed(tmp_path, commit_every=1)
    budgets = shares(placed.least())
    expected = placed.train(8 << 20, steps=5)
    losses = []
    model, optim = placed.offloaded(budgets[2])
    for host in (budgets[0], budgets[3], budgets[1], None):
        losses.append(placed.step(model, optim))
        infinity.close(model)
        if host is not None:
            model = infinity.resume(placed.model(), placed.config(host))
            optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    model = infinity.resume(placed.model(), placed.config(8 << 20))
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses.append(placed.step(model, optim))
    assert_same((losses, weights_of(model) | states_of(model), expected[2]), expected)
    infinity.close(model, discard=True)


def test_a_copy_of_a_model_that_is_partly_in_ram_is_whole(tmp_path: Path) -> None:
    placed = Placed(tmp_path / "swap")
    least = placed.least()
    saved = []
    for host in (least.host_bytes + least.layout.weight_bytes // 2, 8 << 20):
        model, optim = placed.offloaded(host)
        placed.step(model, optim)
        infinity.save_pretrained(model, tmp_path / "out")
        infinity.close(model)
        saved.append((tmp_path / "out" / "model.safetensors").read_bytes())
    assert saved[0] == saved[1]
