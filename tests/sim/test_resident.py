"""Resident units on the simulated device: their states never leave the device but for commits.

A run ends in the bits of states in RAM, whatever units are resident, and a generation can be resumed with other
resident units.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import infinity
from infinity.access import step_io_replay
from infinity.coordinator import registry
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.device_update import arithmetic_check
from infinity.device_update.arithmetic_check import ArithmeticCheck, Verdict
from infinity.errors import InfinityError, PlanError
from infinity.plan import planner
from infinity.plan.placement import TierSplit
from infinity.tiers import state_writer
from infinity.tiers.resident import ResidentMemory
from infinity.units import resident_update
from infinity.units.resident_gradients import ResidentSums
from tests import sampling
from tests.conftest import residuals_of, states_of, weights_of
from tests.sim.accelerator import SimAccelerator
from tests.sim.queues import EAGER, LAZY, Policy, random_policy
from tests.sim.test_schedules import RESIDENT, WIDTH, Blocks, simulated

POLICIES = [LAZY, EAGER, random_policy(sampling.SEED)]
KINDS = {
    "plain": {},
    "clips": {"clip": 1e-3},
    "scales": {"scale": 64.0},
    "skips": {"nan_at": 2},
    "accumulates": {"passes": 3},
    "vertical": {"passes": 3, "vertical": True},
}
STEPS = range(sampling.number(5, 20))
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": infinity.AdamW,
    "adam": infinity.Adam,
    "sgd": lambda parameters, lr: infinity.SGD(parameters, lr=lr, momentum=0.9),
    "lion": infinity.Lion,
    "adagrad": infinity.Adagrad,
}


class Run(NamedTuple):
    """Results of a run."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    residuals: dict[str, bytes]


def config_of(directory: Path, resident: str, **options: Any) -> dict[str, Any]:
    """Return a config; `resident` is "nvme" for states in the store, "none" for states in RAM, or a key of RESIDENT."""
    config = {
        "optimizer": {"nvme": "nvme", "all": "device"}.get(resident, "host"),
        "weights": "nvme" if resident == "nvme" else "auto",
        "memory": {"device": "8MiB", "host": "64MiB"},
        "nvme": {"paths": [str(directory)]},
        "commit_every": 1,
    }
    return config | options


@contextmanager
def units_resident(resident: str) -> Iterator[None]:
    """Let plans choose these units; the config alone chooses all units."""
    with pytest.MonkeyPatch.context() as patch:
        if resident == "some":
            patch.setattr(planner, "resident_units", lambda *given, **options: RESIDENT["some"])
        yield


def opened(directory: Path, resident: str, *, dtype: torch.dtype, resumes: bool = False, **options: Any) -> nn.Module:
    model = Blocks(dtype)
    open_model = infinity.resume if resumes else infinity.offload
    with units_resident(resident):
        open_model(model, config_of(directory, resident, **options), device="cpu")
    return model


def train(
    model: nn.Module,
    steps: Sequence[int],
    *,
    rule: str = "adamw",
    clip: float = 0.0,
    scale: float = 0.0,
    nan_at: int = -1,
    passes: int = 1,
    vertical: bool = False,
    after: Callable[[int], None] = lambda step: None,
) -> Run:
    """Train the steps `steps`, and close the model."""
    optim = OPTIMIZERS[rule](model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1 << 20, enabled=bool(scale))
    losses = []
    for step in steps:
        inputs = [batch_of(step * passes + index, model, is_nan=step == nan_at) for index in range(passes)]
        if vertical:
            losses += [loss.item() for loss in infinity.backward(model, model, inputs)]
        else:
            for batch in inputs:
                loss = model(batch)
                scaler.scale(loss).backward()
                losses.append(loss.item())
        if clip:
            scaler.unscale_(optim)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        after(step)
    result = Run(losses, weights_of(model), states_of(model), dict(residuals_of(model)))
    infinity.close(model)
    return result


def batch_of(index: int, model: nn.Module, *, is_nan: bool) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(dtype)
    return batch * float("nan") if is_nan else batch


def require_same(found: Run, expected: Run) -> None:
    assert str(found.losses) == str(expected.losses)  # NaN is NaN
    assert found.residuals == expected.residuals
    for now, then in ((found.weights, expected.weights), (found.states, expected.states)):
        assert now.keys() == then.keys()
        assert [name for name in then if not torch.equal(now[name], then[name])] == []


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_states_in_ram(
    kind: str, resident: str, dtype: torch.dtype, policy: Policy, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"vertical": True} if kind == "vertical" else {}
    expected = train(opened(tmp_path / "ram", "none", dtype=dtype, **options), STEPS, **KINDS[kind])
    with simulated(policy):
        there = opened(tmp_path / "device", resident, dtype=dtype, **options)
        assert registry.coordinator_of(there).plan.placement.optimizer.resident == RESIDENT[resident]
        require_same(train(there, STEPS, **KINDS[kind]), expected)


