"""Steps of three units on the simulated device, with many schedules of copies.

Each schedule must give the same bits as the CPU, order every use of memory, use no more device memory than planned, and
let the host wait only for the norm. By default a few schedules run, which contain every pair of values of `AXES` and of
the policies for copies; with INFINITY_TESTS=all, 20,000.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.coordinator import registry
from infinity.plan import plan_input, planner
from infinity.plan.plan_input import MemoryLimits
from infinity.tiers import activations
from tests import sampling
from tests.conftest import states_of, weights_of
from tests.mixture import Mixture
from tests.sim.accelerator import SimAccelerator
from tests.sim.fixtures import Simulation
from tests.sim.queues import EAGER, LAZY, Policy, random_policy

SCHEDULES = sampling.number(0, 20_000)
PARTS = sampling.number(10, 50)
STEPS = 3
SCHEDULES_OF_A_CASE = 5
CANDIDATES = 1000


class Case(NamedTuple):
    """The model and the loop of a schedule."""

    tiers: tuple[str, str]
    dtype: torch.dtype
    micro_batches: int
    overlap: str
    clipping: str
    gradients: str
    commit_every: int
    moments: str
    recompute: str
    device: str
    habit: str
    resident: str
    activations: str
    experts: bool = False


AXES: dict[str, list[Any]] = {
    "tiers": [("host", "host"), ("host", "nvme"), ("nvme", "nvme")],
    "dtype": [torch.bfloat16, torch.float32],
    "micro_batches": [1, 2],
    "overlap": ["auto", "during_backward", "before_forward", "off"],
    "clipping": ["never", "always", "sometimes"],
    "gradients": ["host", "nvme"],
    "commit_every": [0, 1, 2],
    "moments": ["fp32", "int8"],
    "recompute": ["no", "yes", "reentrant"],
    "device": ["tight", "roomy"],
    "habit": ["plain", "skips", "drops", "evaluates", "fails"],
    "resident": ["none", "some", "all"],
    "activations": ["keep", "host", "nvme"],
}
CASES = [
    case
    for case in (Case(*values) for values in itertools.product(*AXES.values()))
    if case.resident == "none" or (case.moments == "fp32" and case.tiers[0] == "host")
]
CASES += [case._replace(experts=True) for case in CASES if case.resident == "none" and case.activations == "keep"]
RESIDENT = {"some": frozenset({1}), "all": frozenset({0, 1, 2})}
"""Units all of whose states are kept on the device."""
RESIDENT_BYTES = {"none": 0, "some": 112 << 10, "all": 512 << 10}
"""Device memory for these units, at most."""
NORMS = {"never": [1e9], "always": [1e-3], "sometimes": [1e9, 1e-3]}
WIDTH = 48


class Blocks(nn.Module):
    """Three units: the first has a bias, the last has two modules, and two are recomputed together.

    The loss reads a weight outside of its module.

    Args:
        keeps: the model keeps a view of another weight from the forward of its module to the end.
        experts: a fourth block is a mixture of experts, each of which is a unit.
    """

    def __init__(
        self, dtype: torch.dtype, *, recompute: str = "no", keeps: bool = False, experts: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second, *last = (nn.Linear(WIDTH, WIDTH, bias=index == 0) for index in range(4))
        self.blocks = nn.ModuleList([first, second, nn.Sequential(*last)])
        if experts:
            self.blocks.append(Mixture(WIDTH, shared=True))
        self.recompute = recompute
        self.keeps = keeps
        self.to(dtype)

    def forward(self, x: torch.Tensor, without: int | None = None) -> torch.Tensor:
        blocks = [block for index, block in enumerate(self.blocks) if index != without]
        x = self._through(blocks[:1], x)
        kept = self.blocks[1].weight.reshape(-1) if self.keeps else x
        if self.recompute == "no" or not torch.is_grad_enabled():
            x = self._through(blocks[1:], x)
        else:
            x = checkpoint(functools.partial(self._through, blocks[1:]), x, use_reentrant=self.recompute == "reentrant")
        return (x.float() ** 2).mean() + 0.01 * self._extra(kept)

    def _extra(self, kept: torch.Tensor) -> torch.Tensor:
        return self.blocks[2][0].weight.float().square().mean() + kept.float().square().mean()

    @staticmethod
    def _through(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = x + block(x)
        return x


class Result(NamedTuple):
    """Results after a few steps.

    Attributes:
        seen: result of `look` on the model before it was closed.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    seen: Any


