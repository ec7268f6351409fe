"""A model that several threads call: two forwards at a time are refused, and one after the other are not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.errors import ModelError
from tests.conftest import weights_of

WIDTH = 32
TIGHT = {"host": "1MiB"}
BATCH = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class Blocks(nn.Module):
    """With weights of its own, so that a call of it uses a unit. Attributes: amid: called between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.amid: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) * self.scale
            if number == 1:
                self.amid()
        return x.square().mean()


def step(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights after a step."""
    loss.backward()
    optim = infinity.SGD(model.parameters(), lr=0.5)
    optim.step()
    optim.zero_grad()
    return weights_of(model)


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.fixture
def expected(offload: Any) -> dict[str, torch.Tensor]:
    """The weights after a step of a model that one thread calls."""
    model = offload(Blocks(), "host")
    return step(model, model(BATCH))


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("graph", [True, False])
def test_a_forward_amid_that_of_another_thread_is_refused_and_disturbs_nothing(
    graph: bool, offload: Any, expected: dict[str, torch.Tensor]
) -> None:
    model = offload(Blocks(), "nvme", memory=TIGHT)
    refused: list[BaseException | None] = []
    units = registry.coordinator_of(model).units

    def second() -> None:
        with torch.set_grad_enabled(graph):
            model(BATCH)

    def meanwhile() -> None:
        uses = [unit.weights.uses for unit in units]
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(second).exception())
        assert [unit.weights.uses for unit in units] == uses

    model.amid = meanwhile
    loss = model(BATCH)
    model.amid = lambda: None
    assert [str(error) for error in refused if isinstance(error, ModelError) and "another thread" in str(error)]
    require_equal(step(model, loss), expected)
    assert not [unit.name for unit in units if unit.weights.uses]


def test_threads_that_take_turns_with_a_lock_train_as_one(offload: Any, expected: dict[str, torch.Tensor]) -> None:
    """Which the refusal advises."""
    model = offload(Blocks(), "nvme", memory=TIGHT)
    lock, both = threading.Lock(), threading.Barrier(2)

    def forward() -> torch.Tensor:
        both.wait(60)
        with lock:
            return model(BATCH)

    with ThreadPoolExecutor(2) as pool:
        losses = [each.result() for each in [pool.submit(forward) for _ in range(2)]]
    require_equal(in_thread(lambda: step(model, losses[0])), expected)


def test_a_thread_whose_forward_died_leaves_the_model_to_others_and_may_come_again(
    offload: Any, expected: dict[str, torch.Tensor]
) -> None:
    """SystemExit skips the hooks behind a forward, as Ctrl-C does."""
    model = offload(Blocks(), "nvme", memory=TIGHT)

    def end() -> None:
        raise SystemExit

    with ThreadPoolExecutor(1) as pool:
        model.amid = end
        died: Future[Any] = pool.submit(model, BATCH)
        assert isinstance(died.exception(), SystemExit)
        model.amid = lambda: None
        model(BATCH)
        require_equal(pool.submit(lambda: step(model, model(BATCH))).result(), expected)
        assert pool.submit(torch._C._autograd._top_saved_tensors_default_hooks, True).result() is None


def test_a_norm_that_another_thread_logs_waits_for_changes_of_the_gradient(offload: Any) -> None:
    """A backward pass changes the gradients under the model's lock; here the test holds the lock."""
    model = offload(Blocks(), "host")
    model(BATCH).backward()
    gradient = model.blocks[0].weight.grad
    with ThreadPoolExecutor(1) as pool, registry.coordinator_of(model).locked():
        norm = pool.submit(gradient.norm)
        with pytest.raises(TimeoutError):
            norm.result(timeout=0.2)
        model(BATCH).backward()
    assert norm.result() == gradient.norm()
