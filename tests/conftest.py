"""Fixtures and helpers of all tests: small models, swap configs, and closing of offloaded models."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# This is set before torch is imported, and every process that a test starts inherits it. torch's threads spin while
# they wait. With the small models of the tests, most of the CPU time would be spinning. The config of an update sets
# its number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tests.quick_imports  # noqa: F401  # isort: skip

import torch

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.plan.machine_resources import usable_cores
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.dtypes import residual_itemsize
from infinity.tiers.home import StateHome
from infinity.units.weights import Residency

logging.getLogger("infinity").setLevel(logging.ERROR)

# torch.manual_seed records the stack of its caller for each kind of device, even for kinds that this torch was built
# without. Tests call manual_seed often, and the stack of a test is deep.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    # is_available() is not called, because it would initialize the device, even in the fork server
    if not _kind._is_compiled():
        _kind.manual_seed_all = lambda seed: None

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # SIGINT is ignored in a shell's background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["pytester", "tests.sampling", "tests.devices", "tests.costs"]

Offload = Callable[..., Any]


def pytest_configure() -> None:
    """Set hypothesis's number of examples: fewer in `make test`, for tests that set no number themselves."""
    from tests.sampling import number  # tests.sampling is a pytest plugin, which pytest must import first

    settings.register_profile("infinity", max_examples=number(40, 100), deadline=None)
    settings.load_profile("infinity")


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker per core that this process may use; xdist itself counts all cores of the machine."""
    return usable_cores()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep only the captured stdout of passed tests (-rP). Log output and warnings are shown only for failed tests."""
    report = yield
    if report.passed:
        report.sections = [each for each in report.sections if each[0] == "Captured stdout call"]
    return report


@pytest.fixture(scope="session")
def bitsandbytes() -> Any:
    """Return bitsandbytes, which does not compile (tests/quick_imports.py)."""
    return pytest.importorskip("bitsandbytes", "0.50")


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


_tests = itertools.count(1)
_frozen_modules = 0


def _collect() -> None:
    """Collect garbage. Freeze the objects of newly imported modules, so that the many later calls are fast."""
    global _frozen_modules
    grown = len(sys.modules) > _frozen_modules + 100
    if grown:
        gc.unfreeze()  # frozen objects may have become garbage
    gc.collect()
    if grown:
        gc.freeze()
        _frozen_modules = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without collecting garbage (tests/quick_imports.py)."""
    result = yield
    gc.enable()
    _collect()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Collect garbage every 50 tests.

    Modules and their hooks form reference cycles, which Python's collector would free late. Each unfreed model keeps an
    arena.
    """
    result = yield
    if next(_tests) % 50 == 0:
        _collect()
    return result


