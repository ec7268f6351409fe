"""infinity.backward: all micro-batches through one unit after the other end in the bits of one after the other."""

from __future__ import annotations

import errno
import itertools
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import infinity
from infinity import _native
from infinity.coordinator import registry
from infinity.runtime import micro_batches, pieces
from tests import models, sampling
from tests.conftest import require_no_leaks, states_of, weights_of

STEPS = 3
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


def made(make: Callable[[], tuple[Any, models.Batch]], recomputes: str, dtype: torch.dtype) -> tuple[Any, models.Batch]:
    torch.manual_seed(0)
    model, batch = make()
    model = model.to(dtype).train()
    if recomputes != "nothing":
        options = {"use_reentrant": recomputes == "reentrant"}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    return model, batch


def batches_of(batch: models.Batch, count: int) -> list[models.Batch]:
    """Of unequal lengths."""
    rolled = [torch.roll(batch["input_ids"], index, dims=1)[:, : 16 - index].contiguous() for index in range(count)]
    return [{**batch, "input_ids": ids, "labels": ids} for ids in rolled]


def is_vertical(model: Any) -> bool:
    return micro_batches._known[model].chain is not None


def in_another_thread(work: Callable[[Any], None]) -> Callable[[Any], None]:
    """As autograd runs a backward where a model computes on a GPU."""

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


def _id(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", sampling.drawn(CASES, CASES), ids=_id)
def test_both_orders_end_in_the_same_bits(case: dict[str, Any], offload: Any, tmp_path: Path) -> None:
    results = []
    for vertical in (False, True):
        model, batch = made(lambda: untied_gpt2(case["dropout"]), case["recomputes"], case["dtype"])
        tiers = {key: case[key] for key in ("weights", "optimizer", "overlap")}
        paths = {"paths": [str(tmp_path / f"swap{vertical}")]}
        model = offload(model, memory=SMALL, update={"tile": "64KiB"}, nvme=paths, **tiers)
        with pytest.MonkeyPatch.context() as patch:
            if vertical and case["thread"] == "another":
                patch.setattr(pieces.Piece, "backward", in_another_thread(pieces.Piece.backward))
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
        monkeypatch.setattr(micro_batches.MicroBatches, "_room_bytes", lambda self: 1 << 30)


Small = Callable[..., tuple[Any, list[models.Batch]]]


def loss_of(model: Any, count: int) -> Callable[[models.Batch], torch.Tensor]:
    return lambda batch: model(**batch).loss / count


def grads(model: Any) -> dict[str, torch.Tensor]:
    """The gradients that have landed, in fp32, by name."""
    coordinator, found = registry.coordinator_of(model), {}
    coordinator.gradients.synchronize()
    for _, place in coordinator.places():
        group = coordinator.gradients.of(place)
        if place.spec.name in group.present:
            flat = torch.frombuffer(bytearray(group._range(place.spec)), dtype=group.dtype)
            found[place.spec.name] = flat.float()
    return found


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", ["nothing", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_weights_are_fetched_once_per_direction(count: int, recomputes: str, small: Small) -> None:
    """Of eight blocks with room for two: one micro-batch after the other fetches them for each."""
    model, batches = small(lambda: models.llama(8), count, recomputes, overlap="off")
    fetched = []
    for vertical in (True, True, False):
        before = infinity.statistics(model)
        infinity.backward(model, loss_of(model, count), batches, vertical=vertical)
        fetched.append(infinity.statistics(model).read_bytes - before.read_bytes)
        model.zero_grad()
    weights = sum(unit.unit.weight_bytes for unit in registry.coordinator_of(model).units)
    assert fetched[1] <= 2 * weights
    assert fetched[2] > fetched[1] * count / 2


@pytest.mark.cpu_only("how many updates find their weights on a device depends on time")
@pytest.mark.parametrize("count", [1, 2, 4, 8])
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
    padded = sum(unit.unit.weight_bytes for unit in units) / 2  # parameters, with what aligns the units
    assert moved <= 26 * padded


def test_updates_begin_when_the_last_micro_batch_has_passed_a_unit(small: Small) -> None:
    model, batches = small(lambda: models.llama(8), 4, overlap="during_backward")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    coordinator, begun = registry.coordinator_of(model), []
    passed = type(coordinator).passed

    def seen(self: Any, indices: Any, *, complete: Any) -> None:
        passed(self, indices, complete=complete)
        begun.append(len(self.updates.speculative))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(coordinator), "passed", seen)
        for _ in range(3):
            infinity.backward(model, loss_of(model, 4), batches)
            optim.step()
            optim.zero_grad()
            infinity.synchronize(model)
    assert coordinator.speculation.counts.undone == 0
    assert coordinator.speculation.counts.early > 0
    of_step = begun[-len(begun) // 3 :]
    assert of_step[:3] == [0, 0, 0]
    assert of_step == sorted(of_step)
    assert of_step[-5] > 4  # long before the last unit


# -- what is no chain ------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: Any) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "infinity")
    return lambda: list(caplog.messages)


def test_a_loss_with_a_part_for_each_router_keeps_the_ordinary_order(
    small: Small, warnings: Callable[[], list[str]]
) -> None:
    model, batches = small(models.mixtral, memory={"device": "2MiB", "host": "64MiB"})
    model.config.output_router_logits = True
    for _ in range(2):
        infinity.backward(model, lambda batch: model(**batch, output_router_logits=True).loss, batches)
    assert not is_vertical(model)
    assert warnings() == [
        "micro-batches are computed one after the other: the units of the model form no chain: what a unit computes is "
        "used past the units behind it, as the routers of a mixture of experts are by the loss"
    ]


class Blocks(nn.Module):
    """Linear blocks of 1 KiB and more, with something around them."""

    def __init__(self, *middle: nn.Module, past: bool = False, twice: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(depth)])
        self.middle = nn.ModuleList(middle)
        self.past = past
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        for module in self.middle:
            x = module(x)
        if self.twice:
            x = self.blocks[1](x)
        return ((x + first) if self.past else x).square().mean()


