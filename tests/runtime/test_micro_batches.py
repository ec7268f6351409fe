"""infinity.backward: all micro-batches through one unit after the other end in the bits of one after the other."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.runtime import graph_pieces, micro_batches
from tests import models, sampling
from tests.conftest import require_no_leaks, states_of, weights_of
from tests.runtime.vertically import (
    Blocks,
    Unhappy,
    batches_of,
    both,
    grads,
    inputs,
    is_vertical,
    made,
    warnings_of,
)

STEPS = sampling.number(2, 3)
AXES: dict[str, tuple[Any, ...]] = {
    "count": (1, 2, 4, 8),
    "overlap": ("auto", "during_backward", "before_forward", "off"),
    "clip": (None, 1e9, 0.01),
    "weights": ("nvme", "host"),
    "optimizer": ("nvme", "host"),
    "recomputes": ("nothing", "non-reentrant", "reentrant"),
    "dropout": (0.0, 0.1),
    "thread": ("own", "another"),
    "dtype": (torch.bfloat16, torch.float32),
}
CASES = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
SMALL = {"device": "640KiB", "host": "64MiB"}


def untied_gpt2(dropout: float = 0.0) -> tuple[Any, models.Batch]:
    model, batch = models.gpt2(dropout)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model, batch


def in_another_thread(work: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run a backward in another thread, as autograd does for a model on a GPU."""

    def run(of: Any) -> None:
        failed: list[BaseException] = []

        def attempt() -> None:
            try:
                work(of)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    return run


Result = tuple[list[list[float]], list[float], dict[str, torch.Tensor]]


def trained(
    model: Any, batches: list[models.Batch], clip: float | None, *, vertical: bool, steps: int = STEPS
) -> Result:
    optim = infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=clip)
    losses, norms = [], []
    for _ in range(steps):
        found = infinity.backward(model, lambda batch: model(**batch).loss / len(batches), batches, vertical=vertical)
        optim.step()
        optim.zero_grad()
        losses.append([loss.item() for loss in found])
        norms.append(optim.last_grad_norm)
    return losses, norms, weights_of(model) | states_of(model)


def require_same(found: Result, wanted: Result) -> None:
    assert found[:2] == wanted[:2]
    assert found[2].keys() == wanted[2].keys()
    for name, value in found[2].items():
        assert torch.equal(value, wanted[2][name]), name


def drawn() -> list[dict[str, Any]]:
    """In `make test` each value is in a case, in the long forms any two values are."""
    return sampling.drawn(CASES, CASES, sampling.STRENGTH)