@pytest.fixture(autouse=True)
def _no_disk_profile(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Hide the measurements that infinity-bench has made on this machine or in another test: they would change a test's
    result.
    """
    name = f"cache-{hash(request.node.nodeid):x}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / name))


@pytest.fixture
def swap_config(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a config; `tier` places weights and optimizer, keywords override top-level keys."""

    def make(tier: str = "nvme", **overrides: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "weights": tier,
            "optimizer": tier,
            "activations": "keep",
            "memory": {"device": "64MiB", "host": "512MiB"},
            "nvme": {"paths": [str(tmp_path / "swap")]},
            "commit_every": 0,
        }
        return config | overrides | {"update": {"threads": 2} | overrides.get("update", {})}

    return make


@pytest.fixture
def offload(swap_config: Callable[..., dict[str, Any]]) -> Iterator[Offload]:
    """Return infinity.offload with a test config; the offloaded models are closed at the end."""
    opened = []

    def make(
        model: torch.nn.Module,
        tier: str = "nvme",
        *,
        faults: Any = (),
        device: Any = None,
        accumulation_steps: int | None = None,
        **overrides: Any,
    ) -> Any:
        config = swap_config(tier, **overrides)
        options: Any = {"faults": faults, "device": device, "accumulation_steps": accumulation_steps}
        model = infinity.offload(model, config, **options)
        opened.append(model)
        return model

    yield make
    for model in opened:
        infinity.close(model)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the current weights of an offloaded model, by first name."""
    coordinator, result = registry.coordinator_of(model), {}
    for record in coordinator.units:
        with coordinator.taking([record.full.index]):
            result |= {name: parameter.detach().clone() for name, parameter in record.parameters.items()}
    return result


def states_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the moments of every trained parameter in fp32, by 'name.state'."""
    infinity.synchronize(model)
    coordinator, result = registry.coordinator_of(model), {}
    for _, place in coordinator.places():
        if not place.group.trainable:
            continue
        states = coordinator.resources.units[place.unit.index].states[place.group_index]
        for state, home in (("exp_avg", states.exp_avg), ("exp_avg_sq", states.exp_avg_sq)):
            if home is None:
                continue
            flat = torch.frombuffer(_bytes_of(coordinator, home), dtype=torch.uint8)
            values = torch.empty(place.group.numel)
            _native.decode_moments(
                flat.numpy(), place.group.moments, is_signed=state == "exp_avg", values=values.numpy()
            )
            result[f"{place.spec.name}.{state}"] = values[place.spec.offset : place.spec.offset + place.spec.numel]
    return result


def _bytes_of(coordinator: Coordinator, home: StateHome) -> bytearray:
    """Return a copy of a state in memory outside the arena, which may be full."""
    if home.in_memory:
        return bytearray(home.read(0, home.nbytes).numpy())
    view = _native.Arena(home.nbytes, huge_pages=False).view(0, home.nbytes)
    coordinator.resources.require_store().read(home.stored(), view).result()
    return bytearray(view)


def residuals_of(model: torch.nn.Module) -> Iterator[tuple[str, bytes]]:
    """Yield by name the residual of every trained parameter: the part of its fp32 master that is not in its weight."""
    infinity.synchronize(model)
    coordinator = registry.coordinator_of(model)
    for _, place in coordinator.places():
        states = coordinator.resources.units[place.unit.index].states.get(place.group_index)
        home = states.residual if states is not None else None
        if home is None:
            continue
        view = _bytes_of(coordinator, home)
        itemsize = residual_itemsize(states.master)
        start = itemsize * place.spec.offset
        yield place.spec.name, bytes(view[start : start + itemsize * place.spec.numel])


def _bytes_of_slots(coordinator: Coordinator) -> int:
    """Return the bytes in slots of fetched units, and the bytes in slots that are freed when memory is needed."""
    slots = coordinator.fetcher._slots
    fetched = [
        record.full.weight_bytes
        for record in coordinator.units
        if slots.counts(record.homes.weights) and record.weights.residency is not Residency.RELEASED
    ]
    on_device = coordinator.resources.device is not None
    viewed = [slot for slot in coordinator.fetcher._viewed if on_device or slot.lease is not None]
    assert not any(slot.outstanding() for slot in viewed)
    return sum(round_up(nbytes, PAGE_BYTES) for nbytes in [*fetched, *(slot.tensor.numel() for slot in viewed)])


def require_no_leaks(model: torch.nn.Module) -> None:
    """Require that only the expected memory is leased between steps. Also require that the spare copy of a state is
    different from the state's newest copy and from all copies that generations name. The expected leases are homes,
    gradients that wait in RAM, staging, and the slots of fetched units.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.finish_updates()
    try:
        _require_no_leaks(coordinator)
    except AssertionError:
        gc.collect()  # a raised exception may keep objects in reference cycles with views of slots
        _require_no_leaks(coordinator)


def _require_no_leaks(coordinator: Coordinator) -> None:
    assert not coordinator.update_queue.speculative
    assert not coordinator.update_queue.decided
    resources, plan = coordinator.resources, coordinator.resources.plan
    if resources.device is None:
        slots = plan.budgets.slot_bytes if plan.placement.weights.tier == "nvme" or plan.budgets.decodes else 0
        assert resources.arena.free_bytes + _bytes_of_slots(coordinator) == round_up(slots, PAGE_BYTES)
        if resources.decoding is not None:
            coordinator.fetcher.finish_fetches()
            landing = resources.decoding.encoded_space
            assert not any(not fetch.give_bounce_back() for fetch in coordinator.fetcher._slots._bouncing)
            assert landing.free_bytes == landing.nbytes
    else:
        assert resources.device.ring.free_bytes == resources.device.ring.nbytes
        coordinator.fetcher.finish_fetches()
        assert resources.device.decoding.free_bytes == resources.device.decoding.nbytes
        slabs = resources.device.slots, resources.device.staying
        free, nbytes = sum(slab.free_bytes for slab in slabs), sum(slab.nbytes for slab in slabs)
        assert free + _bytes_of_slots(coordinator) == nbytes
        copies, bounce = resources.device.weights._space, resources.device.gradients._bounce
        assert copies.free_bytes == copies.nbytes
        # these slots are freed when memory is needed
        landed = sum(lease.nbytes for _, lease in resources.device.gradients._bounced)
        assert bounce.free_bytes + landed == bounce.nbytes
    lent = coordinator.update_queue.shadows.lent_bytes
    assert resources.resting.free_bytes + lent == plan.budgets.shadow_bytes
    assert coordinator.update_queue.shadows.free_bytes + lent == plan.budgets.shadow_bytes
    if resources.landing_window is not None:
        assert resources.landing_window.space.free_bytes == resources.landing_window.space.nbytes
    for home in resources.homes():
        if resources.generations is not None:
            spare = resources.spare_copy(home.stored())
            assert spare != home.stored().newest_copy
            assert spare not in resources.generations._named(home.stored())
