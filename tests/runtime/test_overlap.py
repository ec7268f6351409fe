"""Whenever the updates run, thirty steps (ten in `make test`) end in the same bits: with clipping or without, with
accumulation, commits, states anywhere, learning rates that change with every step, a step that is skipped. Ten steps on
the simulated device end in those that the CPU has after ten.

`make test` takes a sample of the combinations in which every two values meet; `make overlap-test` takes all of them.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import _native
from infinity.config import load_config
from infinity.coordinator import registry
from infinity.io.directory import generations_in
from infinity.io.manifest import read_manifest
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from tests import sampling
from tests.conftest import require_no_leaks, states_of, weights_of
from tests.models import llama, loss_of

STEPS, SIMULATED_STEPS = sampling.number(10, 30), 10
NAN_STEP = 5

AXES: dict[str, tuple[Any, ...]] = {
    "overlap": ("auto", "during_backward", "before_forward", "off"),
    "clipping": ("never", "sometimes", "always"),
    "accumulation": (1, 4),
    "commit_every": (0, 1, 5),
    "weights": ("nvme", "host"),
    "cached": ("none", "half", "all"),
    "moments": ("fp32", "int8"),
}
Combination = dict[str, Any]
Values = dict[str, torch.Tensor]
Result = tuple[list[float], list[float], Values, int, int]


def model_and_batches(accumulation: int) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model, batch = llama()
    batches = []
    for index in range(accumulation):
        ids = torch.roll(batch["input_ids"], index, dims=1)
        batches.append({"input_ids": ids, "labels": ids})
    return model.bfloat16().train(), batches


def config_of(path: Path, weights: str, cached: str, **config: Any) -> dict[str, Any]:
    given = {
        "weights": weights,
        "optimizer": {"none": "nvme", "half": "auto", "all": "host"}[cached],
        "activations": "keep",
        "memory": {"device": "640KiB", "host": "64MiB"},
        "nvme": {"paths": [str(path)]},
        "commit_every": 0,
        "update": {"tile": "64KiB", "threads": 2},
    } | config
    if cached == "half":
        plan = make_plan(
            discover(model_and_batches(1)[0], given["moments"]).units,
            OffloadArguments(load_config(given | {"optimizer": "nvme", "overlap": "off"}), torch.device("cpu")),
            can_recompute=False,
        )
        given["memory"]["host"] = plan.host_bytes + plan.layout.state_bytes // 2 + plan.layout.weight_bytes // 2
    return given


def train(
    path: Path, clip: float | None, accumulation: int, steps: int, on_the_way: dict[int, Values], **config: Any
) -> Result:
    """Train a model.

    Args:
        path: the swap directory.
        clip: max_grad_norm of the optimizer; None for no clipping.
        accumulation: micro-batches of a step.
        steps: number of steps.
        on_the_way: has the numbers of steps after which it gets the weights and moments.
        **config: further keys of the swap config.

    Returns:
        Losses, norms, weights and moments after the last step; the number of speculative updates that were right; and
        the number of tiles of others that were read before the step was decided.
    """
    model, batches = model_and_batches(accumulation)
    model = infinity.offload(model, config_of(path, **config))
    optim = infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=clip)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0 / (1 + step % 7))
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for index, batch in enumerate(batches):
            loss = loss_of(model, batch) / accumulation
            (loss * float("nan") if step == NAN_STEP and index == accumulation - 1 else loss).backward()
            total += loss.item()
        before = (weights_of(model), states_of(model)) if step == NAN_STEP else None
        optim.step()
        if before is not None:
            assert all(torch.equal(value, before[0][name]) for name, value in weights_of(model).items())
            assert all(torch.equal(value, before[1][name]) for name, value in states_of(model).items())
        optim.zero_grad()
        schedule.step()
        losses.append(total)
        norms.append(optim.last_grad_norm)
        if step + 1 in on_the_way:
            on_the_way[step + 1] = weights_of(model) | states_of(model)
    assert optim.skipped_steps == 1
    coordinator = registry.coordinator_of(model)
    right, ahead = coordinator.speculation_choice.counts.early, coordinator.resources.pipeline.counters()["ahead"]
    result = losses, norms, weights_of(model) | states_of(model), right, ahead
    require_no_leaks(model)
    infinity.close(model, discard=True)
    return result


Expected = tuple[list[float], list[float], dict[int, Values]]
_expected: dict[tuple[str, int, str], Expected] = {}
_thresholds: dict[tuple[int, str], float] = {}


def clip_of(path: Path, clipping: str, accumulation: int, moments: str) -> float | None:
    """`sometimes` is the median of the norms that a run without clipping has."""
    if clipping != "sometimes":
        return {"never": 1e9, "always": 0.01}[clipping]
    key = accumulation, moments
    if key not in _thresholds:
        norms = expected(path, "never", accumulation, moments)[1]
        _thresholds[key] = sorted(norm for norm in norms if norm == norm)[len(norms) // 2]
    return _thresholds[key]


def expected(path: Path, clipping: str, accumulation: int, moments: str) -> Expected:
    """Everything in RAM, one phase after the other: losses and norms of all steps, values after so many of them."""
    key = clipping, accumulation, moments
    if key not in _expected:
        clip = clip_of(path, clipping, accumulation, moments)
        values: dict[int, Values] = {SIMULATED_STEPS: {}, STEPS: {}}
        config = {"weights": "host", "cached": "all", "overlap": "off", "commit_every": 0, "moments": moments}
        losses, norms, *_ = train(path / "none", clip, accumulation, STEPS, values, **config)
        _expected[key] = losses, norms, values
    return _expected[key]


@pytest.fixture(scope="module")
def combination(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Combination:
    """With the norm to clip to, and what is expected. A module's fixture is made before a test's device is simulated:
    that trained on the CPU."""
    made, path = dict(request.param), tmp_path_factory.mktemp("expected")
    case = made.pop("clipping"), made["accumulation"], made["moments"]
    return made | {"clip": clip_of(path, *case), "expected": expected(path, *case), "clipping": case[0]}


def _id(combination: Combination) -> str:
    return "-".join(str(value) for value in combination.values())


def combinations() -> list[Combination]:
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    if os.environ.get("INFINITY_OVERLAP_FULL"):
        return every
    return sampling.drawn(every, every, sampling.STRENGTH)


@pytest.mark.long(kept="overlap, clipping, accumulation, commits and placement meet nowhere else")
@pytest.mark.parametrize("combination", combinations(), ids=_id, indirect=True)
def test_every_overlap_ends_in_the_same_bits(combination: Combination, tmp_path: Path, computes_on: Any) -> None:
    combination = dict(combination)  # it is the same object on each device
    in_place = computes_on is None
    steps = STEPS if in_place else SIMULATED_STEPS
    losses, norms, values = combination.pop("expected")
    clip, clipping = combination.pop("clip"), combination.pop("clipping")
    found = train(tmp_path / "swap", clip, combination.pop("accumulation"), steps, {}, **combination)
    assert found[0] == losses[:steps]
    torch.testing.assert_close(found[1], norms[:steps], rtol=0, atol=0, equal_nan=True)
    assert found[2].keys() == values[steps].keys()
    for name, value in found[2].items():
        assert torch.equal(value, values[steps][name]), name
    speculates = combination["overlap"] in ("auto", "during_backward") and clipping == "never"
    if speculates and combination["cached"] == "none" and combination["commit_every"] <= 1:
        assert found[3] > steps, "hardly any update speculated"
    if (
        speculates
        and combination["cached"] == "all"
        and (combination["weights"], combination["commit_every"])
        != (
            "nvme",
            5,
        )
    ):
        assert (found[3] > steps) == (combination["overlap"] == "during_backward" or not in_place)
    if combination["overlap"] in ("off", "before_forward"):
        assert found[3] == 0
    if combination["overlap"] == "off" or combination["cached"] == "all":
        assert found[4] == 0
    waits = combination["overlap"] == "before_forward" or (combination["overlap"] == "auto" and clipping == "always")
    if waits and combination["cached"] == "none":
        first = 0 if in_place else 4  # in which `auto` learns that every step clips, and one is skipped
        assert found[4] > steps - first, "hardly anything was read ahead"


def test_a_first_step_that_is_skipped_after_speculative_updates_is_committed(tmp_path: Path) -> None:
    """A speculation that comes to nothing leaves no parameter with a state that no step made."""
    model, (batch, *_) = model_and_batches(2)
    config = config_of(tmp_path, "nvme", "none", overlap="during_backward", moments="fp32", commit_every=1)
    model = infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters(), accumulation_steps=1)
    loss_of(model, batch).backward()
    assert registry.coordinator_of(model).update_queue.speculative
    norm = model.model.norm.weight
    norm.grad = torch.full_like(norm, float("nan"))
    optim.step()
    assert optim.skipped_steps == 1
    assert not optim.state
    infinity.commit(model)
    infinity.close(model, discard=True)


class HalfUsed(nn.Module):
    """One unit, an fp32 group and a bf16 one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 64).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.used) ** 2).mean()


