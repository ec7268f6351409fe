"""A trace has every kind of event, each with its unit, in a form that viewers draw right, and changes no bit."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import _native
from infinity.base import timeline
from infinity.coordinator import registry
from infinity.runtime import chrome_trace
from infinity.runtime.chrome_trace import TraceEvent
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of

ROOM = {"memory": {"device": "400KiB", "host": "512MiB"}}  # less than the weights: they are fetched again and again
STEPS = 3
STATES = ("weight", "residual", "exp_avg", "exp_avg_sq")


def trained(offload: Any, trace: Path | None, **options: Any) -> Any:
    """Return the model after some steps, all but the first traced."""
    torch.manual_seed(0)
    model, batch = llama()
    model = offload(model.bfloat16().train(), **ROOM | options)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    def steps(count: int) -> None:
        for _ in range(count):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()

    steps(1)
    settle(model)
    if trace is None:
        steps(STEPS - 1)
    else:
        with infinity.trace(model, trace):
            steps(STEPS - 1)
            settle(model)
    return model


def settle(model: Any) -> None:
    """Wait until nothing is under way."""
    infinity.synchronize(model)
    for index in range(len(registry.coordinator_of(model).units)):
        registry.coordinator_of(model).begin_use(index)
        registry.coordinator_of(model).end_use(index)
    for record in registry.coordinator_of(model).units:
        if record.weights.fetch is not None:
            record.weights.fetch.finish()


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def bars(path: Path) -> list[dict[str, Any]]:
    return [event for event in read(path) if event["ph"] == "X"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.mark.parametrize("commit_every", [0, 1])
def test_events_of_every_kind_name_their_unit_and_step(
    commit_every: int, offload: Any, path: Path, computes_on: Any
) -> None:
    model = trained(offload, path, commit_every=commit_every)
    units = {record.full.name for record in registry.coordinator_of(model).units}
    by_kind = defaultdict(list)
    for event in bars(path):
        by_kind[event["cat"]].append(event)
    for kind in ("compute", "gradient", "update", "read", "write"):
        assert {event["args"]["unit"] for event in by_kind[kind]} == units, kind
    stays = {"remainder"} if computes_on is None else set()  # a device gets its new weights
    assert {event["args"]["unit"] for event in by_kind["fetch"]} == units - stays
    assert {event["name"] for event in by_kind["step"]} == {"step 2", "step 3"}
    causes = {event["name"].split()[0] for event in by_kind["stall"]}
    assert {"step", "gradient", "room"} <= causes <= set(timeline.CAUSES)
    for kind in ("compute", "update", "read", "write", "gradient"):
        assert {2, 3} <= {event["args"]["step"] for event in by_kind[kind]} <= {2, 3, 4}, kind
    states = {(event["cat"], event["args"]["state"]) for kind in ("read", "write") for event in by_kind[kind]}
    assert states == {(kind, state) for kind in ("read", "write") for state in STATES}
    if commit_every:
        assert by_kind["sync"]
        assert "commit" in causes


def test_each_unit_has_a_forward_and_a_backward_a_step(offload: Any, path: Path) -> None:
    model = trained(offload, path)
    passes = [event["name"] for event in bars(path) if event["cat"] == "compute"]
    for record in registry.coordinator_of(model).units:
        for kind in ("forward", "backward"):
            assert passes.count(f"{kind} {record.full.name}") >= STEPS - 1


def test_viewers_can_draw_it(offload: Any, path: Path) -> None:
    trained(offload, path)
    events = read(path)
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert all({"ph", "ts", "pid", "tid", "name"} <= event.keys() for event in events)
    times = [event["ts"] for event in events]
    assert min(times) == 0
    assert times == sorted(times)
    on: dict[Any, list[Any]] = defaultdict(list)
    for event in bars(path):
        assert event["dur"] >= 0
        assert event["cat"]
        on[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    assert set(on) <= rows
    for spans in on.values():
        open_until: list[int] = []
        for begin, end in spans:
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_the_bytes_are_those_the_engine_counted(offload: Any, path: Path) -> None:
    model, batch = llama()
    model = offload(model.bfloat16().train(), **ROOM)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    settle(model)
    before = infinity.statistics(model)
    with infinity.trace(model, path):
        for _ in range(2):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()
        settle(model)
        after = infinity.statistics(model)
    moved = {"read": 0, "write": 0}
    for event in bars(path):
        if event["cat"] in moved:
            moved[event["cat"]] += event["args"]["bytes"]
    assert moved["read"] == after.read_bytes - before.read_bytes > 0
    assert moved["write"] == after.written_bytes - before.written_bytes > 0


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_traced_run_ends_in_the_same_bits(tier: str, offload: Any, path: Path) -> None:
    results = []
    for where in (None, path):
        model = trained(offload, where, tier=tier)
        results.append(weights_of(model) | states_of(model))
        infinity.close(model)
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


def test_states_in_ram_are_traced_too(offload: Any, path: Path, computes_on: Any) -> None:
    trained(offload, path, tier="host")
    kinds = {event["cat"] for event in bars(path)} - ({"fetch"} if computes_on else set())
    assert kinds == {"compute", "gradient", "update", "stall", "step"}


def test_gradients_that_spill_name_their_unit(offload: Any, path: Path) -> None:
    model = trained(offload, path, gradients="nvme", memory={"device": "640KiB", "host": "12MiB"})
    units = {record.full.name for record in registry.coordinator_of(model).units}
    assert registry.coordinator_of(model).resources.plan.budgets.landing_bytes
    moved = [event for event in bars(path) if event["cat"] in ("read", "write")]
    assert {event["args"]["unit"] for event in moved} == units, "no transfer is of nothing"
    assert {event["cat"] for event in moved if event["name"].split()[1] == "grad"} == {"read", "write"}


def test_a_backward_on_another_thread_is_traced(offload: Any, path: Path) -> None:
    model, batch = llama()
    model = offload(model.bfloat16().train(), **ROOM)
    with infinity.trace(model, path):
        thread = threading.Thread(target=loss_of(model, batch).backward)
        thread.start()
        thread.join()
    assert {event["name"].split()[0] for event in bars(path) if event["cat"] == "compute"} == {"forward", "backward"}


def test_off_nothing_is_recorded(offload: Any) -> None:
    model = trained(offload, None)
    resources = registry.coordinator_of(model).resources
    assert resources.engine.take_trace() == (b"", 0)
    assert resources.pipeline.take_trace() == (b"", 0)
    assert registry.coordinator_of(model).timeline.stop().spans == []


def test_what_was_dropped_is_said(
    offload: Any, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeline, "_SPANS_MAX", 10)
    with caplog.at_level("WARNING", "infinity"):
        trained(offload, path)
    about = json.loads(path.read_text())["otherData"]
    assert about["dropped"]["spans"] > 0
    assert about["dropped"]["transfers"] == about["dropped"]["tiles"] == 0
    assert "is incomplete" in caplog.text


def test_what_cannot_be_written_is_refused_before_anything_runs(offload: Any, tmp_path: Path) -> None:
    model = offload(llama()[0])
    for path in (tmp_path / "nowhere" / "trace.json", tmp_path, Path("/proc/trace.json")):
        with pytest.raises(infinity.ConfigError, match="cannot write a trace to"), infinity.trace(model, path):
            pytest.fail("it began")
    assert not registry.coordinator_of(model).timeline.recording
    assert {entry.name for entry in tmp_path.iterdir()} == {"swap"}


def test_a_trace_in_a_trace_is_refused_and_the_outer_one_goes_on(offload: Any, path: Path, tmp_path: Path) -> None:
    model, batch = llama()
    model = offload(model)
    with infinity.trace(model, path):
        with pytest.raises(infinity.InfinityError, match="traced already"):
            infinity.trace(model, tmp_path / "inner.json").__enter__()
        loss_of(model, batch)
    assert bars(path)
    assert not (tmp_path / "inner.json").exists()


def test_a_model_that_is_not_offloaded_is_refused(path: Path) -> None:
    with pytest.raises(infinity.ModelError, match="not offloaded"), infinity.trace(llama()[0], path):
        pytest.fail("it began")


def test_what_led_to_an_exception_is_written(offload: Any, path: Path) -> None:
    model, batch = llama()
    model = offload(model)

    def fail() -> None:
        with infinity.trace(model, path):
            loss_of(model, batch)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert any(event["cat"] == "compute" for event in bars(path))
    with infinity.trace(model, path):  # and another can be made
        pass
    assert bars(path) == []


def test_a_failed_transfer_says_so(offload: Any, path: Path) -> None:
    model, batch = llama()
    faults = [_native.Fault(0, "error", 5, repeat=1 << 30, operation="read")]
    model = offload(model, faults=faults)

    def fail() -> None:
        with infinity.trace(model, path):
            loss_of(model, batch)

    with pytest.raises(infinity.SwapIOError):
        fail()
    failed = [event for event in bars(path) if event["args"].get("failed")]
    assert failed
    assert all(event["args"]["bytes"] == 0 for event in failed)


def test_a_model_closed_inside_leaves_a_trace_that_says_what_is_missing(offload: Any, path: Path) -> None:
    model, batch = llama()
    model = offload(model)
    with infinity.trace(model, path):
        loss_of(model, batch)
        infinity.close(model)
    assert json.loads(path.read_text())["otherData"]["missing"] == ["transfers", "tiles"]
    assert any(event["cat"] == "compute" for event in bars(path))


def event(row: str, begin: int, end: int) -> TraceEvent:
    return TraceEvent(row, "x", "x", begin, end, {})


def test_what_overlaps_is_spread_over_lanes() -> None:
    transfers = [event("read weights", *span) for span in ((0, 10), (0, 4), (3, 12), (4, 5), (10, 11))]
    assert chrome_trace.spread(transfers) == [0, 1, 2, 1, 0]


def test_what_is_inside_stays_on_the_lane_of_one_thread() -> None:
    stalls = [event("stalls", *span) for span in ((0, 10), (1, 4), (2, 3), (4, 10), (9, 12), (10, 11))]
    assert chrome_trace.spread(stalls) == [0, 0, 0, 0, 1, 0]


def test_what_reaches_over_the_trace_is_cut() -> None:
    text = "".join(
        chrome_trace.document([event("sync", 0, 150), event("sync", 180, 300), event("sync", 0, 50)], 100, 200, {})
    )
    found = [entry for entry in json.loads(text)["traceEvents"] if entry["ph"] == "X"]
    assert [(entry["ts"], entry["dur"]) for entry in found] == [(0.0, 0.05), (0.08, 0.02)]