@pytest.mark.covering(most=3)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_every_rule_is_updated_there(rule: str, tmp_path: Path) -> None:
    expected = train(_for(rule, tmp_path / "ram", "none"), range(4), rule=rule)
    with simulated(LAZY):
        require_same(train(_for(rule, tmp_path / "device", "all"), range(4), rule=rule), expected)


def _for(rule: str, directory: Path, resident: str) -> nn.Module:
    model = Blocks(torch.bfloat16)
    infinity.offload(model, config_of(directory, resident), device="cpu", optimizer=rule)
    return model


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("then", ["nvme", "none", *RESIDENT])
@pytest.mark.parametrize("first", ["nvme", "none", *RESIDENT])
def test_a_generation_is_resumed_with_any_share(first: str, then: str, tmp_path: Path) -> None:
    expected = train(opened(tmp_path / "whole", "none", dtype=torch.bfloat16), range(5))
    with simulated(POLICIES[(len(first) + len(then)) % 3]):
        train(opened(tmp_path / "swap", first, dtype=torch.bfloat16), range(3))
        resumed = train(opened(tmp_path / "swap", then, dtype=torch.bfloat16, resumes=True), range(3, 5))
    require_same(resumed._replace(losses=[]), expected._replace(losses=[]))
    assert resumed.losses == expected.losses[3:]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_kill_within_a_commit_leaves_the_generation_before(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy the store at each piece of a commit, as a kill would leave it, and resume from each copy."""
    monkeypatch.setattr(state_writer, "_PIECE_BYTES", 4096)
    taken: list[tuple[int, Path]] = []
    begin_piece, steps = state_writer.StateWriter._begin_piece, [0]

    def copied(writer: Any, write: Any) -> bool:
        begun: bool = begin_piece(writer, write)
        if begun and len(taken) < 40 and write.begun_bytes == 4096:
            taken.append((steps[0], tmp_path / f"killed {len(taken)}"))
            shutil.copytree(tmp_path / "swap", taken[-1][1])
        return begun

    seen: dict[int, dict[str, torch.Tensor]] = {}
    with simulated(policy):
        model = opened(tmp_path / "swap", "all", dtype=torch.bfloat16)
        monkeypatch.setattr(state_writer.StateWriter, "_begin_piece", copied)

        def after(step: int) -> None:
            steps[0] = step + 1
            seen[step + 1] = weights_of(model)

        train(model, range(3), after=after)
        monkeypatch.setattr(state_writer.StateWriter, "_begin_piece", begin_piece)
        newest = set()
        for at, directory in taken[:: max(len(taken) // sampling.number(4, 40), 1)]:
            if not list(directory.glob("generation-*")):
                continue
            again = opened(directory, "all", dtype=torch.bfloat16, resumes=True)
            step = registry.coordinator_of(again).steps
            newest.add(step)
            assert at - 1 <= step <= at + 1
            for name, value in weights_of(again).items():
                assert torch.equal(value, seen[step][name]), f"{name} of generation {step}"
            infinity.close(again)
        assert newest


@pytest.mark.parametrize("optimizer", ["auto", "device"])
def test_a_device_whose_arithmetic_differs_keeps_states_in_ram(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ArithmeticCheck, "verdict", lambda *given: Verdict("sqrt", True))
    arithmetic_check.check_of.cache_clear()
    with simulated(LAZY), caplog.at_level("WARNING", "infinity"):
        model = opened(tmp_path, "all", dtype=torch.bfloat16, optimizer=optimizer)
        plan = registry.coordinator_of(model).plan
        assert plan.placement.optimizer == TierSplit("host", frozenset({0, 1, 2}))
        assert "the arithmetic of cpu is not the CPU's (sqrt): states stay in RAM or on NVMe" in caplog.text
        infinity.close(model)


def test_arithmetic_that_changes_during_a_run_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(LAZY):
        model = opened(tmp_path, "all", dtype=torch.bfloat16)
        monkeypatch.setattr(ArithmeticCheck, "verdict", lambda *given: Verdict("denormals", True))
        with pytest.raises(InfinityError, match=r"no longer the CPU's \(denormals\).*set_flush_denormal"):
            train(model, range(1))
        infinity.close(model)


def test_the_arithmetic_is_checked_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, verdict = [0], ArithmeticCheck.verdict

    def counted(*given: Any) -> Verdict:
        asked[0] += 1
        return verdict(*given)

    with simulated(LAZY):
        model = opened(tmp_path, "all", dtype=torch.bfloat16)
        monkeypatch.setattr(ArithmeticCheck, "verdict", counted)
        train(model, range(3))
    assert asked[0] == 3  # and not once for each of the three units


def test_the_norm_and_the_update_may_be_on_different_streams(tmp_path: Path) -> None:
    with simulated(LAZY) as simulation:
        model = opened(tmp_path, "all", dtype=torch.bfloat16)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        model(batch_of(0, model, is_nan=False)).backward()
        with simulation.sim.on(simulation.sim.stream("another compute stream")):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optim.step()
        infinity.close(model)


class TwoGroups(nn.Linear):
    """A unit with two groups: weights in bf16, and a scale in fp32."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.scale).sum()


def test_no_update_of_a_unit_waits_for_copies_of_the_unit_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    update, write = resident_update.update_on_device, state_writer.StateWriter.write

    def updated(*given: Any) -> torch.Tensor:
        begun.append("update")
        return update(*given)

    def written(*given: Any) -> state_writer.StateWrite:
        begun.append("write")
        return write(*given)

    with simulated(LAZY):
        torch.manual_seed(0)
        model = TwoGroups()
        infinity.offload(model, config_of(tmp_path, "all"), device="cpu")
        monkeypatch.setattr(resident_update, "update_on_device", updated)
        monkeypatch.setattr(state_writer.StateWriter, "write", written)
        train(model, range(1))
    assert begun == ["update"] * 2 + ["write"] * 7


def test_a_replay_of_a_step_reports_no_values_that_are_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with simulated(LAZY), caplog.at_level("WARNING", "infinity"):
        model = opened(tmp_path, "all", dtype=torch.bfloat16)
        step_io_replay.replay_step(registry.coordinator_of(model))
        infinity.close(model)
    assert "no longer finite" not in caplog.text


def test_a_store_is_read_through_the_ring_of_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all units are resident, the updates have tiles of one page only."""
    written: list[int] = []
    write = ResidentMemory.write

    def noted(memory: ResidentMemory, begin: int, values: torch.Tensor) -> None:
        written.append(values.numel())
        write(memory, begin, values)

    with simulated(LAZY):
        expected = train(_wide(tmp_path), range(1))
        monkeypatch.setattr(ResidentMemory, "write", noted)
        model = _wide(tmp_path, resumes=True)
        resources = registry.coordinator_of(model).resources
        assert max(written) > resources.staging.nbytes
        assert len(written) == len(list(resources.homes()))
        assert weights_of(model).keys() == expected.weights.keys()
        assert all(torch.equal(value, expected.weights[name]) for name, value in weights_of(model).items())
        infinity.close(model)


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def _wide(directory: Path, *, resumes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 10 * WIDTH), nn.Linear(10 * WIDTH, WIDTH), Total()).to(torch.bfloat16)
    open_model = infinity.resume if resumes else infinity.offload
    open_model(model, config_of(directory, "all"), device="cpu")
    return model


@pytest.mark.parametrize("resident", ["none", *RESIDENT])
def test_the_devices_memory_is_free_after_the_model_is_closed(
    resident: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is free even if the script keeps the optimizer, which keeps the coordinator."""
    slabs = slabs_made(monkeypatch)
    with simulated(LAZY):
        model = opened(tmp_path, resident, dtype=torch.bfloat16)
        coordinator = registry.coordinator_of(model)
        train(model, range(2))
        ((slab, others),) = slabs
        assert references(slab) == others
        assert coordinator.closed


def slabs_made(patch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, int]]:
    """Return a list to which each slab that is made from now on is added, with the references to its new memory."""
    slabs: list[tuple[torch.Tensor, int]] = []
    make = SimAccelerator.slab

    def made(sim: SimAccelerator, nbytes: int) -> torch.Tensor:
        slab = make(sim, nbytes)
        slabs.append((slab, references(slab)))
        return slab

    patch.setattr(SimAccelerator, "slab", made)
    return slabs


