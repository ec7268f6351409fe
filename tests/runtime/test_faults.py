"""A device that fails at any operation ends in the right result, or in an error that says what and where."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

import infinity
from infinity import _native
from infinity.coordinator import registry
from tests import sampling
from tests.conftest import weights_of
from tests.models import llama, loss_of

ERRORS = ["EIO", "ENOSPC", "EINVAL", "ENOMEM", "ENODEV"]
"""The device says no: every one must be raised with its number."""
SURVIVED = ["EINTR", "EAGAIN", "cut", "delay"]
"""Tried again, continued, or put in order: every run must end well."""
SILENT = ["flip", "stale", "misdirect"]
"""The device says yes and lies: what is read must be right, or a SwapCorruptionError."""
LOST = ["lose"]
"""No answer ever comes: a SwapTimeoutError, and nothing hangs."""
KINDS = ERRORS + SURVIVED + SILENT + LOST
ENGINES = ["io_uring", "threads"]
STRIDE = len(KINDS) * len(ENGINES)  # the sample has every so many operations: each fails in one way on one engine


def fault(index: int, kind: str) -> _native.Fault:
    number = getattr(errno, kind, 0)
    return _native.Fault(index, "error", number) if number else _native.Fault(index, kind)  # type: ignore[arg-type]


def two_steps(
    offload: Any, engine: str, tmp_path: Any, faults: list[_native.Fault], deadline_s: float = 300.0
) -> tuple[int, dict[str, torch.Tensor]]:
    """Load, two steps, read back; the number of block operations and the weights."""
    torch.manual_seed(0)
    model, batch = llama(layers=1)
    nvme = {"paths": [str(tmp_path / "swap")], "engine": engine, "block": "256KiB", "deadline_s": deadline_s}
    memory = {"device": "300KiB", "host": "64MiB"}
    model = offload(model.bfloat16().train(), nvme=nvme, memory=memory, faults=faults)
    try:
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()
        weights = weights_of(model)
        return registry.coordinator_of(model).resources.engine.counters()["operations"], weights
    finally:
        infinity.close(model)


def check_names(error: infinity.SwapIOError) -> None:
    assert error.path.endswith(".infinity-swap")
    assert error.unit
    assert error.unit in str(error)
    assert f"offset {error.offset}" in str(error)
    assert error.nbytes > 0


def chosen(kind: str, engine: str, operations: int) -> list[int]:
    """Return the operations to fail: a few, different ones for each kind and engine; all in make faults-test."""
    few = range(len(ENGINES) * KINDS.index(kind) + ENGINES.index(engine), operations, STRIDE)
    return sorted([*few, *sampling.some(sorted(set(range(operations)).difference(few)))])


_undisturbed: dict[tuple[str, bool], tuple[int, dict[str, torch.Tensor]]] = {}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_operation_is_survived_or_named(
    kind: str, engine: str, offload: Any, tmp_path: Any, computes_on: Any
) -> None:
    where = engine, computes_on is None
    if where not in _undisturbed:
        _undisturbed[where] = two_steps(offload, engine, tmp_path, [])
    operations, expected = _undisturbed[where]
    deadline_s = 0.1 if kind in LOST else 300.0
    named, indices = 0, chosen(kind, engine, operations)
    for index in indices:
        try:
            _, weights = two_steps(offload, engine, tmp_path, [fault(index, kind)], deadline_s)
        except infinity.SwapIOError as error:
            named += 1
            check_names(error)
            assert kind not in SURVIVED, error
            if kind in ERRORS:
                assert error.errno == getattr(errno, kind)
            assert isinstance(error, infinity.SwapCorruptionError) == (kind in SILENT), error
            assert isinstance(error, infinity.SwapTimeoutError) == (kind in LOST), error
            continue
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), (index, name)
    print(f"{kind} on {engine}: {len(indices)} of {operations} cases, {named} named, {len(indices) - named} right")
    # A prefetch that nobody came for may fail unnoticed, and damage that nobody reads does no harm: of a sample one
    # error may be missing, and all damage may be harmless.
    whole = len(indices) == operations
    least = {**dict.fromkeys(ERRORS + LOST, 0.9), **dict.fromkeys(SILENT, 0.3 if whole else 0)}
    assert named + (not whole) >= least.get(kind, 0) * len(indices)


def test_eintr_without_end_is_an_error(offload: Any, tmp_path: Any) -> None:
    with pytest.raises(infinity.SwapIOError) as caught:
        two_steps(offload, "threads", tmp_path, [_native.Fault(40, "error", errno.EINTR, repeat=10**6)])
    assert caught.value.errno == errno.EINTR


def test_after_a_failed_update_the_model_refuses_to_go_on(offload: Any, tmp_path: Any) -> None:
    model, batch = llama()
    model = offload(model.bfloat16().train(), weights="host", faults=[_native.Fault(30, "error", errno.EIO)])
    optim = infinity.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(100):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()

    with pytest.raises(infinity.SwapIOError, match="optimizer states of unit"):
        train()
    with pytest.raises(infinity.InfinityError, match="damaged by an earlier failure"):
        loss_of(model, batch)
    with pytest.raises(infinity.InfinityError, match="damaged by an earlier failure"):
        infinity.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