def inputs(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4 + index, 32, generator=generator) for index in range(count)]


def both(make: Callable[[], nn.Module], offload: Any, tmp_path: Path, steps: int = 2, **config: Any) -> list[Any]:
    """Models after some steps in ordinary order and in the other, which end in the same bits."""
    ended, results = [], []
    for vertical in (False, True):
        torch.manual_seed(0)
        model = offload(make().train(), nvme={"paths": [str(tmp_path / f"swap{vertical}")]}, **config)
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(steps):
            losses += infinity.backward(model, model, inputs(), vertical=vertical)
            optim.step()
            optim.zero_grad()
        results.append((losses, weights_of(model) | states_of(model) | dict(model.named_buffers())))
        ended.append(model)
        require_no_leaks(model)
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
    return ended


def test_a_buffer_that_the_forward_changes_keeps_the_ordinary_order(
    offload: Any, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    _, model = both(lambda: Blocks(nn.BatchNorm1d(32)), offload, tmp_path)
    assert not is_vertical(model)
    assert "the forward changes 'middle.0." in warnings()[0]
    model.eval()
    infinity.backward(model, model, inputs())
    assert is_vertical(model)


def test_units_that_a_tensor_goes_past_are_one_stage(offload: Any, tmp_path: Path) -> None:
    """The first block's output is added at the end: only before that block can the graph be cut."""
    _, model = both(lambda: Blocks(past=True), offload, tmp_path)
    assert not is_vertical(model)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ModuleList([*Blocks(depth=2).blocks, *Blocks(depth=3).blocks])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = x = torch.tanh(self.list[0](x))
            x = torch.tanh(self.list[1](x)) + kept
            for block in self.list[2:]:
                x = torch.tanh(block(x))
            return x.square().mean()

    (tmp_path / "two").mkdir()
    _, model = both(Two, offload, tmp_path / "two")
    stages = micro_batches._known[model].chain.stages  # type: ignore[union-attr]
    assert [stage.units for stage in stages] == [(0, 1), (2,), (3,), (4,)]


def test_units_that_are_given_a_tensor_amid_a_stage_are_in_that_stage(offload: Any, tmp_path: Path) -> None:
    """The third block is given what the first has made. No stage begins there, since what the second has made goes past
    it; so none begins between the first and the third."""

    class Given(nn.Linear):
        def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            return torch.tanh(super().forward(x if other is None else x + other))

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ModuleList([Given(32, 32) for _ in range(5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.list[0](x)
            second = self.list[1](first)
            third = self.list[2](second, first)
            x = self.list[4](self.list[3](third + second))
            return x.square().mean()

    _, model = both(Crossed, offload, tmp_path)
    stages = micro_batches._known[model].chain.stages  # type: ignore[union-attr]
    assert [stage.units for stage in stages] == [(0, 1, 2), (3,), (4,)]


def test_a_block_that_comes_twice_is_a_stage_each_time(offload: Any, tmp_path: Path) -> None:
    """Its gradients are added in fp32, not by autograd; here they are fp32."""
    torch.manual_seed(0)
    model = offload(Blocks(twice=True).train(), nvme={"paths": [str(tmp_path / "swap")]})
    for _ in range(2):
        infinity.backward(model, model, inputs())
        found = grads(model)
        model.zero_grad()
    assert is_vertical(model)
    infinity.backward(model, model, inputs(), vertical=False)
    for name, wanted in grads(model).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-9)


def test_the_update_of_a_block_that_comes_twice_begins_after_both(offload: Any, tmp_path: Path) -> None:
    paths = {"paths": [str(tmp_path / "swap")]}
    model = offload(Blocks(twice=True).train(), nvme=paths, overlap="during_backward")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        infinity.backward(model, model, inputs())
        optim.step()
        optim.zero_grad()
    assert is_vertical(model)
    counts = registry.coordinator_of(model).speculation.counts
    assert counts.early > 0
    assert counts.undone == 0


def test_a_layer_that_is_skipped_by_chance_is_skipped_in_both_orders(offload: Any, tmp_path: Path) -> None:
    class Skipping(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for at, block in enumerate(self.blocks):
                if at in (0, 5) or torch.rand(()) > 0.4:
                    x = torch.tanh(block(x))
            return x.square().mean()

    _, model = both(lambda: Skipping(depth=6), offload, tmp_path, steps=5)
    assert is_vertical(model)


def test_the_loss_function_may_call_the_model_twice(
    offload: Any, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    class Pair(Blocks):
        pass

    model = offload(Pair().train(), nvme={"paths": [str(tmp_path / "swap")]})
    for _ in range(2):
        infinity.backward(model, lambda x: model(x) - model(x + 1), inputs())
    assert "the loss function calls the model 2 times for one micro-batch" in warnings()[0]
    assert not is_vertical(model)


def test_saved_tensor_hooks_around_the_call_keep_the_ordinary_order(
    small: Small, warnings: Callable[[], list[str]]
) -> None:
    model, batches = small()
    infinity.backward(model, loss_of(model, 4), batches)
    with torch.autograd.graph.save_on_cpu():
        infinity.backward(model, loss_of(model, 4), batches)
    assert "because it is called in a context of saved-tensor hooks" in warnings()[0]


def test_more_micro_batches_than_the_device_has_room_for_go_in_groups(
    small: Small, warnings: Callable[[], list[str]]
) -> None:
    model, batches = small(lambda: models.llama(8), 5, overlap="off")
    infinity.backward(model, loss_of(model, 5), batches)
    model.zero_grad()
    known = micro_batches._known[model]
    assert known.fit > 5
    other, _ = small(lambda: models.llama(8), 5, overlap="off")
    wanted = trained(other, batches, 1.0, vertical=False)
    known.fit = 2
    fetched = infinity.statistics(model).read_bytes
    infinity.backward(model, loss_of(model, 5), batches)
    weights = sum(unit.unit.weight_bytes for unit in registry.coordinator_of(model).units)
    assert 3 * weights < infinity.statistics(model).read_bytes - fetched <= 6 * weights
    model.zero_grad()
    require_same(trained(model, batches, 1.0, vertical=True), wanted)
    assert [text[:61] for text in warnings()] == ["5 micro-batches go through the units in 3 groups, each of whi"]


def test_how_many_fit_is_what_the_plan_leaves_by_what_one_keeps(small: Small) -> None:
    model, batches = small(lambda: models.llama(8), 4)
    infinity.backward(model, loss_of(model, 4), batches)
    kept: set[tuple[int, int]] = set()
    infinity.close(model)
    plain, _ = made(lambda: models.llama(8), "nothing", torch.bfloat16)
    weights = {parameter.untyped_storage()._cdata for parameter in plain.parameters()}
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


# -- tied weights ----------------------------------------------------------------------------------------------------


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


# -- errors ----------------------------------------------------------------------------------------------------------


class Unhappy(Exception):  # noqa: N818
    pass


def loss_that_fails(model: Any, batches: list[models.Batch], where: str, at: int, error: type[BaseException]) -> Any:
    """A loss function that raises for micro-batch `at`."""

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


def test_after_an_exception_no_other_micro_batch_goes_on(offload: Any, tmp_path: Path) -> None:
    """The first one fails in the last stage, before which the others wait."""
    model, ended = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]}), list[int]()

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        ended.append(len(x))
        return loss

    def fail(*_: Any) -> None:
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


def test_a_transfer_that_fails_is_an_error_and_nothing_hangs(small: Small) -> None:
    def run(*faults: _native.Fault) -> tuple[int, int]:
        """The number of transfers before the stages were learned, and of all."""
        model, batches = small(overlap="off", faults=faults)
        optim, seen = infinity.AdamW(model.parameters()), []
        for _ in range(3):
            infinity.backward(model, loss_of(model, 4), batches)
            optim.step()
            optim.zero_grad()
            seen.append(registry.coordinator_of(model).resources.engine.counters()["operations"])
        return seen[0], seen[-1]

    first, last = run()
    for number in sorted({*range(first + 1, last, 11), *sampling.some(list(range(first, last)))}):
        with pytest.raises(infinity.SwapIOError):
            run(_native.Fault(number, "error", errno.EIO))
        assert not [thread for thread in threading.enumerate() if thread.name == "infinity-lane"]


def test_no_micro_batch_is_refused(small: Small) -> None:
    model, _ = small()
    with pytest.raises(infinity.ConfigError, match="no micro-batch"):
        infinity.backward(model, loss_of(model, 1), [])


def test_a_model_that_is_not_offloaded_is_refused() -> None:
    with pytest.raises(infinity.ModelError, match="not offloaded"):
        infinity.backward(Blocks(), lambda x: x, inputs())


# -- what a thread has ------------------------------------------------------------------------------------------------


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


@pytest.mark.cpu_only("what is compiled does not depend on the device")
def test_a_compiled_model_is_cut_between_what_is_compiled(offload: Any, tmp_path: Path) -> None:
    losses = []
    for vertical in (False, True):
        torch.manual_seed(0)
        model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / f"swap{vertical}")]})
        compiled = torch.compile(model, backend="eager")
        losses.append([loss.item() for loss in infinity.backward(compiled, compiled, inputs(), vertical=vertical)])
        assert is_vertical(model) == vertical
    assert losses[0] == losses[1]