def references(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


PASSING_ON = {"watch.py", "released_parameters.py"}
"""Files that pass operations of the script on to torch."""


class Allocations(TorchDispatchMode):
    """Record of the memory that infinity's own code takes for tensors of at least 2 KiB, but for a tensor in RAM.

    That tensor shows whether torch's threads flush denormal numbers (arithmetic_check.py).

    Attributes:
        taken: for each such tensor the operation, its number of bytes, and the line of the code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def within(self, function: Callable[[ResidentSums], None], sums: ResidentSums) -> None:
        with self:
            function(sums)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and storage_of(each) not in given:
                nbytes, where = each.untyped_storage().nbytes(), caller()
                if nbytes >= 2048 and where.startswith("infinity/") and "arithmetic_check" not in where:
                    self.taken.append(f"{func}: {nbytes} bytes in {where}")
        return result


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for a gradient handle, which has no storage."""
    return 0 if isinstance(tensor, GradientHandle) else int(tensor.untyped_storage().data_ptr())


def caller() -> str:
    """Return the innermost line of infinity or of a test that called the present operation."""
    root, frame = Path(__file__).parents[2], sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root) and ".venv" not in path.parts and path.name not in PASSING_ON:
            return f"{path.relative_to(root)}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere"


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("resident", RESIDENT)
def test_a_step_takes_no_memory_but_for_activations(resident: str, passes: int, tmp_path: Path) -> None:
    seen, entered = Allocations(), ExitStack()

    def after(step: int) -> None:
        if step == 1:
            entered.enter_context(seen)
            # Torch switches `seen` off while it computes sums through a gradient handle.
            patch, compute = entered.enter_context(pytest.MonkeyPatch.context()), ResidentSums.compute
            patch.setattr(ResidentSums, "compute", lambda sums: seen.within(compute, sums))
        if step == 5:
            entered.close()

    with simulated(LAZY):
        train(opened(tmp_path, resident, dtype=torch.bfloat16), range(6), clip=1e-3, passes=passes, after=after)
    assert seen.taken == []


