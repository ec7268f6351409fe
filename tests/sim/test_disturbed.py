"""Disturbances of a step on the simulated device leave nothing behind, and the next step works: no memory for an
upload, Ctrl-C at any line, the end while copies are under way. The bytes that a step moves are those of the plan."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.tiers.slab import Slab
from infinity.tiers.uploads import UploadQueue
from tests import sampling
from tests.conftest import require_no_leaks, states_of, weights_of
from tests.sim.fixtures import Simulate
from tests.sim.queues import EAGER, LAZY, random_policy
from tests.sim.test_schedules import WIDTH, Blocks, FailedError, _fail, simulated
from tests.stress.interrupts import CtrlC

STEPS = 3
POLICIES = [LAZY, EAGER, random_policy(1)]
TIERS = [("host", "host"), ("host", "nvme"), ("nvme", "nvme")]


def offloaded(
    tiers: tuple[str, str], directory: Path, *, slots: int = 2, experts: bool = False, **config: Any
) -> Blocks:
    """Return an offloaded model. The device has room for `slots` units."""
    model = Blocks(torch.bfloat16, experts=experts)
    unit = 4 * WIDTH * WIDTH + 4096
    memory = {"device": (slots + 3) * unit, "host": "64MiB"}
    weights, optimizer = tiers
    options = {"weights": weights, "optimizer": optimizer, "memory": memory, "nvme": {"paths": [str(directory)]}}
    infinity.offload(model, options | {"commit_every": 0} | config, device="cpu")
    return model


BATCH = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def train_through(
    model: Blocks, disturbances: Iterator[Any], expected: Sequence[type[BaseException]], micro_batches: int = 1
) -> int:
    """Train. A step that is disturbed before it is decided is repeated from its forward. Return the number of
    disturbances."""
    optim, disturbed = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9), 0
    while (done := registry.coordinator_of(model).steps) < STEPS:
        try:
            with next(disturbances):
                for _ in range(micro_batches):
                    model(BATCH).backward()
                optim.step()
        except tuple(expected):
            disturbed += 1
        if registry.coordinator_of(model).steps == done:
            optim.zero_grad()
            require_no_leaks(model)
        else:
            optim.zero_grad()
    return disturbed


def bits(model: Blocks) -> dict[str, torch.Tensor]:
    return weights_of(model) | states_of(model)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bits of the weights after the steps on the CPU, by tiers."""

    @functools.cache
    def of(tiers: tuple[str, str], micro_batches: int = 1, experts: bool = False) -> dict[str, torch.Tensor]:
        model = offloaded(tiers, tmp_path_factory.mktemp("cpu"), experts=experts)
        train_through(model, itertools.repeat(contextlib.nullcontext()), [], micro_batches)
        found = bits(model)
        infinity.close(model, discard=True)
        return found

    return of