def train(
    case: Case,
    directory: Path,
    look: Callable[[nn.Module], Any] = lambda model: None,
    aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Result:
    """Train a case. Operations that disturb the loop run in the context `aside`."""
    nbytes = WIDTH * WIDTH * case.dtype.itemsize + 4096
    there = 2 * RESIDENT_BYTES[case.resident]  # half of memory.device is for activations
    memory = {"device": there + (6 if case.device == "tight" else 16) * nbytes, "host": "64MiB"}
    if case.activations != "keep":
        with pytest.MonkeyPatch.context() as patch:
            _move_small_tensors(patch, crowded=case.device == "tight")
            return _train(case, directory, memory, look, aside)
    return _train(case, directory, memory, look, aside)


def _move_small_tensors(patch: pytest.MonkeyPatch, *, crowded: bool) -> None:
    """Let tensors of 64 bytes and more move in chunks of 256 bytes. With `crowded`, host memory has room for four
    chunks, and no tensor stays on the device.
    """
    patch.setattr(activations, "PIECE_BYTES_MIN", 64)
    patch.setattr(activations, "_CHUNK_BYTES", 256)
    if crowded:
        patch.setattr(plan_input, "_ACTIVATION_BYTES_MIN", 16 << 10)
        patch.setattr(plan_input, "_ACTIVATION_BYTES_MAX", 16 << 10)
        patch.setattr(planner, "_KEPT_BYTES_MAX", 16 << 10)
        patch.setattr(activations, "_STAY_SHARE", 1 << 40)
        patch.setattr(activations, "_MOVING_BYTES_MAX", 512)


def _train(
    case: Case,
    directory: Path,
    memory: dict[str, Any],
    look: Callable[[nn.Module], Any],
    aside: Callable[[], AbstractContextManager[None]],
) -> Result:
    weights, optimizer = case.tiers
    model = Blocks(case.dtype, recompute=case.recompute, keeps=case.device == "roomy", experts=case.experts)
    config = {
        "weights": weights,
        "optimizer": optimizer,
        "gradients": case.gradients,
        "overlap": case.overlap,
        "commit_every": case.commit_every,
        "moments": case.moments,
        "activations": case.activations,
        "memory": memory,
        "nvme": {"paths": [str(directory)]},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "resident_units", functools.partial(_resident_units, case.resident))
        infinity.offload(model, config, device="cpu")
    try:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(case.dtype)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            with aside():
                _disturb(case.habit, step, model, batch)
            for micro_batch in range(case.micro_batches):
                loss = model(batch, without=(step + micro_batch) % 3 if case.habit == "skips" else None)
                loss.backward()
            norms = NORMS[case.clipping]
            nn.utils.clip_grad_norm_(model.parameters(), norms[step % len(norms)])
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(model(batch).item())
        seen = look(model)
        return Result(losses, weights_of(model), states_of(model), seen)
    finally:
        infinity.close(model, discard=True)


def _resident_units(resident: str, config: object, limits: MemoryLimits, *given: object, **options: object) -> Any:
    return frozenset() if limits.in_place else RESIDENT.get(resident, frozenset())


class FailedError(Exception):
    """An error that the test raises."""


def _disturb(habit: str, step: int, model: nn.Module, batch: torch.Tensor) -> None:
    """Run one of the operations that loops make besides their steps."""
    if habit == "drops":
        model(batch).backward()
        model.zero_grad()
    elif habit == "evaluates":
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
    elif habit == "fails":
        _fail_in_forward(model, batch, step)
        _fail_in_backward(model, batch, step)
        model.zero_grad()


def _fail_in_forward(model: nn.Module, batch: torch.Tensor, step: int) -> None:
    hook = model.blocks[step % 3].register_forward_pre_hook(_fail)
    with contextlib.suppress(FailedError):
        model(batch)
    hook.remove()


def _fail_in_backward(model: nn.Module, batch: torch.Tensor, step: int) -> None:
    """Fail in backward, between the two modules of a unit, or after another unit."""

    def watch(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if arguments[0].requires_grad:
            arguments[0].register_hook(_fail)

    hook = [model.blocks[2][1], model.blocks[1]][step % 2].register_forward_pre_hook(watch)
    with contextlib.suppress(FailedError):
        model(batch).backward()
    hook.remove()


def _fail(*_: object) -> None:
    raise FailedError


class Observed(NamedTuple):
    """Observations of a run.

    Attributes:
        waits: number of the host's waits for the device, except for gradients that a native thread lands.
    """

    waits: int
    slab_bytes: int
    device_bytes: int
    limit: int


def observed(sim: SimAccelerator, model: nn.Module) -> Observed:
    plan = registry.coordinator_of(model).plan
    return Observed(
        sim.counts["synchronize that waited"],
        sum(slab.end - slab.begin for slab in sim._slabs),
        plan.device_bytes,
        plan.budgets.limits.device,
    )


def on_the_cpu(case: Case) -> Result:
    """Return the results on the CPU, which are the same wherever states and activations rest."""
    return _on_the_cpu(case._replace(resident="none", activations="keep"))


@functools.lru_cache(64)
def _on_the_cpu(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        return train(case, Path(directory))


@contextmanager
def simulated(policy: Any, **options: Any) -> Iterator[Simulation]:
    """Let offloads in this context use a simulated device. Check at the end that all operations were in order."""
    with pytest.MonkeyPatch.context() as patch:
        simulation = Simulation(patch, policy, **options)
        yield simulation
        simulation.finish()


COPIES: dict[str, Callable[[random.Random], Policy]] = {
    "lazy": lambda draw: LAZY,
    "eager": lambda draw: EAGER,
    "random": lambda draw: random_policy(draw.randrange(1 << 30)),
}


@functools.cache
def covering_schedules() -> list[tuple[Case, Policy]]:
    """Return a few schedules, always the same, in which any two values meet."""
    draw = random.Random("schedules")
    candidates = [(draw.choice(CASES), draw.choice(list(COPIES))) for _ in range(CANDIDATES)]
    chosen = sampling.covering([case._asdict() | {"copies": copies} for case, copies in candidates])
    return [(case, COPIES[copies](draw)) for case, copies in (candidates[index] for index in chosen)]


def schedules_of(part: int) -> Iterator[tuple[Case, Policy]]:
    """Return pairs of a case and a policy: a share of the covering pairs, and a share of others.

    The others have each case with lazy and with eager copies, and with some random policies.
    """
    yield from covering_schedules()[part::PARTS]
    draw = random.Random(f"{sampling.seed('INFINITY_SCHEDULES_SEED')} schedules {part}")
    for _ in range(SCHEDULES // PARTS // SCHEDULES_OF_A_CASE):
        case = draw.choice(CASES)
        yield case, LAZY
        yield case, EAGER
        for _ in range(SCHEDULES_OF_A_CASE - 2):
            yield case, random_policy(draw.randrange(1 << 30))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_any_schedule_ends_in_the_bits_of_the_cpu_with_every_use_in_order(part: int, tmp_path: Path) -> None:
    count = 0
    for case, policy in schedules_of(part):
        expected = on_the_cpu(case)
        try:
            with simulated(policy) as simulation:
                sim = simulation.sim
                on_another_stream = functools.partial(sim.on, sim.stream("another compute stream"))
                found = train(case, tmp_path / "sim", functools.partial(observed, sim), on_another_stream)
        except BaseException as error:
            raise AssertionError(f"{case} under {policy}") from error
        assert found.losses == expected.losses, f"{case} under {policy}: losses"
        for now, then in ((found.weights, expected.weights), (found.states, expected.states)):
            wrong = [name for name in then if not torch.equal(now[name], then[name])]
            assert not wrong, f"{case} under {policy}: {wrong}"
        unused = case.habit in ("skips", "fails")  # weights that no pass needed may still be uploading
        crowded = case.activations != "keep" and case.device == "tight"  # chunks wait for the memory of others
        assert unused or crowded or found.seen.waits == 0, f"{case} under {policy}: the host waited for the device"
        assert found.seen.slab_bytes <= found.seen.device_bytes <= found.seen.limit, f"{case} under {policy}"
        count += 1
    assert count >= max(2, SCHEDULES // PARTS - SCHEDULES_OF_A_CASE)
