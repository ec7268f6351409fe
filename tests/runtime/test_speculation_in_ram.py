"""Updates of units whose states rest in RAM speculate, too: the bits are those of a run that does not, whatever the
optimizer, the form and the place, and what comes to nothing leaves everything as it was.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.units.unit import OffloadedUnit
from tests import sampling
from tests.conftest import require_no_leaks, residuals_of, states_of, weights_of
from tests.models import loss_of
from tests.runtime.test_overlap import config_of, model_and_batches

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda parameters: infinity.AdamW(parameters, lr=1e-2),
    "lion": lambda parameters: infinity.Lion(parameters, lr=1e-3),
    "adagrad": lambda parameters: infinity.Adagrad(parameters, lr=1e-2),
    "sgd": lambda parameters: infinity.SGD(parameters, lr=1e-2, momentum=0.9),
}
CASES = [
    pytest.param(name, dtype, moments, weights, id=f"{name}-{str(dtype)[6:]}-{moments}-{weights}")
    for name in OPTIMIZERS
    for dtype in (torch.float32, torch.bfloat16)
    for moments in ("fp32", "int8")
    for weights in ("host", "nvme")
    if (name, moments) != ("adagrad", "int8")  # which is refused
]


def drawn() -> list[Any]:
    """In `make test` each value is in a case, in the long forms any two values are."""
    axes = [dict(zip("odmw", case.values, strict=True)) for case in CASES]
    return sampling.drawn(CASES, axes, sampling.STRENGTH)


def offloaded(path: Path, dtype: torch.dtype = torch.bfloat16, **config: Any) -> tuple[Any, list[Any]]:
    given = {"weights": "host", "cached": "all", "overlap": "during_backward", "moments": "fp32"} | config
    model, batches = model_and_batches(1)
    return infinity.offload(model.to(dtype), config_of(path, **given)), batches


def everything(model: Any) -> dict[str, Any]:
    return weights_of(model) | states_of(model) | dict(residuals_of(model))


def require_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        same = value == wanted[name] if isinstance(value, bytes) else torch.equal(value, wanted[name])
        assert same, name


def homes_moved(model: Any) -> list[int]:
    homes = [home for unit in registry.coordinator_of(model).units for home in unit.homes if home.in_memory]
    return [home.lease.offset for home in homes if home.lease is not None]


@pytest.mark.parametrize(("optimizer", "dtype", "moments", "weights"), drawn())
def test_every_optimizer_ends_in_the_bits_of_a_run_that_waits(
    optimizer: str, dtype: torch.dtype, moments: str, weights: str, tmp_path: Path
) -> None:
    """The plan has room for both moments: one that the optimizer does not use keeps its bits where it is."""
    found = []
    for overlap in ("off", "during_backward"):
        model, batches = offloaded(tmp_path / overlap, dtype, overlap=overlap, moments=moments, weights=weights)
        optim, before = OPTIMIZERS[optimizer](model.parameters()), homes_moved(model)
        for _ in range(4):
            loss_of(model, batches[0]).backward()
            optim.step()
            optim.zero_grad()
        found.append(everything(model))
        assert (infinity.statistics(model).updates.early > 0) == (overlap != "off")
        assert (homes_moved(model) != before) == (overlap != "off")
        require_no_leaks(model)
        infinity.close(model, discard=True)
    require_same(found[1], found[0])


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("weights", ["host", "nvme"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_what_comes_to_nothing_leaves_every_bit(moments: str, weights: str, tmp_path: Path) -> None:
    model, batches = offloaded(tmp_path, moments=moments, weights=weights)
    optim = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9)
    loss_of(model, batches[0]).backward()
    optim.step()
    optim.zero_grad()
    before = everything(model)
    for _ in range(2):
        loss_of(model, batches[0]).backward()
        coordinator = registry.coordinator_of(model)
        speculative = coordinator.update_queue.speculative
        assert any(unit.homes.all_states()[0].in_memory for unit in speculative)
        for unit in speculative:
            assert unit.update is not None
            unit.update.wait("computed")
        optim.zero_grad()
        require_same(everything(model), before)
    require_no_leaks(model)
    infinity.close(model, discard=True)


def _another_learning_rate(model: Any, optim: Any, batch: Any) -> None:
    loss_of(model, batch).backward()
    optim.param_groups[0]["lr"] = 1e-3
    optim.step()
    optim.param_groups[0]["lr"] = 1e-2


def _another_gradient(model: Any, optim: Any, batch: Any) -> None:
    loss_of(model, batch).backward()
    loss_of(model, batch).backward()
    optim.step()


def _an_exception_in_backward(model: Any, optim: Any, batch: Any) -> None:
    loss, raised = loss_of(model, batch), []

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raised.append(True)
        raise RuntimeError("in backward")

    handle = next(iter(model.model.layers)).register_forward_hook(
        lambda module, args, output: (output[0] if isinstance(output, tuple) else output).register_hook(fail) and None
    )
    loss = loss_of(model, batch)
    handle.remove()
    with pytest.raises(RuntimeError, match="in backward"):
        loss.backward()
    assert raised
    optim.zero_grad()
    loss_of(model, batch).backward()
    optim.step()


def _a_commit_before_the_step(model: Any, optim: Any, batch: Any) -> None:
    loss_of(model, batch).backward()
    infinity.synchronize(model)
    everything(model)
    optim.step()


DISTURBED = [_another_learning_rate, _another_gradient, _an_exception_in_backward, _a_commit_before_the_step]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("disturb", DISTURBED, ids=lambda act: act.__name__[1:])
@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_what_disturbs_a_step_changes_no_bit(disturb: Callable[..., None], weights: str, tmp_path: Path) -> None:
    found = []
    for overlap in ("off", "during_backward"):
        model, batches = offloaded(tmp_path / overlap, overlap=overlap, weights=weights)
        optim = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e9)
        for turn in range(5):
            if turn % 2:
                disturb(model, optim, batches[0])
            else:
                loss_of(model, batches[0]).backward()
                optim.step()
            optim.zero_grad()
        found.append(everything(model))
        assert (infinity.statistics(model).updates.early > 0) == (overlap != "off")
        require_no_leaks(model)
        infinity.close(model, discard=True)
    require_same(found[1], found[0])


@pytest.mark.parametrize("call", ["submit", "cancel", "withdraw"])
def test_ctrl_c_at_any_call_of_the_pipeline_leaves_a_run_that_goes_on(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = offloaded(tmp_path)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    original = getattr(_native.UpdatePipeline, call)

    def interrupted(pipeline: Any, *given: Any, **named: Any) -> Any:
        result = original(pipeline, *given, **named)
        signal.raise_signal(signal.SIGINT)
        return result

    loss = loss_of(model, batches[0])
    if call != "submit":
        loss.backward()
    monkeypatch.setattr(_native.UpdatePipeline, call, interrupted)
    act = {"submit": loss.backward, "cancel": optim.zero_grad, "withdraw": optim.step}[call]
    with pytest.raises(KeyboardInterrupt):
        act()
    monkeypatch.undo()
    optim.zero_grad()
    for _ in range(3):
        loss_of(model, batches[0]).backward()
        optim.step()
        optim.zero_grad()
    infinity.synchronize(model)
    require_no_leaks(model)
    infinity.close(model, discard=True)


def test_a_loss_scale_that_grows_and_falls_changes_no_bit(tmp_path: Path) -> None:
    """A step that is skipped, too: its speculative updates come to nothing."""
    found, skipped = [], []
    for overlap in ("off", "during_backward"):
        model, batches = offloaded(tmp_path / overlap, torch.float16, overlap=overlap)
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for step in range(8):
            loss = scaler.scale(loss_of(model, batches[0]))
            (loss * float("inf") if step == 4 else loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        found.append(everything(model))
        skipped.append(optim.skipped_steps)
        assert (infinity.statistics(model).updates.early > 0) == (overlap != "off")
        require_no_leaks(model)
        infinity.close(model, discard=True)
    require_same(found[1], found[0])
    assert skipped[0] == skipped[1] >= 1


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_a_resumed_run_goes_on_from_states_that_moved(weights: str, commit_every: int, tmp_path: Path) -> None:
    config = {"weights": weights, "commit_every": commit_every}
    model, batches = offloaded(tmp_path / "swap", **config)
    optim, after = infinity.AdamW(model.parameters(), lr=1e-2), {}
    for step in range(1, 8):
        loss_of(model, batches[0]).backward()
        optim.step()
        optim.zero_grad()
        after[step] = everything(model)
    assert infinity.statistics(model).updates.early > 0
    infinity.close(model)
    given = {"weights": weights, "cached": "all", "overlap": "during_backward", "moments": "fp32"}
    resumed = infinity.resume(
        model_and_batches(1)[0], config_of(tmp_path / "swap", **given | {"commit_every": commit_every})
    )
    require_same(everything(resumed), after[registry.coordinator_of(resumed).steps])
    assert registry.coordinator_of(resumed).steps >= 6
    infinity.close(resumed, discard=True)


def test_where_free_memory_is_in_pieces_updates_come_with_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other page of the shadows' memory is taken. Units that fit speculate, and all are updated."""
    found, early = [], []
    for pieces in (False, True):
        model, batches = offloaded(tmp_path / str(pieces))
        shadows, taken = registry.coordinator_of(model).update_queue.shadows, []
        while pieces and (lease := shadows.try_lease(4096)) is not None:
            taken.append(lease)
        for lease in taken[::2]:
            shadows.give_back(lease)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            loss_of(model, batches[0]).backward()
            optim.step()
            optim.zero_grad()
        found.append(everything(model))
        early.append(infinity.statistics(model).updates.early)
        for lease in taken[1::2]:
            shadows.give_back(lease)
        require_no_leaks(model)
        infinity.close(model, discard=True)
    require_same(found[1], found[0])
    assert early[0] > early[1]


@pytest.mark.cpu_only("a device's auto speculates")
def test_auto_does_not_speculate_in_ram_where_the_model_computes_in_host_memory(tmp_path: Path) -> None:
    model, batches = offloaded(tmp_path, overlap="auto")
    assert registry.coordinator_of(model).plan.budgets.shadow_bytes == 0
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batches[0]).backward()
    units: list[OffloadedUnit] = registry.coordinator_of(model).update_queue.speculative
    assert units == []
    optim.step()
    infinity.close(model, discard=True)
