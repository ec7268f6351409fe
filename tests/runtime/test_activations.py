"""Tensors that a forward keeps change no bit, wherever they rest between the forward and the backward."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.errors import StaleWeightsError, SwapIOError
from infinity.plan import plan_input
from infinity.tiers import activations
from infinity.tiers.activations import ActivationTier
from tests.conftest import weights_of
from tests.models import ARCHITECTURES, loss_of
from tests.runtime.vertically import grads

MEMORY = {"host": "64MiB", "device": "2MiB"}
WIDTH = 64


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors move, too, in several chunks, through a ring that is full most of the time."""
    monkeypatch.setattr(activations, "PIECE_BYTES_MIN", 256)
    monkeypatch.setattr(activations, "_CHUNK_BYTES", 8 << 10)
    monkeypatch.setattr(plan_input, "_ACTIVATION_BYTES_MIN", 64 << 10)
    monkeypatch.setattr(plan_input, "_ACTIVATION_BYTES_MAX", 64 << 10)
    monkeypatch.setattr(activations, "_STAY_SHARE", 1 << 40)


def require_empty(model: nn.Module) -> None:
    """Require that no saved tensor has memory or a place any more."""
    tier = registry.coordinator_of(model).resources.activations
    if tier is None:
        return
    gc.collect()  # an error that was raised keeps the frames in which it was raised
    tier.advance()
    while tier._ending:
        tier._make_room()
    assert [*tier._leaving, *tier._begun, *tier._ahead] == []
    assert tier._space.free_bytes == tier._space.nbytes
    if tier._scratch is not None:
        assert [space.free_bytes for _, _, space in tier._scratch._segments] == [
            space.nbytes for _, _, space in tier._scratch._segments
        ]


# -- models of transformers --------------------------------------------------------------------------------------------


