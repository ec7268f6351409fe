"""Calls point down, as imports do: nothing in infinity is called by a room below it, and each leg of a weight's and of
a gradient's life is a way down that touches few rooms.

A room is a package; `state` is the values that all of them read, `plan` is pure functions of these, and neither is a
room. What Python or torch calls (hooks, or properties of parameters) begins a way of its own. A way that only goes down
visits no room twice.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import infinity
from tests.models import llama, loss_of

ROOMS = (
    "runtime",
    "optim",
    "access",
    "coordinator",
    "sharded",
    "units",
    "durable",
    "tiers",
    "device_update",
    "plan",
    "state",
    "ranks",
    "io",
)
"""Layers, top first. Neither of the first two calls the other. Every layer may call the folders below the last one."""
HEIGHT = {name: len(ROOMS) - max(at, 1) for at, name in enumerate(ROOMS)}

PROTOCOLS = {
    # What the optimizer that entered is asked (units/speculation_choice.py: StepPredictor;
    # durable/registered_optimizers.py: Checkpointed).
    "OffloadedOptimizer.accumulation_steps",
    "OffloadedOptimizer.checkpoint",
    "OffloadedOptimizer.expected_scale",
    "OffloadedOptimizer.expected_update",
    "OffloadedOptimizer.names",
    "OffloadedOptimizer.restore_progress",
    "OffloadedOptimizer.restore_hyperparameters",
    # A transfer that failed, or an update that was canceled, is named by who began it (units/update_jobs.py).
    "_naming.<locals>.name",
    # What the guards opened for a call of state_dict is theirs to end, when the call died.
    "_OpenGatherings.end_if_dead",
}
ACTS = {
    # What each rank was given to do.
    "ranks: SingleProcessWorld.each",
    "ranks: SingleProcessWorld.once_slow",
    # The policy is pure: what it must know of a unit it was given a function for.
    "plan: to_prefetch",
    "plan: update_order.<locals>.<lambda>",
}
LEGS = {
    "a weight arrives": ("Coordinator.begin_use", "Coordinator.begin_units_backward"),
    "a weight leaves": ("Fetcher._evict",),
    "a gradient lands": ("Coordinator.land_gradient",),
    "an update begins": ("Coordinator._completed", "Coordinator.update"),
    "an update is finished": ("UpdatePump.finish_updates",),
    "a step is committed": ("UpdatePump.begin_commit", "UpdatePump._advance_commit", "Coordinator._freeze_commit"),
}
_HERE = str(Path(infinity.__file__).parent) + "/"


def room_of(frame: FrameType) -> str:
    """Return the package of a frame's code; "" if it is not infinity's."""
    name = frame.f_code.co_filename
    return name[len(_HERE) :].partition("/")[0] if name.startswith(_HERE) else ""


class Calls:
    """The calls of infinity's own functions, as sys.setprofile reports them."""

    def __init__(self) -> None:
        self.upward: set[tuple[str, str]] = set()
        self.legs: dict[str, set[str]] = defaultdict(set)  # rooms by the function that begins a leg

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        called = room_of(frame)
        if event != "call" or called not in HEIGHT or frame.f_code.co_flags & inspect.CO_GENERATOR:  # that is a value
            return
        above = frame.f_back
        while above is not None and room_of(above) in ("base", ""):
            if "/contextlib" not in above.f_code.co_filename and room_of(above) != "base":
                return
            above = above.f_back
        if above is None:
            return
        caller = room_of(above)
        if caller in HEIGHT and HEIGHT[caller] < HEIGHT[called]:
            self.upward.add((f"{caller}: {above.f_code.co_qualname}", frame.f_code.co_qualname))
            return
        if called in ("state", "plan"):
            return
        while above is not None and room_of(above):
            self.legs[above.f_code.co_qualname].add(called)
            above = None if above.f_code.co_qualname in PROTOCOLS else above.f_back


@contextmanager
def traced() -> Iterator[Calls]:
    """Record calls with the garbage collector off: ending a model of an earlier test would add calls at any place."""
    calls = Calls()
    gc.collect()
    gc.disable()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def live(swap: Path, **options: Any) -> None:
    """Run a model's life: two steps, a look at its weights, a commit, the end."""
    model, batch = llama()
    config = {"memory": {"device": "400KiB", "host": "64MiB"}, "nvme": {"paths": [str(swap)]}, **options}
    model = infinity.offload(model.bfloat16().train(), config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss_of(model, batch).backward()
        optim.step()
        optim.zero_grad()
    with infinity.gathered(model, write=True):
        pass
    infinity.commit(model)
    infinity.close(model)


@pytest.mark.long
def test_calls_point_down_and_no_leg_visits_more_than_six_rooms(tmp_path: Path) -> None:
    with traced() as calls:
        live(tmp_path / "nvme", weights="nvme", optimizer="nvme", gradients="nvme", commit_every=1)
        live(tmp_path / "host", weights="host", optimizer="nvme", commit_every=2)
    upward = {each for each in calls.upward if each[0] not in ACTS and each[1] not in PROTOCOLS}
    assert upward == set()
    visited = {leg: set[str]().union(*(calls.legs[name] for name in names)) for leg, names in LEGS.items()}
    assert all(visited.values()), "a leg begins elsewhere now"
    with_caller = {leg: rooms | {"hooks or the optimizer"} for leg, rooms in visited.items()}
    assert {leg: rooms for leg, rooms in with_caller.items() if len(rooms) > 6} == {}
