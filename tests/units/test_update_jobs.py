"""How the update of a group, and the reads for one, are handed to the native pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from infinity.base.timeline import JobTag
from infinity.errors import DeviceError
from infinity.sizes import PAGE_BYTES
from infinity.state.unit import Unit
from infinity.tiers.destination import destination_of
from infinity.tiers.home import UnitHomes
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate, UpdateTransfer
from infinity.units.update_jobs import read_update_ahead, submit_update
from tests.tiers.fakes import Failure, Future, Store, UpdateFuture, imitate_streams, pages
from tests.units.fakes import Pipeline, homes_of, no_shadows, offloaded, resources, unit_of, wanted

UNIT = unit_of(0)


@pytest.fixture(autouse=True)
def _readable_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_streams(monkeypatch)


def unit(homes: UnitHomes | None = None, of: Unit = UNIT) -> OffloadedUnit:
    return offloaded(of, homes or homes_of(of), no_shadows(Pipeline()))


def update(
    unit: OffloadedUnit, *, speculative: bool = False, current: Any = None, copy: Any = None, **request: Any
) -> UnitUpdate:
    requests = {index: replace(each, **request) for index, each in wanted(unit.full).items()}
    destinations = {
        index: {
            state: destination_of(
                home,
                current if state == "weight" else None,
                None if home.in_memory else int(speculative),
                speculative=speculative,
            )
            for state, home in unit.homes.updated(index, each.moments).items()
        }
        for index, each in requests.items()
    }
    return UnitUpdate(unit.name, requests, destinations, committed=False, speculated=speculative, weights_copy=copy)


def submit(unit: OffloadedUnit, update: UnitUpdate, index: int = 0, below: Any = None) -> UpdateTransfer:
    return submit_update(below or resources(), unit, update, index, step=7, ahead=None)


def job(transfer: UpdateTransfer) -> Mapping[str, Any]:
    future: Any = transfer.future
    made: Mapping[str, Any] = future.job
    return made


def test_a_speculative_update_writes_beside_what_is_current() -> None:
    slot, one = pages(1).lease(PAGE_BYTES, "a slot"), unit()
    made = job(submit(one, update(one, current=slot, speculative=True)))
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        stream = made[state]
        assert (stream.file, stream.offset, stream.write_offset, stream.memory) == (Store.file, 0, PAGE_BYTES, None)
    assert made["weight"].source == slot.view()
    assert (made["speculative"], made["whole"], made["unit"]) == (True, True, UNIT.index)
    assert JobTag.unpack(made["tag"]) == JobTag(7, 0, 0)


def test_a_decided_update_may_overwrite() -> None:
    slot, one = pages(1).lease(PAGE_BYTES, "a slot"), unit()
    made = job(submit(one, update(one, current=slot)))
    assert (made["weight"].memory, made["weight"].source) == (slot.view(), None)
    assert {made[state].write_offset for state in ("weight", "exp_avg", "exp_avg_sq")} == {0}
    assert (made["speculative"], made["whole"], made["grad"]) == (False, False, "gradients of 0.0")


def test_moments_that_no_rule_uses_are_not_moved() -> None:
    one = unit()
    made = update(one, moments=frozenset({"exp_avg"}))
    assert job(submit(one, made))["exp_avg_sq"] is None
    assert made.destinations[0].keys() == {"weight", "exp_avg"}


def test_states_are_read_ahead_and_weights_are_not() -> None:
    below = resources()
    read_update_ahead(below, unit(), 0, step=2)
    pipeline: Pipeline = below.pipeline
    ahead = pipeline.ahead[0].job
    assert "weight" not in ahead
    assert ahead["exp_avg"].file == ahead["exp_avg_sq"].file == Store.file
    assert ahead["residual"] is None


@pytest.mark.parametrize(("lost", "state"), [("gradients", "grad"), ("weights", "weight"), ("", "optimizer states")])
def test_what_is_lost_on_its_way_from_a_device_is_named(lost: str, state: str) -> None:
    landing, copied, future = Future(), Future(), UpdateFuture()
    one = unit(homes_of(UNIT, pages(4)))
    gradients: Any = one.gradients.groups
    gradients[0].landing_futures = lambda: [landing]
    below: Any = resources()
    below.pipeline.submit = lambda **_: future
    transfer = submit(one, update(one, copy=SimpleNamespace(landed=copied)), below=below)
    landing.end(Failure("device") if lost == "gradients" else None)
    copied.end(Failure("device") if lost == "weights" else None)
    future.end(Failure("device"))
    with pytest.raises(DeviceError, match=f"{state} of unit '{UNIT.name}'"):
        transfer.result()


def test_each_group_waits_for_the_gradients_of_all_and_for_a_copy_of_the_weights() -> None:
    """Else a unit would begin with a small group, and the rest of it come after all later units."""
    one = unit(of=unit_of(0, (1, 1)))
    gradients: Any = one.gradients.groups
    for index, group in gradients.items():
        group.landing_futures = lambda index=index: [f"landing {index}"]
    made = update(one, copy=SimpleNamespace(landed="the copy"))
    for index in gradients:
        transfer = submit(one, made, index)
        assert job(transfer)["after"] == ["landing 0", "landing 1", "the copy"]
        assert job(transfer)["grad"] == f"gradients of 0.{index}"