def _id(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", drawn(), ids=_id)
def test_both_orders_end_in_the_same_bits(case: dict[str, Any], offload: Any, tmp_path: Path) -> None:
    results = []
    for vertical in (False, True):
        model, batch = made(lambda: untied_gpt2(case["dropout"]), case["recomputes"], case["dtype"])
        tiers = {key: case[key] for key in ("weights", "optimizer", "overlap")}
        paths = {"paths": [str(tmp_path / f"swap{vertical}")]}
        model = offload(model, memory=SMALL, update={"tile": "64KiB"}, nvme=paths, **tiers)
        with pytest.MonkeyPatch.context() as patch:
            if vertical and case["thread"] == "another":
                patch.setattr(graph_pieces.GraphPiece, "backward", in_another_thread(graph_pieces.GraphPiece.backward))
            results.append(trained(model, batches_of(batch, case["count"]), case["clip"], vertical=vertical))
        assert is_vertical(model) == (vertical and case["count"] > 1)
        require_no_leaks(model)
    require_same(results[1], results[0])


def llama(**options: Any) -> tuple[Any, models.Batch]:
    return models.llama(4, **options)


@pytest.fixture
def small(offload: Any, tmp_path: Path) -> Callable[..., tuple[Any, list[models.Batch]]]:
    """A model whose weights do not fit the device, and micro-batches for it."""
    made_so_far = itertools.count()

    def make(
        make: Callable[[], tuple[Any, models.Batch]] = llama,
        count: int = 4,
        recomputes: str = "nothing",
        dtype: torch.dtype = torch.bfloat16,
        **config: Any,
    ) -> tuple[Any, list[models.Batch]]:
        model, batch = made(make, recomputes, dtype)
        paths = {"paths": [str(tmp_path / f"swap{next(made_so_far)}")]}
        config = {"memory": SMALL, "update": {"tile": "64KiB"}, "nvme": paths} | config
        return offload(model, **config), batches_of(batch, count)

    return make


@pytest.fixture(autouse=True)
def _room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of these tests have room for hardly more than weights."""
    if "fit" not in request.node.name:
        monkeypatch.setattr(micro_batches.MicroBatchBackward, "_room_bytes", lambda self: 1 << 30)


Small = Callable[..., tuple[Any, list[models.Batch]]]


def loss_of(model: Any, count: int) -> Callable[[models.Batch], torch.Tensor]:
    return lambda batch: model(**batch).loss / count


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("recomputes", ["nothing", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("count", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_the_weights_are_fetched_once_per_direction(count: int, recomputes: str, small: Small) -> None:
    """With eight blocks and room for two, one micro-batch after the other fetches them each time."""
    model, batches = small(lambda: models.llama(8), count, recomputes, overlap="off")
    fetched = []
    for vertical in (True, True, False):
        before = infinity.statistics(model)
        infinity.backward(model, loss_of(model, count), batches, vertical=vertical)
        fetched.append(infinity.statistics(model).read_bytes - before.read_bytes)
        model.zero_grad()
    weights = sum(unit.full.weight_bytes for unit in registry.coordinator_of(model).units)
    assert fetched[1] <= 2 * weights
    assert fetched[2] > fetched[1] * count / 2


@pytest.mark.cpu_only("how many updates find their weights on a device depends on time")
@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.long), 4, pytest.param(8, marks=pytest.mark.long)]
)
def test_a_step_moves_at_most_26_bytes_per_parameter(count: int, small: Small) -> None:
    model, batches = small(lambda: models.llama(8), count, overlap="before_forward", accumulation_steps=count)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        infinity.synchronize(model)
        before = infinity.statistics(model)
        infinity.backward(model, loss_of(model, count), batches)
        optim.step()
        optim.zero_grad()
        infinity.synchronize(model)
    after = infinity.statistics(model)
    moved = after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes
    units = registry.coordinator_of(model).units
    padded = sum(unit.full.weight_bytes for unit in units) / 2  # parameters, with what aligns the units
    assert moved <= 26 * padded


# -- updates -----------------------------------------------------------------------------------------------------------


def test_updates_begin_when_the_last_micro_batch_has_passed_a_unit(small: Small) -> None:
    model, batches = small(lambda: models.llama(8), 4, overlap="during_backward")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    coordinator, begun = registry.coordinator_of(model), []
    passed = type(coordinator).micro_batch_passed

    def seen(self: Any, indices: Any, *, complete: Any) -> None:
        passed(self, indices, complete=complete)
        begun.append(len(self.update_queue.speculative))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(coordinator), "micro_batch_passed", seen)
        for _ in range(3):
            infinity.backward(model, loss_of(model, 4), batches)
            optim.step()
            optim.zero_grad()
            infinity.synchronize(model)
    assert coordinator.speculation_choice.counts.undone == 0
    assert coordinator.speculation_choice.counts.early > 0
    of_step = begun[-len(begun) // 3 :]
    assert of_step[:3] == [0, 0, 0]
    assert of_step == sorted(of_step)
    assert of_step[-5] > 4  # long before the last unit


@pytest.mark.long
def test_several_calls_before_a_step_begin_no_update_for_nothing_once_the_number_is_known(small: Small) -> None:
    for known in (None, 3, 12):
        model, batches = small(lambda: models.llama(2), 4, overlap="during_backward")
        optim = infinity.AdamW(model.parameters(), lr=1e-3, accumulation_steps=known)
        undone = []
        for _ in range(3):
            for _ in range(3):
                infinity.backward(model, loss_of(model, 12), batches)
            optim.step()
            optim.zero_grad()
            infinity.synchronize(model)
            undone.append(registry.coordinator_of(model).speculation_choice.counts.undone)
        assert undone[2] == undone[0]
        assert known is None or undone == [0, 0, 0]
        assert registry.coordinator_of(model).speculation_choice.counts.early > 0


# -- room --------------------------------------------------------------------------------------------------------------


@pytest.mark.long(kept="only here micro-batches have no room together")
def test_more_micro_batches_than_the_device_has_room_for_go_in_groups(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(caplog)
    model, batches = small(lambda: models.llama(8), 5, overlap="off")
    infinity.backward(model, loss_of(model, 5), batches)
    model.zero_grad()
    known = micro_batches._known[model]
    assert known.fit > 5
    other, _ = small(lambda: models.llama(8), 5, overlap="off")
    wanted = trained(other, batches, 1.0, vertical=False, steps=2)
    known.fit = 2
    fetched = infinity.statistics(model).read_bytes
    infinity.backward(model, loss_of(model, 5), batches)
    weights = sum(unit.full.weight_bytes for unit in registry.coordinator_of(model).units)
    assert 3 * weights < infinity.statistics(model).read_bytes - fetched <= 6 * weights
    model.zero_grad()
    require_same(trained(model, batches, 1.0, vertical=True, steps=2), wanted)
    assert [text[:61] for text in warnings()] == ["5 micro-batches go through the units in 3 groups, and each gr"]


def test_how_many_fit_is_what_the_plan_leaves_by_what_one_keeps(small: Small) -> None:
    model, batches = small(lambda: models.llama(8), 4)
    infinity.backward(model, loss_of(model, 4), batches)
    kept: set[tuple[int, int]] = set()
    infinity.close(model)
    plain, _ = made(lambda: models.llama(8), "nothing", torch.bfloat16)
    others = [*plain.parameters(), *plain.buffers(), *batches[0].values()]
    weights = {each.untyped_storage()._cdata for each in others}
    head: list[int] = []
    plain.model.layers[7].register_forward_pre_hook(lambda *_: head.append(sum(nbytes for _, nbytes in kept)))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept.add((storage._cdata, storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        plain(**batches[0])
    assert micro_batches._known[model].chain.kept_bytes == head[0]  # type: ignore[union-attr]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_gradient_of_tied_weights_is_no_less_exact_than_in_ordinary_order(small: Small) -> None:
    """Autograd adds the two pieces of a micro-batch in bf16; here they are added in fp32."""
    name = "model.embed_tokens.weight"
    exact, batches = small(models.tied_llama, dtype=torch.float32)
    with infinity.gathered(exact, write=True), torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16().float())
    infinity.backward(exact, loss_of(exact, 4), batches)
    wanted, errors = grads(exact)[name], []
    for vertical in (True, False):
        model, batches = small(models.tied_llama)
        infinity.backward(model, loss_of(model, 4), batches, vertical=vertical)
        model.zero_grad()
        infinity.backward(model, loss_of(model, 4), batches, vertical=vertical)
        assert is_vertical(model) == vertical
        errors.append((grads(model)[name] - wanted).norm().item())
    assert errors[0] <= errors[1]


def test_random_numbers_of_numpy_and_python_are_the_same_in_both_orders(offload: Any, tmp_path: Path) -> None:
    class Noisy(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x)) * (0.5 + np.random.rand()) * (0.5 + random.random())
            return x.square().mean()

    random.seed(0)
    np.random.seed(0)
    _, model = both(Noisy, offload, tmp_path)
    assert is_vertical(model)


# -- errors ------------------------------------------------------------------------------------------------------------


def loss_that_fails(model: Any, batches: list[models.Batch], where: str, at: int, error: type[BaseException]) -> Any:
    """Return a loss function that raises for micro-batch `at`."""

    def fail(*_: Any) -> None:
        raise error

    def loss_fn(batch: models.Batch) -> torch.Tensor:
        chosen = batch is batches[at]
        if chosen and where == "before":
            fail()
        hook = model.model.layers[2].register_forward_pre_hook(fail) if chosen and where == "amid" else None
        try:
            loss: torch.Tensor = model(**batch).loss / len(batches)
        finally:
            if hook is not None:
                hook.remove()
        if chosen and where == "after":
            fail()
        if chosen and where == "backward":
            loss.register_hook(fail)
        return loss

    return loss_fn


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("error", [Unhappy, KeyboardInterrupt])
@pytest.mark.parametrize("recomputes", ["nothing", "reentrant"])
@pytest.mark.parametrize("where", ["before", "amid", "after", "backward"])
def test_an_exception_in_one_micro_batch_leaves_a_model_that_goes_on(
    where: str, recomputes: str, error: type[BaseException], small: Small
) -> None:
    model, batches = small(recomputes=recomputes)
    infinity.backward(model, loss_of(model, 4), batches)
    model.zero_grad()
    with pytest.raises(error):
        infinity.backward(model, loss_that_fails(model, batches, where, 2, error), batches)
    assert not [thread for thread in threading.enumerate() if thread.name == "infinity-lane"]
    model.zero_grad()
    require_no_leaks(model)
    other, _ = small(recomputes=recomputes)
    infinity.backward(other, loss_of(other, 4), batches)
    other.zero_grad()
    require_same(trained(model, batches, 1.0, vertical=True), trained(other, batches, 1.0, vertical=True))


def test_a_tensor_that_is_changed_after_it_was_saved_raises(offload: Any, tmp_path: Path) -> None:
    class Changing(Blocks):
        change = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at, block in enumerate(self.blocks):
                x = torch.tanh(block(x))
                if self.change and at == 1:
                    x.add_(1.0)  # which tanh has saved
            return x.square().mean()

    model = offload(Changing().train(), nvme={"paths": [str(tmp_path / "swap")]})
    infinity.backward(model, model, inputs())
    model.change = True
    with pytest.raises(infinity.StaleWeightsError, match="modified in place"):
        infinity.backward(model, model, inputs())


@pytest.mark.long(kept="only here a transfer fails while micro-batches go through one unit after the other")
def test_a_transfer_that_fails_is_an_error_and_nothing_hangs(small: Small) -> None:
    def run(*faults: _native.Fault) -> tuple[int, int]:
        """Return the number of transfers before the stages were learned, and the number of all transfers."""
        model, batches = small(overlap="off", faults=faults)
        optim, seen = infinity.AdamW(model.parameters()), []
        for _ in range(3):
            infinity.backward(model, loss_of(model, 4), batches)
            optim.step()
            optim.zero_grad()
            seen.append(registry.coordinator_of(model).resources.engine.counters()["operations"])
        return seen[0], seen[-1]

    first, last = run()
    for number in sorted({*range(first + 1, last, 41), *sampling.some(list(range(first, last)))}):
        with pytest.raises(infinity.SwapIOError):
            run(_native.Fault(number, "error", errno.EIO))
        assert not [thread for thread in threading.enumerate() if thread.name == "infinity-lane"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_no_micro_batch_is_refused(small: Small) -> None:
    model, _ = small()
    with pytest.raises(infinity.ConfigError, match="at least one micro-batch"):
        infinity.backward(model, loss_of(model, 1), [])


@pytest.mark.parametrize("given", [{"input_ids": torch.zeros(2)}, torch.zeros(2), None])
def test_what_is_no_list_of_micro_batches_is_refused(given: Any, offload: Any, tmp_path: Path) -> None:
    model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]})
    with pytest.raises(infinity.ConfigError, match="needs a list of micro-batches"):
        infinity.backward(model, model, given)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda loss: (loss, 1), "returned a tuple: it must return the scalar tensor"),
        (lambda loss: None, "returned a NoneType"),
        (lambda loss: loss.expand(3), r"returned a tensor of shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("vertical", [True, False])
def test_a_loss_that_is_no_scalar_is_refused(
    returned: Any, says: str, vertical: bool, offload: Any, tmp_path: Path
) -> None:
    model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]})
    with pytest.raises(infinity.ConfigError, match=says):
        infinity.backward(model, lambda x: returned(model(x)), inputs(), vertical=vertical)
    infinity.backward(model, model, inputs())


def test_a_model_that_is_not_offloaded_is_refused() -> None:
    with pytest.raises(infinity.ModelError, match="not offloaded"):
        infinity.backward(Blocks(), lambda x: x, inputs())