def train(offload: Any, architecture: str, recomputes: str, micro_batches: int = 1, **config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, batch = ARCHITECTURES[architecture]()
    model = model.bfloat16().train()
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
    if recomputes != "nothing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": recomputes == "reentrant"})
    model = offload(model, **{"memory": MEMORY, "recompute": "none", "vertical": micro_batches > 1} | config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        if micro_batches > 1:
            losses += infinity.backward(model, lambda given: loss_of(model, given), [batch] * micro_batches)
        else:
            losses.append(loss_of(model, batch))
            losses[-1].backward()
        optim.step()
        optim.zero_grad()
    weights = weights_of(model)
    numbers = [loss.item() for loss in losses]
    del losses
    require_empty(model)
    infinity.close(model)
    return numbers, weights


@pytest.mark.covering(strength=2, most=6)
@pytest.mark.parametrize("recomputes", ["nothing", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("where", ["nvme", "host"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5", "bert", "mixtral", "whisper", "tied_llama"])
def test_where_activations_rest_changes_no_bit(
    architecture: str, where: str, micro_batches: int, recomputes: str, offload: Any
) -> None:
    given: Any = (architecture, recomputes, micro_batches)
    kept, moved = (train(offload, *given, activations=tier) for tier in ("keep", where))
    assert kept[0] == moved[0]
    assert [name for name, weight in kept[1].items() if not torch.equal(weight, moved[1][name])] == []


# -- single graphs -----------------------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Two linear layers with an operation between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.sigmoid()  # saves y
    y.add_(1)
    return y


def changed_before(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.mul_(3)
    return y.sigmoid()


_unused: list[torch.Tensor] = []


def saved_at_two_versions(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    _unused[:] = [y.sin()]  # saves y, and no backward asks for it
    y.mul_(3)
    return y.cos()


def of_one_memory(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * second, second.t().contiguous().t() * first], dim=-1) * x


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "used twice": lambda x: x * x.exp() + x.exp() * x,
    "slices and transposes": of_one_memory,
    "expanded": lambda x: x * x[:1].expand(x.shape[0], WIDTH),
    "a wide type": lambda x: (x.double() ** 3).float(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, WIDTH // 2, 2)) ** 2).reshape(
        -1, WIDTH
    ),
    "a mask": lambda x: x.masked_fill(x > 0, 0.5),
    "changed before it is saved": changed_before,
    "changed after it was saved": changed_in_place,
    "saved at two versions": saved_at_two_versions,
    "checkpointed": lambda x: checkpoint(lambda y: y.sin() * y.cos(), x, use_reentrant=False),
    "checkpointed, reentrant": lambda x: checkpoint(lambda y: y.sin() * y.cos(), x, use_reentrant=True),
    "a checkpoint in a checkpoint": lambda x: checkpoint(
        lambda y: checkpoint(torch.sin, y * y, use_reentrant=False) * y, x, use_reentrant=False
    ),
}


def graph(offload: Any, between: str, where: str, passes: int) -> list[torch.Tensor] | str:
    """Return the gradients after some backward passes through one graph, or the error of the first pass."""
    torch.manual_seed(0)
    model = offload(Graph(BETWEEN[between]), memory=MEMORY, activations=where)
    x = torch.randn(32, WIDTH, requires_grad=True)
    loss = model(x).square().sum()
    try:
        for each in range(passes):
            loss.backward(retain_graph=each + 1 < passes)
    except StaleWeightsError as error:
        infinity.close(model)
        return str(error)
    found = [x.grad, *grads(model).values()]
    del loss
    _unused.clear()
    require_empty(model)
    infinity.close(model)
    return found


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("between", BETWEEN)
def test_any_graph_gives_the_same_gradients_or_the_same_error(between: str, passes: int, offload: Any) -> None:
    kept, *moved = (graph(offload, between, where, passes) for where in ("keep", "nvme", "host"))
    for found in moved:
        if isinstance(kept, str):
            assert found == kept
            assert "modified in place" in kept
        else:
            assert all(torch.equal(*pair) for pair in zip(found, kept, strict=True))
    assert isinstance(kept, str) == (between == "changed after it was saved")


@pytest.mark.parametrize("where", ["nvme", "host"])
def test_two_graphs_may_be_alive_and_a_backward_may_run_in_another_thread(where: str, offload: Any) -> None:
    results = []
    for tier in ("keep", where):
        torch.manual_seed(0)
        model = offload(Graph(torch.tanh), memory=MEMORY, activations=tier)
        losses = [model(torch.randn(32, WIDTH)).square().sum() for _ in range(3)]
        for loss in (losses[1], losses[0]):
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        results.append(list(grads(model).values()))
        del loss, losses  # one graph had no backward
        require_empty(model)
        infinity.close(model)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


class StoppedError(Exception):
    """An error that the test raises."""


@pytest.mark.parametrize("where", ["nvme", "host"])
def test_a_forward_or_a_backward_that_raises_leaves_nothing_behind(where: str, offload: Any) -> None:
    def stop(*_: object) -> None:
        raise StoppedError

    torch.manual_seed(0)
    model = offload(Graph(torch.tanh), memory=MEMORY, activations=where)
    x = torch.randn(32, WIDTH, requires_grad=True)
    hook = model.second.register_forward_pre_hook(stop)
    with pytest.raises(StoppedError):
        model(x)
    hook.remove()
    require_empty(model)
    loss = model(x).square().sum()
    hook = x.register_hook(stop)
    with pytest.raises(StoppedError):
        loss.backward()
    hook.remove()
    del loss
    model.zero_grad()
    require_empty(model)
    model(x.detach()).square().sum().backward()
    assert len(grads(model)) == 4
    require_empty(model)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("moment", ["_begin", "_copy_next"])
def test_ctrl_c_while_pieces_move_leaves_nothing_behind(
    moment: str, at: int, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = offload(Graph(torch.tanh), memory=MEMORY, activations="nvme")
    x = torch.randn(256, WIDTH)

    def gradients() -> list[torch.Tensor]:
        model(x).square().sum().backward()
        found = [value.clone() for value in grads(model).values()]
        model.zero_grad()
        return found

    expected, calls, method = gradients(), itertools.count(), getattr(ActivationTier, moment)

    def interrupted(tier: ActivationTier, *given: Any, **options: Any) -> Any:
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return method(tier, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ActivationTier, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            gradients()
    model.zero_grad()
    require_empty(model)
    assert all(torch.equal(*pair) for pair in zip(gradients(), expected, strict=True))


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("counts bytes that do not depend on the device")
@pytest.mark.parametrize("vertical", [False, True])
def test_each_byte_is_written_once_and_read_once(vertical: bool, offload: Any) -> None:
    torch.manual_seed(0)
    model = offload(Graph(torch.tanh), "host", memory=MEMORY, activations="nvme", vertical=vertical)
    batches = list(torch.randn(3, 4096, WIDTH))
    tier = registry.coordinator_of(model).resources.activations
    assert tier is not None
    for step in range(3):
        before, moved = infinity.statistics(model), tier.moved_bytes
        if vertical:
            infinity.backward(model, lambda x: model(x).square().sum(), batches)
        else:
            for batch in batches:
                model(batch).square().sum().backward()
        model.zero_grad()
        after = infinity.statistics(model)
        written, read = after.written_bytes - before.written_bytes, after.read_bytes - before.read_bytes
        moved = tier.moved_bytes - moved
        assert moved >= 3 << 20
        assert 0.98 * moved <= written <= 1.02 * moved
        assert read <= 1.02 * moved
        if step == 2:  # what is moved in vain is known; the last chunks are still in RAM
            assert read >= 0.98 * moved - 3 * (64 << 10)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", ["error", "flip"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_tensor_that_is_lost_is_an_error_and_the_next_pass_works(operation: Any, kind: Any, offload: Any) -> None:
    torch.manual_seed(0)
    fault = _native.Fault(1, kind, 5 if kind == "error" else 0, operation=operation)
    model = offload(Graph(torch.tanh), "host", memory=MEMORY, activations="nvme", faults=[fault])
    x = torch.randn(4096, WIDTH)
    loss = model(x).square().sum()
    with pytest.raises(SwapIOError, match="activations"):
        loss.backward()
    del loss
    model.zero_grad()
    model(x).square().sum().backward()
    require_empty(model)


def test_the_log_says_where_activations_rest(offload: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "infinity"):
        offload(Graph(torch.tanh), memory=MEMORY, activations="nvme")
    assert "activations  nvme    all that a forward keeps, through 64.00 KiB of RAM" in caplog.text
