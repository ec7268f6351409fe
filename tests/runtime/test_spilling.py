"""Gradients that spill to NVMe: the same bits as in RAM, as many bytes as planned, and nothing lost on the way."""

from __future__ import annotations

import bisect
import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import _native
from infinity.config import load_config
from infinity.coordinator import registry
from infinity.io import store
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from tests import sampling
from tests.conftest import require_no_leaks, states_of, weights_of
from tests.models import ARCHITECTURES, llama, loss_of

MEMORY = {"device": "640KiB", "host": "512MiB"}
Result = tuple[list[float], list[float], dict[str, torch.Tensor]]


def model_of(name: str, dtype: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, batch = llama(layers=10) if name == "deep" else ARCHITECTURES[name]()
    return model.to(dtype).train(), batch


def half_of_the_gradients(
    swap_config: Any, name: str, dtype: Any, tier: str, passes: int | None = None, **form: Any
) -> dict[str, Any]:
    """Return a config whose memory.host has room for the gradients of only some units, with the middle one of such
    values."""
    units = discover(model_of(name, dtype)[0], form.get("moments", "fp32")).units

    def config(host: int) -> dict[str, Any]:
        return {"memory": MEMORY | {"host": host}, "update": {"tile": "16KiB", "threads": 1}} | form

    def held(host: int) -> float:
        """Return the fraction of the units whose gradients are in RAM."""
        try:
            loaded = load_config(swap_config(tier, **config(host)))
            cpu = torch.device("cpu")
            plan = make_plan(units, OffloadArguments(loaded, cpu, accumulation_steps=passes), can_recompute=False)
        except infinity.PlanError:
            return 0.0
        gradients = plan.placement.gradients
        return len(gradients.in_ram) / plan.layout.trained_count if gradients.tier == "nvme" else 1.0

    hosts = range(100 << 10, 6 << 20, 16 << 10)
    some = bisect.bisect_left(hosts, True, key=lambda host: held(host) > 0)
    every = bisect.bisect_left(hosts, True, lo=some, key=lambda host: held(host) == 1)
    half = hosts[(some + every) // 2]
    assert 0 < held(half) < 1
    return config(half)


def train(offload: Any, name: str, dtype: Any, micro_batches: int, steps: int = 2, **config: Any) -> Result:
    model, batch = model_of(name, dtype)
    model = offload(model, **{"memory": MEMORY} | config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses, norms = [], []
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        optim.step()
        optim.zero_grad()
        norms.append(optim.last_grad_norm)
    require_no_leaks(model)
    result = losses, norms, weights_of(model) | states_of(model)
    infinity.close(model)
    return result


def assert_same(found: Result, expected: Result) -> None:
    assert found[:2] == expected[:2]
    assert found[2].keys() == expected[2].keys()
    for name, values in found[2].items():
        assert torch.equal(values, expected[2][name]), name


def test_a_skipped_step_and_gradients_set_by_hand(offload: Any) -> None:
    def run(gradients: str) -> Any:
        model, batch = model_of("llama", torch.bfloat16)
        model = offload(model, gradients=gradients, memory=MEMORY)
        optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        (loss_of(model, batch) * float("nan")).backward()
        optim.step()
        assert optim.skipped_steps == 1
        model.zero_grad()  # the module's own, which infinity does not see
        loss_of(model, batch).backward()
        first = next(model.parameters())
        first.grad = torch.full(first.shape, 0.25, dtype=first.dtype)
        optim.step()
        loss_of(model, batch).backward()  # on top of those that were stepped with
        optim.step()
        optim.zero_grad()
        require_no_leaks(model)
        found = weights_of(model) | states_of(model) | {"norm": torch.tensor(optim.last_grad_norm)}
        infinity.close(model)
        return found

    expected, found = run("host"), run("nvme")
    assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.bfloat16), ("llama", torch.float32), ("mixed", None), ("tied_llama", torch.bfloat16)],
)
def test_gradients_in_ram_and_on_nvme_end_in_the_same_bits(
    name: str, dtype: Any, micro_batches: int, tier: str, offload: Any, swap_config: Any
) -> None:
    expected = train(offload, name, dtype, micro_batches, gradients="host", tier=tier)
    assert_same(train(offload, name, dtype, micro_batches, gradients="nvme", tier=tier), expected)
    if name == "mixed":
        return  # so small that the window takes more than the gradients
    half = half_of_the_gradients(swap_config, name, dtype, tier)
    assert_same(train(offload, name, dtype, micro_batches, tier=tier, **half), expected)