def require_bits(model: Blocks, expected: dict[str, torch.Tensor]) -> None:
    found = bits(model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    infinity.close(model, discard=True)


class Failing:
    """Context manager in which the nth call of these methods raises.

    Args:
        nth: number of the call, counted over all these methods.
    """

    def __init__(self, nth: int, owner: type, *names: str, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self._patch, self._left, self._owner, self._names = pytest.MonkeyPatch(), nth, owner, names
        self._error = error

    def __enter__(self) -> None:
        for name in self._names:
            self._patch.setattr(self._owner, name, self._failing(getattr(self._owner, name)))

    def _failing(self, method: Any) -> Any:
        def fail(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise self._error("as the test wants")
            return method(*arguments, **options)

        return fail

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def no_memory(nth: int) -> Failing:
    """Make the nth upload find no memory."""
    return Failing(nth, UploadQueue, "from_ram", "from_store")


def not_sent(nth: int) -> Failing:
    """Make the nth landing fail after its gradients, or copy of weights, were copied down: no thread takes them."""
    return Failing(nth, _native.Landings, "land", error=MemoryError)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_no_memory_for_an_upload_leaks_nothing_and_the_step_can_be_done_again(
    policy: Any, tiers: tuple[str, str], experts: bool, undisturbed: Any, tmp_path: Path
) -> None:
    expected = undisturbed(tiers, experts=experts)
    draw = random.Random(str(tiers))
    with simulated(policy):
        model = offloaded(tiers, tmp_path / "sim", experts=experts)
        failing = (no_memory(draw.randint(1, 20 if experts else 8)) for _ in range(STEPS))
        disturbances = itertools.chain(failing, itertools.repeat(contextlib.nullcontext()))
        assert train_through(model, disturbances, [torch.OutOfMemoryError]) > 0
        require_bits(model, expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_that_could_not_be_sent_leak_nothing_and_the_step_can_be_done_again(
    policy: Any, tiers: tuple[str, str], micro_batches: int, undisturbed: Any, tmp_path: Path
) -> None:
    expected = undisturbed(tiers, micro_batches)
    draw = random.Random(f"{tiers} {micro_batches}")
    with simulated(policy):
        model = offloaded(tiers, tmp_path / "sim")
        failing = (not_sent(draw.randint(1, 3 * micro_batches)) for _ in range(STEPS))
        disturbances = itertools.chain(failing, itertools.repeat(contextlib.nullcontext()))
        assert train_through(model, disturbances, [MemoryError], micro_batches) > 0
        require_bits(model, expected)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_end_waits_for_a_copy_that_no_native_thread_took(policy: Any, nth: int, tmp_path: Path) -> None:
    with simulated(policy):
        model = offloaded(("nvme", "nvme"), tmp_path, overlap="during_backward")
        infinity.AdamW(model.parameters(), lr=1e-2)
        with not_sent(nth), pytest.raises(MemoryError):
            model(BATCH).backward()
        infinity.close(model, discard=True)


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    before = signal.getsignal(signal.SIGINT)
    yield CtrlC()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("nth", range(sampling.number(4, 200)))
def test_ctrl_c_at_any_line_leaks_nothing_and_the_step_can_be_done_again(
    nth: int, ctrl_c: CtrlC, undisturbed: Any, tmp_path: Path
) -> None:
    draw = random.Random(f"{sampling.SEED} {nth}")
    tiers, experts = draw.choice(TIERS), nth % 2 == 1
    expected = undisturbed(tiers, experts=experts)
    with simulated(draw.choice(POLICIES)):
        overlap = draw.choice(["auto", "during_backward"])
        model = offloaded(tiers, tmp_path / "sim", experts=experts, overlap=overlap)
        lines = [draw.randint(1, 20_000 if experts else 9000) for _ in range(STEPS)]
        disturbances = itertools.chain(map(ctrl_c.at_line, lines), itertools.repeat(contextlib.nullcontext()))
        train_through(model, disturbances, [KeyboardInterrupt])
        require_bits(model, expected)


@pytest.mark.covering
@pytest.mark.parametrize("when", ["forward", "backward", "step", "evaluation"])
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_end_waits_for_copies_that_are_under_way(
    policy: Any, tiers: tuple[str, str], when: str, tmp_path: Path
) -> None:
    with simulated(policy):
        model = offloaded(tiers, tmp_path, overlap="during_backward")
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        loss = model(BATCH)
        if when != "forward":
            loss.backward()
        if when in ("step", "evaluation"):
            optim.step()
        if when == "evaluation":
            with torch.no_grad():
                model(BATCH)
        infinity.close(model, discard=True)


@pytest.mark.parametrize("overlap", ["auto", "off"])  # the new weights go to other memory, or in place
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_update_waits_for_an_upload_of_the_old_weights_that_nobody_waited_for(
    policy: Any, overlap: str, tmp_path: Path
) -> None:
    with simulated(policy):
        model = offloaded(("host", "host"), tmp_path, overlap=overlap)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        model(BATCH).backward()
        hook = model.blocks[1].register_forward_pre_hook(_fail)
        with torch.no_grad(), contextlib.suppress(FailedError):
            model(BATCH)  # the next unit is being uploaded
        hook.remove()
        optim.step()
        infinity.close(model, discard=True)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_units_that_are_alike_have_the_same_addresses_in_each_step(
    policy: Any, simulate: Simulate, tmp_path: Path
) -> None:
    simulate(policy)
    seen: list[int] = []
    try_lease = Slab.try_lease

    def noted(slab: Slab, nbytes: int, **options: Any) -> Any:
        lease = try_lease(slab, nbytes, **options)
        if lease is not None:
            seen.append(lease.memory.data_ptr())
        return lease

    model = offloaded(("nvme", "nvme"), tmp_path)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slab, "try_lease", noted)
        for _ in range(5):
            model(BATCH).backward()
            optim.step()
            optim.zero_grad()
    assert len(set(seen)) <= 3 + 2 + 2, "two slots for those that are alike, one for the other, and the ring's"
    infinity.close(model, discard=True)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_that_were_added_up_begin_the_next_step_in_fp32_and_native_threads_widen_them(
    policy: Any, monkeypatch: pytest.MonkeyPatch, simulate: Simulate, tmp_path: Path
) -> None:
    simulate(policy)
    widened: list[int] = []
    widen = _native.widen_in_place
    monkeypatch.setattr(_native, "widen_in_place", lambda *given: (widened.append(given[2]), widen(*given)))
    model = offloaded(("host", "host"), tmp_path)
    optim = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=2)
    for step in range(3):
        for _ in range(2):
            model(BATCH).backward()
        assert bool(widened) == (step == 0)
        widened.clear()
        optim.step()
        optim.zero_grad()
    infinity.close(model, discard=True)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("slots", "reads"), [(4, 1), (2, None)], ids=["room for all weights", "two slots"])
def test_a_step_moves_the_bytes_of_the_plan(
    slots: int, reads: int | None, micro_batches: int, simulate: Simulate, tmp_path: Path
) -> None:
    """With bf16 weights on NVMe: 2 B per read of a weight, 10 B of states read and written, 2 B of new weights."""
    sim = simulate(EAGER)
    model = offloaded(("nvme", "nvme"), tmp_path, slots=slots, overlap="during_backward")
    optim = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=micro_batches)
    coordinator = registry.coordinator_of(model)

    def step() -> dict[str, int]:
        for _ in range(micro_batches):
            model(BATCH).backward()
        optim.step()
        optim.zero_grad()
        infinity.synchronize(model)
        coordinator.fetcher.finish_fetches()
        done = infinity.statistics(model)
        return {"read": done.read_bytes, "written": done.written_bytes} | {
            way: sim.counts[f"bytes {way}"] for way in ("up", "down")
        }

    step(), step()
    before, after = step(), step()
    moved = {way: after[way] - before[way] for way in after}
    units = coordinator.units
    weights = sum(unit.full.weight_bytes for unit in units)
    states = sum(home.nbytes for unit in units for group in unit.homes.states.values() for home in group.homes())
    groups = [group for unit in units for group in unit.full.groups]
    gradients = sum(max(spec.offset + spec.numel for spec in group.specs) * 2 for group in groups)
    assert moved["written"] == weights + states
    # A speculative update that had not begun is made again after the step, when its weights may have been evicted.
    again = moved["down"] - micro_batches * gradients - weights
    assert 0 <= again <= weights, "gradients go down, and weights for updates"
    read_by_updates = moved["read"] - states - moved["up"]
    assert read_by_updates == 0 if reads is not None else read_by_updates <= weights
    assert reads is None or moved["up"] == reads * weights
    infinity.close(model, discard=True)