def test_a_group_without_gradients_keeps_its_weights_when_the_unit_moves_in_ram(offload: Any) -> None:
    """Its bf16 weights have none while its fp32 ones are updated speculatively, into other memory."""

    def run(**config: Any) -> list[torch.Tensor]:
        model, unused = offload(HalfUsed(), weights="host", **config), []
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(4):
            model(torch.ones(8, 64)).backward()
            optim.step()
            optim.zero_grad()
            unused.append(weights_of(model)["unused"])
        return unused

    for weight in run(optimizer="nvme", overlap="during_backward"):
        assert torch.equal(weight, torch.ones(64, 64).bfloat16())


def speculated(offload: Any) -> tuple[Any, Any, Any]:
    """Return a model between backward and step, with updates in progress."""
    model, batches = model_and_batches(1)
    model = offload(model, overlap="during_backward")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, batches[0]).backward()
    assert registry.coordinator_of(model).update_queue.speculative
    return model, optim, batches[0]


def test_an_update_that_may_be_undone_leaves_no_trace_in_the_optimizer(offload: Any) -> None:
    _, optim, _ = speculated(offload)
    assert optim.state_dict()["state"] == {}


def test_zero_grad_undoes_the_updates_that_began_with_the_gradients(offload: Any) -> None:
    model, optim, _ = speculated(offload)
    before = weights_of(model)
    optim.zero_grad()
    assert not registry.coordinator_of(model).update_queue.speculative
    optim.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