_in_ram: dict[tuple[str, bool], Result] = {}


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("overlap", ["during_backward", "before_forward", "off"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_updates_beside_compute_change_no_bit(
    overlap: str, moments: str, offload: Any, swap_config: Any, computes_on: Any
) -> None:
    """Units of several groups, some spilled, some not, with clipping, accumulation and generations."""
    options, case = {"overlap": overlap, "moments": moments, "commit_every": 1}, (moments, computes_on is None)
    if case not in _in_ram:
        in_ram = {"gradients": "host", "tier": "host", "moments": moments}
        _in_ram[case] = train(offload, "deep", torch.bfloat16, 2, **in_ram)
    expected = _in_ram[case]
    half = half_of_the_gradients(swap_config, "deep", torch.bfloat16, "nvme", **options)
    for number, config in enumerate((options | {"gradients": "nvme"}, half)):
        nvme = {"paths": [swap_config()["nvme"]["paths"][0] + str(number)]}
        assert_same(train(offload, "deep", torch.bfloat16, 2, nvme=nvme, **config), expected)


def test_half_of_the_gradients_is_neither_none_nor_all(offload: Any, swap_config: Any) -> None:
    half = half_of_the_gradients(swap_config, "llama", torch.bfloat16, "nvme")
    model, _ = model_of("llama", torch.bfloat16)
    plan = infinity.statistics(offload(model, **half)).plan
    assert 0 < len(plan.placement.gradients.in_ram) < plan.layout.trained_count
    assert plan.placement.gradients.tier == "nvme"
    assert plan.placement.accumulates
    assert "any number of micro-batches; of one backward pass those of" in plan.describe()


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("update", [{"tile": "16KiB", "threads": 2}, {"tile": "1MiB", "threads": 1}])
def test_engine_and_tiles_change_no_bit(engine: str, update: Any, offload: Any, tmp_path: Path) -> None:
    expected = train(offload, "gpt2", torch.bfloat16, 2, gradients="host")
    nvme = {"paths": [str(tmp_path / "a"), str(tmp_path / "b")], "engine": engine}
    assert_same(train(offload, "gpt2", torch.bfloat16, 2, gradients="nvme", nvme=nvme, update=update), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("passes", [None, 1, 4])
@pytest.mark.parametrize("small", [False, True])
def test_spilled_gradients_move_as_many_bytes_as_planned(
    small: bool, passes: int | None, every: int, swap_config: Any, offload: Any
) -> None:
    """Counted by the engine: all that moves are gradients (and states that are in the store, and commits). With a
    small memory.host some of them wait in RAM, and do not move."""
    form = {"commit_every": every, "overlap": "off"}
    if small:
        tier, form = "nvme", form | {"weights": "host"}
        form = half_of_the_gradients(swap_config, "llama", torch.bfloat16, tier, passes, **form)
    else:
        tier, form = "host", form | {"gradients": "nvme", "memory": MEMORY}
    model, batch = model_of("llama", torch.bfloat16)
    model = offload(model, tier, accumulation_steps=passes, **form)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, accumulation_steps=passes)
    for _ in range(2):
        before = infinity.statistics(model)
        for _ in range(passes or 1):
            loss_of(model, batch).backward()
        optim.step()
        optim.zero_grad()
        if every:
            infinity.commit(model)
        after = infinity.statistics(model)
    forecast = after.plan.forecast
    stayed = after.plan.budgets.landing_bytes * ((passes or 1) - 1)  # at most: in the window until the next pass
    assert forecast.read_bytes - stayed <= after.read_bytes - before.read_bytes <= forecast.read_bytes
    assert after.written_bytes - before.written_bytes == forecast.written_bytes
    assert small or (forecast.written_bytes == forecast.read_bytes) == (every == 0)
    assert (0 < len(after.plan.placement.gradients.in_ram) < after.plan.layout.trained_count) == small


@pytest.mark.long
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_the_plan_is_told_of_passes_changes_no_bit(micro_batches: int, offload: Any, swap_config: Any) -> None:
    half = half_of_the_gradients(swap_config, "llama", torch.bfloat16, "nvme")
    results = [
        train(offload, "llama", torch.bfloat16, micro_batches, accumulation_steps=told, **half) for told in (None, 1, 3)
    ]
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def where_16_bits_pay(swap_config: Any, name: str, dtype: Any) -> dict[str, Any]:
    """Return a config whose gradients wait in 16 bits if the plan knows of one pass, and otherwise in fp32."""
    units, found = discover(model_of(name, dtype)[0]).units, []
    for host in range(100 << 10, 6 << 20, 64 << 10):
        memory = MEMORY | {"host": host}
        config = {"tier": "auto", "weights": "host", "memory": memory, "update": {"tile": "16KiB", "threads": 1}}
        loaded = load_config(swap_config(**config))
        try:
            plans = [
                make_plan(
                    units, OffloadArguments(loaded, torch.device("cpu"), accumulation_steps=told), can_recompute=False
                )
                for told in (None, 1)
            ]
        except infinity.PlanError:
            continue
        if [plan.placement.form.gradient_fp32 for plan in plans] == [True, False]:
            found.append(config)
    return found[len(found) // 2]


@pytest.mark.long
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["llama", "tied_llama"])
def test_a_plan_made_for_one_pass_adds_up_more_to_the_same_bits(
    name: str, micro_batches: int, offload: Any, swap_config: Any
) -> None:
    config = where_16_bits_pay(swap_config, name, torch.bfloat16)
    model = offload(model_of(name, torch.bfloat16)[0], accumulation_steps=1, **config)
    plan = infinity.statistics(model).plan
    assert not plan.placement.form.gradient_fp32
    assert len(plan.placement.gradients.in_ram) == plan.layout.trained_count
    infinity.close(model)
    expected = train(offload, name, torch.bfloat16, micro_batches, gradients="host", tier="host")
    assert_same(train(offload, name, torch.bfloat16, micro_batches, accumulation_steps=1, **config), expected)


def test_a_run_with_generations_is_resumed_with_gradients_elsewhere(swap_config: Any) -> None:
    def config(gradients: str) -> Any:
        return swap_config(commit_every=1, gradients=gradients, memory=MEMORY)

    losses, batch = [], None
    for number, gradients in enumerate(("host", "nvme", "host")):
        model, batch = model_of("llama", torch.bfloat16)
        begin = infinity.offload if number == 0 else infinity.resume
        model = begin(model, config(gradients))
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss = loss_of(model, batch)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        infinity.close(model, discard=number == 2)
    plain, _ = model_of("llama", torch.bfloat16)
    plain = infinity.offload(plain, config("host") | {"commit_every": 0})
    optim, expected = infinity.AdamW(plain.parameters(), lr=1e-3), []
    for _ in range(6):
        loss = loss_of(plain, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        expected.append(loss.item())
    infinity.close(plain)
    assert losses == expected


@pytest.mark.parametrize("name", ["flip", "EIO"])
def test_every_fault_of_a_gradient_is_named_and_loses_no_lease(name: str, offload: Any) -> None:
    """Weights and states in RAM: every operation is of a gradient."""

    def step(model: Any, batch: Any, optim: Any) -> None:
        loss_of(model, batch).backward()
        loss_of(model, batch).backward()
        optim.step()
        optim.zero_grad()

    def offloaded(faults: Any) -> tuple[Any, Any, Any]:
        model, batch = model_of("llama", torch.bfloat16)
        model = offload(model, "host", gradients="nvme", memory=MEMORY, faults=faults, overlap="off")
        return model, batch, infinity.AdamW(model.parameters(), lr=1e-3)

    model, batch, optim = offloaded([])
    step(model, batch, optim)
    operations = registry.coordinator_of(model).resources.engine.counters()["operations"]
    expected = weights_of(model)
    infinity.close(model)
    named = set()
    few = range(2 * (name == "EIO"), operations, 5)
    for index in sorted({*few, *sampling.some(list(range(operations)))}):
        fault = (
            _native.Fault(index, "error", errno.EIO) if name == "EIO" else _native.Fault(index, name)  # type: ignore[arg-type]
        )
        model, batch, optim = offloaded([fault])
        try:
            step(model, batch, optim)
        except infinity.SwapIOError as error:
            assert error.unit
            named.add(error.state)
            if registry.coordinator_of(model).health.failure is None:
                optim.zero_grad()
                require_no_leaks(model)
                step(model, batch, optim)  # nothing of the states was touched
                assert all(torch.equal(value, expected[key]) for key, value in weights_of(model).items())
        else:
            assert name == "flip"
        infinity.close(model)
    assert named == {"grad"}


@pytest.mark.parametrize(("disks", "reads"), [(1, 1), (2, 37)])
def test_gradients_that_an_update_cannot_read_are_named(
    disks: int, reads: int, offload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of the step is of gradients or of states: what the error says lies where it says that it failed."""
    monkeypatch.setattr(store, "_probe", lambda *_: 1e9)
    monkeypatch.setattr(store, "STRIPE_BYTES", 4096)
    named = set()
    for index in range(0, 6 * reads, reads):
        model, batch = model_of("llama", torch.bfloat16)
        nvme = {"paths": [str(tmp_path / f"{index}{disk}") for disk in range(disks)]}
        form = {"weights": "host", "gradients": "nvme", "memory": MEMORY, "overlap": "off", "nvme": nvme}
        model = offload(model, faults=[_native.Fault(index, "error", errno.EIO, operation="read")], **form)
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        loss_of(model, batch).backward()
        with pytest.raises(infinity.SwapIOError) as caught:
            optim.step()
        error, resources = caught.value, registry.coordinator_of(model).resources
        there = next(
            extent
            for extent in resources.extents()
            for at in range(0, extent.nbytes, 4096)
            if resources.require_store().file.locate(extent.offset + at) == (error.path, error.offset)
        )
        assert (error.unit, error.step) == (there.unit, 1)
        assert error.state == ("grad" if there.state == "grad" else "optimizer states")
        named.add(error.state)
        infinity.close(model)
    assert named == {"grad", "optimizer states"}


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_an_exception_in_backward_loses_nothing(interrupt: Any, layer: int, offload: Any) -> None:
    model, batch = model_of("llama", torch.bfloat16)
    model = offload(model, gradients="nvme", memory=MEMORY)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    for _ in range(3):
        loss = loss_of(model, batch)
        raised = []

        def fail(gradient: torch.Tensor, raised: Any = raised) -> None:
            raised.append(1)
            raise interrupt

        handle = list(model.model.layers[layer].parameters())[-1].register_hook(fail)
        with pytest.raises(interrupt):
            loss.backward()
        handle.remove()
        del loss
        assert raised
        optim.zero_grad()
        require_no_leaks(model)
    losses = []
    for _ in range(2):
        loss = loss_of(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    assert losses == train(offload, "llama", torch.bfloat16, 1, gradients="host", nvme={"paths": []}, tier="host")[0]


def test_closing_in_the_middle_of_it_all_waits_for_what_is_under_way(offload: Any) -> None:
    model, batch = model_of("llama", torch.bfloat16)
    model = offload(model, gradients="nvme", memory=MEMORY)
    loss_of(model, batch).backward()
    infinity.close(model)
