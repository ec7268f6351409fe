"""Chains of units: the places where the graph of a forward can be cut, and the models that keep the ordinary order."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.coordinator import registry
from infinity.runtime import micro_batches
from tests import models
from tests.runtime.vertically import Blocks, Unhappy, batches_of, both, grads, inputs, is_vertical, made, warnings_of

# -- stages ------------------------------------------------------------------------------------------------------------


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
    counts = registry.coordinator_of(model).speculation_choice.counts
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


def test_a_reentrant_checkpoint_that_reads_no_unit_is_part_of_the_stage_before_it(offload: Any, tmp_path: Path) -> None:
    class Checked(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.blocks[0](x))
            x = torch.tanh(checkpoint(self.blocks[1], x, use_reentrant=True))
            x = checkpoint(torch.tanh, x, use_reentrant=True)
            return torch.tanh(self.blocks[2](x)).square().mean()

    _, model = both(Checked, offload, tmp_path)
    stages = micro_batches._known[model].chain.stages  # type: ignore[union-attr]
    assert [(stage.units, stage.reentrant) for stage in stages] == [((0,), False), ((1,), True), ((2,), False)]


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


@pytest.mark.cpu_only("what is compiled does not depend on the device")
@pytest.mark.long(kept="no other compiled model has its micro-batches go through one unit after the other")
def test_a_compiled_model_is_cut_between_what_is_compiled(offload: Any, tmp_path: Path) -> None:
    losses, batches = [], [torch.roll(inputs()[0], index, dims=0) for index in range(3)]  # compiled once: of one shape
    for vertical in (False, True):
        torch.manual_seed(0)
        model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / f"swap{vertical}")]})
        compiled = torch.compile(model, backend="eager")
        losses.append([loss.item() for loss in infinity.backward(compiled, compiled, batches, vertical=vertical)])
        assert is_vertical(model) == vertical
    assert losses[0] == losses[1]


# -- what only looks like a chain --------------------------------------------------------------------------------------


def ordinary(make: Callable[[], nn.Module], offload: Any, tmp_path: Path, says: str, caplog: Any) -> None:
    warnings = warnings_of(caplog)
    _, model = both(make, offload, tmp_path)
    assert not is_vertical(model)
    assert says in warnings()[0]


def test_a_loss_with_a_part_for_each_router_keeps_the_ordinary_order(
    offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(caplog)
    model, batch = made(models.mixtral, "nothing", torch.bfloat16)
    memory = {"device": "2MiB", "host": "64MiB"}
    model, batches = offload(model, memory=memory, nvme={"paths": [str(tmp_path / "swap")]}), batches_of(batch, 4)
    model.config.output_router_logits = True
    for _ in range(2):
        infinity.backward(model, lambda batch: model(**batch, output_router_logits=True).loss, batches)
    assert not is_vertical(model)
    assert warnings() == [
        "micro-batches are computed one after the other: the units of the model do not form a chain: a result of "
        "a unit is used again after later units, as the loss uses the routers of a mixture of experts"
    ]


def test_blocks_that_add_to_a_list_are_no_chain(offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor, notes: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            x = torch.tanh(super().forward(x))
            notes.append(x.square().mean())
            return x

    class LoopState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Noting(32, 32) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            notes: list[torch.Tensor] = []
            for block in self.blocks:
                x = block(x, notes)
            return x.square().mean() + sum(notes)

    ordinary(LoopState, offload, tmp_path, "do not form a chain", caplog)


def test_modules_that_are_told_something_by_a_forward_are_no_chain(
    offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Told(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.blocks[1].factor = x.mean()
            for block in self.blocks:
                x = torch.tanh(block(x) * getattr(block, "factor", 1.0))
            return x.square().mean()

    ordinary(Told, offload, tmp_path, "the forward changes 'blocks.1.factor' of the model", caplog)


def test_a_buffer_that_the_forward_changes_keeps_the_ordinary_order(
    offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(caplog)
    _, model = both(lambda: Blocks(nn.BatchNorm1d(32)), offload, tmp_path)
    assert not is_vertical(model)
    assert "the forward changes 'middle.0." in warnings()[0]
    model.eval()
    infinity.backward(model, model, inputs())
    assert is_vertical(model)


def test_a_setting_of_torch_for_the_time_of_a_forward_keeps_the_ordinary_order(
    offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(caplog)
    model = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]})

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss: torch.Tensor = model(x)
        return loss

    for _ in range(2):
        infinity.backward(model, loss_fn, inputs())
    assert torch.backends.cuda.flash_sdp_enabled()
    assert "flash_sdp_enabled is set during a part of the forward" in warnings()[0]


def test_the_loss_function_may_call_the_model_twice(
    offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = warnings_of(caplog)

    class Pair(Blocks):
        pass

    model = offload(Pair().train(), nvme={"paths": [str(tmp_path / "swap")]})
    for _ in range(2):
        infinity.backward(model, lambda x: model(x) - model(x + 1), inputs())
    assert "the loss function calls the model 2 times for one micro-batch" in warnings()[0]
    assert not is_vertical(model)


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


# -- learning ----------------------------------------------------------------------------------------------------------


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


def test_no_graph_waits_for_python_to_collect_it(offload: Any, tmp_path: Path) -> None:
    model, batches = offload(Blocks().train(), nvme={"paths": [str(tmp_path / "swap")]}), inputs()
    shapes = [batch.shape for batch in batches]

    def alive() -> int:
        return sum(type(each) is torch.Tensor and each.shape in shapes for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        infinity.backward(model, model, batches)
        after = alive()
    finally:
        gc.enable()
    assert is_vertical(model)
    assert after == before


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