def test_auto_takes_as_many_units_as_fit_half_of_the_device(tmp_path: Path) -> None:
    chosen = []
    for device in ("100KiB", "500KiB", "4MiB"):
        with simulated(LAZY):
            model = opened(tmp_path, "auto", dtype=torch.bfloat16, optimizer="auto", memory={"device": device})
            plan = registry.coordinator_of(model).plan
            assert plan.device_bytes <= plan.budgets.limits.device
            chosen.append(len(plan.placement.optimizer.resident))
            infinity.close(model, discard=True)
    assert chosen[0] == 0
    assert 0 < chosen[1] < chosen[2] == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"moments": "int8"}, "moments: int8 is updated on the CPU only"),
        ({"moments": "bf16"}, "moments: bf16 is updated on the CPU only"),
        ({"weights": "host"}, "the config has weights: host"),
        ({"master": "none"}, "master: none is updated on the CPU only"),
        ({"memory": {"device": "100KiB"}}, r"optimizer: device needs .* of memory.device"),
    ],
)
def test_what_cannot_be_kept_on_the_device_is_refused_by_name(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with simulated(LAZY), pytest.raises(PlanError, match=reason):
        opened(tmp_path, "all", dtype=torch.bfloat16, **options)


def test_the_cpu_has_no_resident_units(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the CPU has no memory of its own besides RAM\. Set optimizer: auto, host"):
        opened(tmp_path, "all", dtype=torch.bfloat16)


def test_a_second_backward_pass_without_room_is_refused_with_ways_that_work(tmp_path: Path) -> None:
    def offloaded(name: str, resident: str, passes: int | None, **options: Any) -> nn.Module:
        config = config_of(tmp_path / name, resident, **options)
        return infinity.offload(Blocks(torch.bfloat16), config, device="cpu", accumulation_steps=passes)

    once = train(offloaded("once", "none", 1), range(3))
    twice = train(offloaded("twice", "none", 2), range(3), passes=2)
    with simulated(LAZY):
        refused = offloaded("refused", "all", 1)
        for _ in range(2):
            first, second = (refused(batch_of(index, refused, is_nan=False)) for index in range(2))
            first.backward()
            with pytest.raises(PlanError, match="Leave accumulation_steps out, set optimizer: host or nvme, or step"):
                second.backward()
            refused.zero_grad()
        require_same(train(refused, range(3)), once)  # a step after every backward pass
        for name, passes, options in (
            ("out", None, {}),
            ("host", 1, {"optimizer": "host"}),
            ("nvme", 1, {"optimizer": "nvme"}),
        ):
            require_same(train(offloaded(name, "all", passes, **options), range(3), passes=2), twice)


def test_an_unknown_number_of_backward_passes_has_room_in_fp32(tmp_path: Path) -> None:
    with simulated(LAZY):
        train(opened(tmp_path, "all", dtype=torch.bfloat16), range(1), passes=2)
