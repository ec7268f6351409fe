"""The devices that tests of offloaded models run on: the CPU, and a simulated device under each of its policies.

A test takes part if it is in one of `FOLDERS` and requests a fixture of `OFFLOADING`. Such a test runs on the
simulated device without changes. Tests of host memory alone, and measurements, have the mark `cpu_only("why")`.

Cases on the simulated device have the mark `simulated`. `make test` creates the cases of one function per file, under
one policy, and runs one of them; the policies are distributed evenly over the files. All cases are created when `-m
simulated`, the name of a test or `-k` selects them. With such a selection, INFINITY_TESTS=0.1 runs a tenth of the
cases, and `make device-test` runs all cases.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sampling
from tests.sim.fixtures import Simulation
from tests.sim.queues import EAGER, LAZY, Policy, random_policy

DEVICES: dict[str, Policy | None] = {
    "cpu": None,
    "sim_lazy": LAZY,
    "sim_eager": EAGER,
    "sim_random": random_policy(sampling.SEED),
}
SIMULATED = [name for name, policy in DEVICES.items() if policy is not None]
FOLDERS = ("runtime", "optim", "checkpoint", "integrations")
OFFLOADING = {"offload", "swap_config", "launch", "deferred", "tmp_path"}
"""Fixtures of tests that offload models, or that have a directory for a store."""

_ROOT = Path(__file__).parent
_PARAMETER = "computes_on"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _takes_part(metafunc):
        return
    # the function is recorded in any case, because _sample needs the first function of each file
    is_first = _is_first(metafunc)
    if _wants_all(metafunc.config):
        names = list(DEVICES)
    elif is_first:
        names = ["cpu", _policy_of(metafunc.definition.path)]
    else:
        names = ["cpu"]
    cases = [
        pytest.param(DEVICES[name], id=name, marks=() if name == "cpu" else pytest.mark.simulated) for name in names
    ]
    metafunc.parametrize(_PARAMETER, cases, indirect=True)


_FIRST = pytest.StashKey[dict[Path, object]]()
"""The first test function of each file that takes part and does not have the mark `long`."""


def _is_first(metafunc: pytest.Metafunc) -> bool:
    """Return whether `make test` runs a case of this function on the simulated device."""
    if metafunc.definition.get_closest_marker("long") is not None:
        return False
    first = metafunc.config.stash.setdefault(_FIRST, {})
    return first.setdefault(metafunc.definition.path, metafunc.function) is metafunc.function


def _wants_all(config: pytest.Config) -> bool:
    """Return whether the command line selects more cases on the simulated device than `make test` runs."""
    option = config.option
    marked = "simulated" in option.markexpr and "not simulated" not in option.markexpr
    return marked or any(name in text for text in (*config.args, option.keyword) for name in SIMULATED)


def _policy_of(path: Path) -> str:
    """Return the policy under which `make test` runs a case of a file."""
    return SIMULATED[zlib.crc32(str(path.relative_to(_ROOT)).encode()) % len(SIMULATED)]


def _takes_part(metafunc: pytest.Metafunc) -> bool:
    definition = metafunc.definition
    folder = definition.path.relative_to(_ROOT).parts[0] if definition.path.is_relative_to(_ROOT) else ""
    if folder not in FOLDERS or definition.get_closest_marker("cpu_only") is not None:
        return False
    return not OFFLOADING.isdisjoint(metafunc.fixturenames) and "simulate" not in metafunc.fixturenames


@pytest.fixture(autouse=True)
def computes_on(request: pytest.FixtureRequest) -> Iterator[Policy | None]:
    """Provide the policy of the simulated device, or None for the CPU.

    With a policy, models that are offloaded to the CPU use the code path of a device, and the order of operations is
    checked at the end.
    """
    policy = getattr(request, "param", None)
    if policy is None:
        yield None
        return
    # this is a separate MonkeyPatch, because tests undo the changes of the fixture monkeypatch
    with pytest.MonkeyPatch.context() as patch:
        simulation = Simulation(patch, policy, gradients_apart=True)
        yield policy
        simulation.finish()


@pytest.hookimpl(tryfirst=True)  # runs before the sample of other parameters is drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the sample of the cases on the simulated device, and a share of the other cases."""
    simulated = [item for item in items if item.get_closest_marker("simulated")]
    if sampling.SHARE == 1 or not simulated:
        return
    sample = _sample(config, simulated)
    chosen = set(sampling.some([item for item in simulated if item not in sample]))
    sampling.leave_out(config, items, set(simulated) - chosen - (set() if sampling.SAMPLE_IS_DONE else sample))


def _sample(config: pytest.Config, simulated: list[pytest.Item]) -> set[pytest.Item]:
    """Return the sample: one case on the simulated device of every file."""
    of_files: dict[Path, list[pytest.Item]] = {}
    for item in (each for each in simulated if each.get_closest_marker("long") is None):
        policy = DEVICES[_policy_of(item.path)]
        if item.function is config.stash[_FIRST].get(item.path) and item.callspec.params[_PARAMETER] is policy:  # type: ignore[attr-defined]
            of_files.setdefault(item.path, []).append(item)
    return {cases[zlib.crc32(path.name.encode()) % len(cases)] for path, cases in of_files.items()}