# -- what only looks like a chain ------------------------------------------------------------------------------------


def ordinary(make: Callable[[], nn.Module], offload: Any, tmp_path: Path, says: str, warnings: Any) -> None:
    _, model = both(make, offload, tmp_path)
    assert not is_vertical(model)
    assert says in warnings()[0]


def test_blocks_that_add_to_a_list_are_no_chain(
    offload: Any, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor, notes: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            x = torch.tanh(super().forward(x))
            notes.append(x.square().mean())
            return x

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Noting(32, 32) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            notes: list[torch.Tensor] = []
            for block in self.blocks:
                x = block(x, notes)
            return x.square().mean() + sum(notes)

    ordinary(Noted, offload, tmp_path, "form no chain", warnings)


def test_modules_that_are_told_something_by_a_forward_are_no_chain(
    offload: Any, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    class Told(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.blocks[1].factor = x.mean()
            for block in self.blocks:
                x = torch.tanh(block(x) * getattr(block, "factor", 1.0))
            return x.square().mean()

    ordinary(Told, offload, tmp_path, "the forward changes 'blocks.1.factor' of the model", warnings)


def test_a_setting_of_torch_for_the_time_of_a_forward_keeps_the_ordinary_order(
    offload: Any, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]})

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss: torch.Tensor = model(x)
        return loss

    for _ in range(2):
        infinity.backward(model, loss_fn, inputs())
    assert torch.backends.cuda.flash_sdp_enabled()
    assert "flash_sdp_enabled is set for a part of the forward" in warnings()[0]


def test_a_micro_batch_that_comes_with_a_graph_gives_it_its_gradient(offload: Any, tmp_path: Path) -> None:
    model, before = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]}), nn.Linear(32, 32)
    found = []
    for vertical in (False, True, True):
        before.zero_grad()
        infinity.backward(model, model, [torch.tanh(before(x)) for x in inputs()], vertical=vertical)
        model.zero_grad()
        found.append(before.weight.grad.clone())  # type: ignore[union-attr]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_micro_batch_with_another_graph_than_the_first_is_an_error(offload: Any, tmp_path: Path) -> None:
    class Sometimes(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.tanh(self.blocks[0](x))
            y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
            return (y + first if len(x) == 6 else y).square().mean()

    model = offload(Sometimes().train(), nvme={"paths": [str(tmp_path / "swap")]})
    with pytest.raises(infinity.ModelError, match="Call infinity.backward with vertical=False"):
        infinity.backward(model, model, inputs())


def test_a_tensor_that_is_given_twice_is_one(offload: Any, tmp_path: Path) -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.tanh(super().forward(x)) if x is y else super().forward(y)

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Twice(32, 32) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, x)
            return x.square().mean()

    _, model = both(Pairs, offload, tmp_path)
    assert is_vertical(model)