def test_a_step_after_an_interrupted_zero_grad_is_a_step(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while speculative updates are undone."""
    model, optim, batch = speculated(offload)
    cancel = _native.UpdatePipeline.cancel

    def canceled(pipeline: Any, future: Any) -> None:
        cancel(pipeline, future)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_native.UpdatePipeline, "cancel", canceled)
    with pytest.raises(KeyboardInterrupt):
        optim.zero_grad()
    monkeypatch.undo()
    optim.step()
    infinity.synchronize(model)
    loss_of(model, batch).backward()
    optim.step()
    infinity.synchronize(model)


def test_what_was_read_ahead_stays_right_through_a_skipped_step_and_a_dropped_gradient(tmp_path: Path) -> None:
    results = []
    for overlap in ("before_forward", "off"):
        model, (batch, *_) = model_and_batches(1)
        config = config_of(tmp_path / overlap, "nvme", "none", overlap=overlap, moments="fp32", commit_every=0)
        model = infinity.offload(model, config)
        optim = infinity.AdamW(model.parameters(), lr=1e-3, accumulation_steps=1)
        for turn in range(6):
            loss = loss_of(model, batch)
            (loss * float("nan") if turn == 1 else loss).backward()
            if turn == 3:
                infinity.synchronize(model)
            elif turn != 2:
                optim.step()
            optim.zero_grad()
        assert optim.skipped_steps == 1
        ahead = registry.coordinator_of(model).resources.pipeline.counters()["ahead"]
        assert (ahead > 0) == (overlap != "off")
        loss_of(model, batch).backward()  # closed with states that were read for no step
        results.append(weights_of(model) | states_of(model))
        infinity.close(model, discard=True)
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_a_commit_between_backward_and_step_is_not_written_over(weights: str, tmp_path: Path) -> None:
    """A speculative update writes to copies that no generation names: so does a commit of what is only in RAM."""
    config = config_of(tmp_path / "swap", weights, "none", overlap="during_backward", commit_every=2, moments="fp32")
    model, batches = model_and_batches(1)
    model = infinity.offload(model, config | {"keep": 2})
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    after = {}
    for step in range(1, 5):
        loss_of(model, batches[0]).backward()
        if step == 4:
            assert registry.coordinator_of(model).update_queue.speculative
            infinity.commit(model)
        optim.step()
        optim.zero_grad()
        after[step] = weights_of(model) | states_of(model)
    infinity.close(model)
    for step in (4, 3):
        model = infinity.resume(model_and_batches(1)[0], config | {"keep": 2}, step=step)
        found = weights_of(model) | states_of(model)
        assert all(torch.equal(values, after[step][name]) for name, values in found.items()), step
        infinity.close(model)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize(("place", "commit_every"), [("nvme", 1), ("host", 2), ("host", 3)])
def test_what_memory_held_before_is_not_in_a_generation(
    place: str, commit_every: int, moments: str, tmp_path: Path
) -> None:
    """Whole pages are written, and the last element of a state lies amid one.

    The last step is not due for a commit: its values in RAM, which speculative updates put into shadows, are written
    when the model is closed.
    """
    sums = []
    for held in (b"\xaa", b"\x55"):
        path = tmp_path / held.hex()
        model, batches = model_and_batches(1)
        cached = "all" if place == "host" else "none"
        given = config_of(path, place, cached, overlap="during_backward", moments=moments, commit_every=commit_every)
        model = infinity.offload(model, given)
        resources = registry.coordinator_of(model).resources
        for memory in (resources.staging.view(), *resources.resting.free_views()):
            memory[:] = held * len(memory)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        for _ in range(commit_every + 1):
            loss_of(model, batches[0]).backward()
            optim.step()
            optim.zero_grad()
        assert infinity.statistics(model).updates.early > 0
        infinity.close(model)
        newest = max(generations_in(path).items())[1]
        sums.append(read_manifest(newest).sums)
    assert sums[0] == sums[1]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("weights", ["host", "nvme"])
@pytest.mark.parametrize("commit_every", [0, 1])
def test_a_second_step_with_the_same_gradients_goes_on_from_the_first(
    commit_every: int, weights: str, tmp_path: Path
) -> None:
    """No forward comes between: what was fetched for the first is not what the second begins with."""
    found = []
    for overlap in ("off", "during_backward"):
        config = config_of(tmp_path / overlap, weights, "none", overlap=overlap, moments="fp32")
        model, batches = model_and_batches(1)
        model = infinity.offload(model, config | {"commit_every": commit_every})
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            loss_of(model, batches[0]).backward()
            optim.step()
            optim.step()
            optim.zero_grad()
        found.append(weights_of(model) | states_of(model))
        if overlap == "during_backward":
            assert infinity.statistics(model).updates.early > 0
        infinity.close(model, discard=True)
    assert all(torch.equal(values, found[0][name]) for name, values in found[1].items())


@pytest.mark.cpu_only("a device computes with copies")
def test_a_view_of_weights_in_ram_stays_one_of_them(tmp_path: Path) -> None:
    """Step after step, while the homes of others move about."""
    config = config_of(tmp_path / "swap", "host", "none", overlap="during_backward", moments="fp32")
    model, batches = model_and_batches(1)
    model = infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    layer, views = model.model.layers[1].mlp.up_proj, []  # in each step its update goes to other memory
    handle = layer.register_forward_hook(lambda module, *_: views.append(module.weight.detach()))
    loss_of(model, batches[0])
    handle.remove()
    name = next(name for name, parameter in model.named_parameters() if parameter is layer.weight)
    for _ in range(4):
        loss_of(model, batches[0]).backward()
        optim.step()
        optim.zero_grad()
        assert torch.equal(views[0], weights_of(model)[name])
    assert infinity.statistics(model).updates.early > 0
    infinity.close(model)
