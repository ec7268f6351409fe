"""A device that fails at any operation ends in the right result, or in an error that says what and where."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

import infinity
from infinity import _native
from infinity.schedule import registry
from tests.conftest import weights_of
from tests.models import llama, loss_of


def two_steps(
    offload: Any, engine: str, tmp_path: Any, faults: list[_native.Fault]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Load, two steps, read back; the number of block operations and the weights."""
    torch.manual_seed(0)
    model, batch = llama(layers=1)
    nvme = {"paths": [str(tmp_path / "swap")], "engine": engine, "block": "256KiB"}
    memory = {"device": "300KiB", "host": "64MiB"}
    model = offload(model.bfloat16().train(), nvme=nvme, memory=memory, faults=faults)
    try:
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()
        weights = weights_of(model)
        return registry.ledger_of(model).backing.engine.counters()["operations"], weights
    finally:
        infinity.close(model)


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "EINTR", "EAGAIN", "short"])
def test_a_fault_at_every_operation_is_survived_or_named(kind: str, engine: str, offload: Any, tmp_path: Any) -> None:
    operations, expected = two_steps(offload, engine, tmp_path, [])
    number = 0 if kind == "short" else getattr(errno, kind)
    named = 0
    for index in range(operations):
        try:
            _, weights = two_steps(offload, engine, tmp_path, [_native.Fault(index, number)])
        except infinity.SwapIOError as error:
            named += 1
            assert kind in ("EIO", "ENOSPC"), error
            assert error.errno == number
            assert error.path.endswith(".infinity-swap")
            assert error.unit
            assert error.unit in str(error)
            assert f"offset {error.offset}" in str(error)
            assert error.nbytes > 0
            continue
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), (index, name)
    print(f"{kind} on {engine}: {operations} operations, {named} named errors")
    # A prefetch that nobody came for may fail unnoticed: then the result is right, as checked above.
    assert named >= 0.9 * operations if kind in ("EIO", "ENOSPC") else named == 0


def test_eintr_without_end_is_an_error(offload: Any, tmp_path: Any) -> None:
    with pytest.raises(infinity.SwapIOError) as caught:
        two_steps(offload, "threads", tmp_path, [_native.Fault(40, errno.EINTR, repeat=10**6)])
    assert caught.value.errno == errno.EINTR


def test_after_a_failed_update_the_model_refuses_to_go_on(offload: Any, tmp_path: Any) -> None:
    model, batch = llama()
    model = offload(model.bfloat16().train(), weights="host", faults=[_native.Fault(30, errno.EIO)])
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