def test_a_unit_may_write_to_what_it_is_given(offload: Any, tmp_path: Path) -> None:
    class Writing(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(32, 32)) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0.0 * self.blocks[0][1].bias
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    _, model = both(Writing, offload, tmp_path)
    assert is_vertical(model)


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


def test_several_calls_before_a_step_begin_no_update_for_nothing_once_the_number_is_known(small: Small) -> None:
    for known in (None, 3, 12):
        model, batches = small(lambda: models.llama(8), 4, overlap="during_backward")
        optim = infinity.AdamW(model.parameters(), lr=1e-3, accumulation_steps=known)
        undone = []
        for _ in range(3):
            for _ in range(3):
                infinity.backward(model, loss_of(model, 12), batches)
            optim.step()
            optim.zero_grad()
            infinity.synchronize(model)
            undone.append(registry.coordinator_of(model).speculation.counts.undone)
        assert undone[2] == undone[0]
        assert known is None or undone == [0, 0, 0]
        assert registry.coordinator_of(model).speculation.counts.early > 0


def test_an_exception_while_the_stages_are_learned_changes_nothing(offload: Any, tmp_path: Path) -> None:
    model = offload(Blocks(nn.BatchNorm1d(32)).train().eval(), nvme={"paths": [str(tmp_path / "swap")]})

    def fail(x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise Unhappy

    model.middle[0].train()
    with pytest.raises(Unhappy):
        infinity.backward(model, fail, inputs())
    assert model.middle[0].num_batches_tracked == 0
    model.eval()
    infinity.backward(model, model, inputs())
    assert is_vertical(model)


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


@pytest.mark.parametrize("given", [{"input_ids": torch.zeros(2)}, torch.zeros(2), None])
def test_what_is_no_list_of_micro_batches_is_refused(given: Any, offload: Any, tmp_path: Path) -> None:
    model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]})
    with pytest.raises(infinity.ConfigError, match="takes a list of micro-batches"):
        infinity.backward(model, model, given)


def test_stages_are_learned_once_for_each_mode(offload: Any, tmp_path: Path) -> None:
    model, calls = offload(Blocks().eval(), nvme={"paths": [str(tmp_path / "swap")]}), []

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        model.train()
        calls.append(len(x))
        loss: torch.Tensor = model(x)
        return loss

    for _ in range(3):
        infinity.backward(model, loss_fn, inputs())
        model.eval()
    assert len(calls) == 9 + 1
