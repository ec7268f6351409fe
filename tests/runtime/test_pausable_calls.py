"""Calls in threads of their own, which run from one place where they park to the next, as micro-batches do."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.runtime.pausable_calls import PausableCall, TorchThreadState
from tests.runtime.vertically import Blocks, Unhappy, inputs, warnings_of


class Parking:
    """A lane whose call notes where it is, and parks in between.

    Attributes:
        seen: what the call has noted.
        lane: that it runs in.
    """

    def __init__(self, call: Callable[[Parking], object]) -> None:
        self.seen: list[str] = []
        self.lane = PausableCall(lambda: call(self), TorchThreadState(None))

    def end(self) -> None:
        """End the lane, which must not take long."""
        ending = threading.Thread(target=self.lane.end, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()


def in_two_parts(of: Parking) -> None:
    try:
        of.seen.append("first")
        of.lane.park()
        of.seen.append("second")
    finally:
        of.seen.append("left")


def test_a_call_goes_on_from_where_it_has_parked() -> None:
    of = Parking(in_two_parts)
    assert of.seen == []
    of.lane.resume()
    assert (of.seen, of.lane.over) == (["first"], False)
    of.lane.resume()
    assert (of.seen, of.lane.over) == (["first", "second", "left"], True)
    of.end()


def test_what_is_behind_the_place_where_a_call_has_parked_does_not_run_once_nobody_wants_it() -> None:
    of = Parking(in_two_parts)
    of.lane.resume()
    of.end()
    assert (of.seen, of.lane.over) == (["first", "left"], True)


def test_a_call_that_never_began_does_not_begin_at_its_end() -> None:
    of = Parking(in_two_parts)
    of.end()
    assert of.seen == []


def test_ctrl_c_comes_when_the_call_has_parked() -> None:
    def interrupted(of: Parking) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        of.seen.append("first")
        of.lane.park()
        of.seen.append("second")

    of = Parking(interrupted)
    with pytest.raises(KeyboardInterrupt):
        of.lane.resume()
    assert of.seen == ["first"]
    of.end()
    assert (of.seen, of.lane.over) == (["first"], True)


def test_a_call_that_goes_on_once_nobody_wants_it_ends_where_it_would_park_again() -> None:
    def stubborn(of: Parking) -> None:
        for _ in range(3):
            try:
                of.lane.park()
            finally:
                of.seen.append("left")
                with contextlib.suppress(BaseException):
                    of.lane.park()

    of = Parking(stubborn)
    of.lane.resume()
    of.end()
    assert (of.seen, of.lane.over) == (["left"], True)


def test_what_a_call_raises_comes_out_of_resume_once() -> None:
    def fail(of: Parking) -> None:
        raise ArithmeticError("of the call")

    of = Parking(fail)
    with pytest.raises(ArithmeticError, match="of the call"):
        of.lane.resume()
    assert of.lane.over
    of.end()


# -- micro-batches -----------------------------------------------------------------------------------------------------


def test_after_an_exception_no_other_micro_batch_goes_on(offload: Any, tmp_path: Path) -> None:
    """The first one fails in the last stage, before which the others wait."""
    model, ended = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]}), list[int]()

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        ended.append(len(x))
        return loss

    def fail(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if len(output) == 4:
            raise Unhappy

    infinity.backward(model, model, inputs())
    model.zero_grad()
    hook = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(Unhappy):
        infinity.backward(model, loss_fn, inputs())
    hook.remove()
    assert ended == []
    model.zero_grad()
    infinity.backward(model, loss_fn, inputs())
    assert ended == [4, 5, 6]


def test_autocast_and_modes_are_those_of_the_caller(offload: Any, tmp_path: Path) -> None:
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted[threading.current_thread().name] += func is torch.tanh
            return func(*args, **(kwargs or {}))

    model, seen, counted = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]}), [], Counter[str]()

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        with torch.autocast("cpu", enabled=False):
            loss: torch.Tensor = model(x)
        return loss

    for _ in range(2):
        with torch.autocast("cpu", torch.float16), Counting():
            infinity.backward(model, loss_fn, inputs())
    assert seen == [(True, torch.float16)] * 7
    assert counted == {"MainThread": 3, "infinity-lane": 18}


def test_reentrant_checkpoints_of_other_threads_are_left_alone(offload: Any, tmp_path: Path) -> None:
    model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]})
    infinity.backward(model, model, inputs())
    plain, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        def work() -> None:
            checkpoint(plain, x, use_reentrant=True).sum().backward()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        loss: torch.Tensor = model(batch)
        return loss

    infinity.backward(model, loss_fn, inputs())
    assert plain.weight.grad is not None
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


def test_a_loss_function_may_take_the_gradients_of_another_model_first(offload: Any, tmp_path: Path) -> None:
    def made(name: str) -> Any:
        return offload(Blocks().train(), nvme={"paths": [str(tmp_path / name)]})

    model, other, order = made("one"), made("other"), list[tuple[int, int]]()
    infinity.backward(model, model, inputs())
    for at, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, args, output, at=at: order.append((at, len(output))))

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        infinity.backward(other, other, inputs())
        loss: torch.Tensor = model(x)
        return loss

    infinity.backward(model, loss_fn, inputs())
    assert order == [(0, 6), (0, 5), (0, 4), (1, 4), (1, 5), (1, 6), (2, 4), (2, 5), (2, 6)]


def test_saved_tensor_hooks_around_the_call_keep_the_ordinary_order(
    offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(caplog)
    model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]})
    infinity.backward(model, model, inputs())
    assert warnings() == []
    with torch.autograd.graph.save_on_cpu():
        infinity.backward(model, model, inputs())
    assert "because it is called in a context of saved-tensor hooks" in warnings()[0]
