"""The devices that tests of offloaded models run on: the CPU, and a simulated device under each of its policies.

A test takes part by its kind: it is in one of `FOLDERS` and asks for a fixture of `OFFLOADING`. It needs no code of its
own for that. What is about host memory alone, or measures something, has the mark `cpu_only("why")`.

The cases on the simulated device have the mark `simulated`. `make test` runs one of every file, so that each policy has
some; INFINITY_TESTS=0.1 a tenth of the others as well, and `make device-test` all.
"""

from __future__ import annotations

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
FOLDERS = ("runtime", "optim", "checkpoint", "integrations")
OFFLOADING = {"offload", "swap_config", "launch", "deferred", "tmp_path"}
"""Fixtures of tests that offload models, or have a directory for a store."""

_ROOT = Path(__file__).parent
_PARAMETER = "computes_on"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _takes_part(metafunc):
        cases = [
            pytest.param(policy, id=name, marks=() if policy is None else pytest.mark.simulated)
            for name, policy in DEVICES.items()
        ]
        metafunc.parametrize(_PARAMETER, cases, indirect=True)


def _takes_part(metafunc: pytest.Metafunc) -> bool:
    definition = metafunc.definition
    folder = definition.path.relative_to(_ROOT).parts[0] if definition.path.is_relative_to(_ROOT) else ""
    if folder not in FOLDERS or definition.get_closest_marker("cpu_only") is not None:
        return False
    return not OFFLOADING.isdisjoint(metafunc.fixturenames) and "simulate" not in metafunc.fixturenames


@pytest.fixture(autouse=True)
def computes_on(request: pytest.FixtureRequest) -> Iterator[Policy | None]:
    """None for the CPU; else models that are offloaded to the CPU take a device's way, and what is to be ordered there
    is checked at the end."""
    policy = getattr(request, "param", None)
    if policy is None:
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:  # its own: tests undo theirs
        simulation = Simulation(patch, policy, gradients_apart=True)
        yield policy
        simulation.finish()


@pytest.hookimpl(tryfirst=True)  # before the sample of other parameters is drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases on the simulated device one of every file that is not `long`, and a share of the others."""
    simulated = [item for item in items if item.get_closest_marker("simulated")]
    long = [item for item in simulated if item.get_closest_marker("long")]
    others = [item for item in simulated if not item.get_closest_marker("long")]
    axes = [{"file": str(item.path), "policy": str(item.callspec.params[_PARAMETER])} for item in others]  # type: ignore[attr-defined]
    left_out = set(simulated) - set(sampling.drawn(others, axes, strength=1)) - set(sampling.some(long))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
