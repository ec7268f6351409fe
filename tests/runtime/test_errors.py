"""Mistakes of users end in an error that names them, or work; and the next good step is good."""

from __future__ import annotations

import copy
import errno
import functools
import math
import multiprocessing
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import infinity
from infinity import _native
from infinity.coordinator import registry
from tests.conftest import require_no_leaks, weights_of
from tests.models import Batch, llama, loss_of

TIGHT = {"device": "400KiB", "host": "64MiB"}


@pytest.fixture
def trained(offload: Any) -> tuple[Any, Batch, infinity.AdamW]:
    """A bf16 Llama with released units, a batch, its optimizer."""
    model, batch = llama()
    model = offload(model.bfloat16().train(), memory=TIGHT)
    return model, batch, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)


def step(model: Any, batch: Batch, optim: infinity.AdamW) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


@functools.cache
def undisturbed(on_device: bool) -> list[float]:
    """Return the losses of two steps of a copy: on the device, or in RAM."""
    torch.manual_seed(0)
    plain, batch = llama()
    config = {"weights": "host", "optimizer": "host", "activations": "keep", "memory": {"host": "64MiB"}}
    plain = infinity.offload(plain.bfloat16().train(), config)
    assert (registry.coordinator_of(plain).resources.device is not None) == on_device
    optim = infinity.AdamW(plain.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses = [step(plain, batch, optim) for _ in range(2)]
    infinity.close(plain)
    return losses


def assert_next_step_is_good(model: Any, batch: Batch, optim: infinity.AdamW) -> None:
    """Check that the next steps give the losses of an undisturbed copy, and that nothing leaked. The model has done no
    step before."""
    coordinator = registry.coordinator_of(model)
    optim.zero_grad()
    assert [step(model, batch, optim) for _ in range(2)] == undisturbed(coordinator.resources.device is not None)
    assert all(not record.weights.in_use for record in coordinator.units)
    require_no_leaks(model)


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(infinity.ConfigError, match=r"unknown key 'wieghts'; did you mean 'weights'\?"):
        infinity.load_config({"wieghts": "nvme"})


def test_two_runs_on_one_directory_get_a_clear_error(trained: Any, swap_config: Callable[..., Any]) -> None:
    with pytest.raises(infinity.StoreLockedError, match=rf"in use by another run \(process {os.getpid()}\)"):
        infinity.offload(llama()[0], swap_config())


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = {"weights": "nvme", "optimizer": "nvme", "nvme": {"paths": [str(tmp_path / "file" / "swap")]}}
    with pytest.raises(infinity.ConfigError, match="/file is not a directory"):
        infinity.offload(llama()[0], config)


def test_a_full_disk_is_an_error_before_anything_moves(swap_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from infinity.io.directory import SwapDirectory

    monkeypatch.setattr(SwapDirectory, "free_bytes", property(lambda self: 1000))
    config = swap_config()
    model, _ = llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(infinity.SwapIOError, match="disk is full") as caught:
        infinity.offload(model, config)
    assert caught.value.errno == errno.ENOSPC
    assert not Path(config["nvme"]["paths"][0]).exists()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_tmpfs_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    path = Path("/dev/shm") / f"infinity-test-{os.getpid()}"
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs at /dev/shm")
    model, batch = llama()
    with caplog.at_level("WARNING", "infinity"):
        tiers = {"weights": "nvme", "optimizer": "nvme", "commit_every": 0}
        model = infinity.offload(model, tiers | {"nvme": {"paths": [str(path)]}})
    assert "is on tmpfs" in caplog.text
    step(model, batch, infinity.AdamW(model.parameters()))
    infinity.close(model)
    assert not path.exists()


def test_a_device_budget_too_small_names_the_unit_and_the_number(swap_config: Any) -> None:
    with pytest.raises(infinity.PlanError, match=r"unit 'model.layers.0' needs .* Raise memory.device to \d+KiB"):
        infinity.offload(llama()[0], swap_config(memory={"device": "100KiB", "host": "64MiB"}))


def test_a_host_budget_too_small_names_the_unit_and_the_number(swap_config: Any) -> None:
    with pytest.raises(infinity.PlanError, match=r"largest unit is 'model.layers.0'.*raise memory.host to \d+KiB"):
        infinity.offload(llama()[0], swap_config(memory={"device": "1MiB", "host": "100KiB"}))


@pytest.mark.cpu_only("about host memory to the byte")
def test_a_second_backward_without_room_for_fp32_says_so(offload: Any) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).bfloat16()
    needed = 4 * (256 * 256 + 256) * 2  # bytes of bf16 gradients
    numel = 256 * 256 + 256
    tile = _native.UpdatePipeline.staging_tile_bytes(numel, weight_dtype="bf16", master="split16", moments="fp32")
    memory = {"device": "2MiB", "host": 3 * tile + needed + 40_000}
    model = offload(model, memory=memory, gradients="host")
    x = torch.randn(4, 256).bfloat16()
    model(x).sum().backward()
    with pytest.raises(infinity.PlanError, match="a second backward pass before the step needs fp32 gradients"):
        model(x).sum().backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradients_skip_the_step_and_then_stop_it(value: float, trained: Any) -> None:
    model, batch, optim = trained
    before = weights_of(model)
    for _ in range(4):
        (loss_of(model, batch) * value).backward()
        optim.step()
        optim.zero_grad()
    assert optim.skipped_steps == 4
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())
    (loss_of(model, batch) * value).backward()
    with pytest.raises(infinity.NonFiniteGradientError, match="5 steps in a row, first in 'model.embed_tokens.weight'"):
        optim.step()
    assert_next_step_is_good(*trained)


def test_a_step_is_skipped_for_what_its_gradients_do_not_say(trained: Any) -> None:
    model, batch, optim = trained
    before = weights_of(model)
    for step in range(1, 6):
        loss_of(model, batch).backward()
        optim.skip_next_step("the loss is nan")
        stops = pytest.raises(infinity.NonFiniteGradientError, match="the loss is nan; 5 steps in a row")
        with stops if step == 5 else nullcontext():
            optim.step()
        optim.zero_grad()
        assert optim.skipped_steps == step
        assert math.isnan(optim.last_grad_norm)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())
    assert_next_step_is_good(*trained)
    assert optim.skipped_steps == 5


def test_backward_after_step_on_old_weights_is_an_error(trained: Any) -> None:
    model, batch, optim = trained
    first, second = loss_of(model, batch), loss_of(model, batch)
    first.backward()
    optim.step()
    with pytest.raises(infinity.StaleWeightsError, match="from before the last optim.step"):
        second.backward()
    optim.zero_grad()
    for loss in [loss_of(model, batch), loss_of(model, batch)]:
        loss.backward()
    optim.step()


def test_changing_saved_tensors_in_place_is_an_error_as_in_torch(offload: Any) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(self.blocks[0](x))
            y.add_(1)
            return self.blocks[1](y).sum()

    model = offload(InPlace())
    with pytest.raises(infinity.StaleWeightsError, match="modified in place"):
        model(torch.randn(2, 8)).backward()


def test_fp32_weights_under_autocast_are_refused_with_the_fix(offload: Any) -> None:
    model, batch = llama()
    model = offload(model)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(infinity.ModelError, match=r"or call model\.to\(torch\.bfloat16\) before infinity\.offload"),
    ):
        loss_of(model, batch)
    infinity.close(model)
    model = offload(llama()[0].to(torch.bfloat16))
    optim = infinity.AdamW(model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    optim.step()
    assert loss.isfinite()


def test_torchs_clip_grad_value_raises(trained: Any) -> None:
    model, batch, _ = trained
    loss_of(model, batch).backward()
    with pytest.raises(infinity.ReleasedParameterError, match="max_grad_norm"):
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert_next_step_is_good(*trained)


def test_fp32_weights_under_autocast_inside_the_forward_are_refused_too(offload: Any) -> None:
    """Accelerate replaces model.forward by one that turns autocast on."""
    model, batch = llama()
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    model = offload(model)
    with pytest.raises(infinity.ModelError, match=r"in the forward of LlamaDecoderLayer.*dtype=torch\.bfloat16"):
        loss_of(model, batch)


def test_autocast_with_bf16_weights_and_a_few_in_fp32_is_let_through(offload: Any) -> None:
    model, batch = llama()
    model.bfloat16().model.layers[0].self_attn.k_proj.float()
    model = offload(model)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    optim.step()
    assert loss.isfinite()


@pytest.mark.parametrize(
    "use",
    [
        lambda model: copy.deepcopy(model),
        lambda model: copy.deepcopy(model.model.layers[1].mlp),
        lambda model: pickle.dumps(model),
        lambda model: copy.deepcopy(model.lm_head.weight),
    ],
    ids=["deepcopy", "a block's deepcopy", "pickle", "a parameter's deepcopy"],
)
def test_nothing_passes_placeholders_on(use: Callable[[Any], Any], trained: Any, tmp_path: Path) -> None:
    """The error's advice has the same effect."""
    with pytest.raises(infinity.ReleasedParameterError, match="placeholder"):
        use(trained[0])
    infinity.save_pretrained(trained[0], tmp_path / "saved")
    others = llama()[0].bfloat16(), LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    others[0].load_state_dict(trained[0].state_dict())
    with infinity.gathered(trained[0]):
        for other in others:
            for name, value in other.state_dict().items():
                assert torch.equal(trained[0].state_dict()[name], value)
    assert_next_step_is_good(*trained)


@pytest.mark.parametrize("convert", ["float", "half", "double"])
def test_converting_the_model_raises_and_changes_nothing(convert: str, trained: Any, tmp_path: Path) -> None:
    model, batch, _ = trained
    loss_of(model, batch)
    with pytest.raises(infinity.ReleasedParameterError, match=f"{convert} uses parameter"):
        getattr(model, convert)()
    infinity.save_pretrained(model, tmp_path / "saved")
    assert_next_step_is_good(*trained)
    with infinity.gathered(model, model.lm_head):
        assert getattr(model.lm_head.weight.detach(), convert)().dtype != torch.bfloat16


@pytest.mark.parametrize("convert", ["float", "half"])
def test_a_conversion_is_done_before_the_model_is_offloaded_or_as_it_is_loaded(
    convert: str, trained: Any, swap_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The error's advice works."""
    model, batch, _ = trained
    with pytest.raises(infinity.ReleasedParameterError, match=r"before infinity\.offload, or load it with infinity"):
        getattr(model, convert)()
    infinity.save_pretrained(model, tmp_path / "saved")
    infinity.close(model)
    dtype = {"float": torch.float32, "half": torch.float16}[convert]
    loaded = infinity.load_pretrained(tmp_path / "saved", swap_config(), dtype=dtype)
    weights = weights_of(loaded)
    infinity.close(loaded)
    other = getattr(LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16), convert)()
    assert loss_of(infinity.offload(other, swap_config()), batch).isfinite()
    for name, weight in weights_of(other).items():
        assert weight.dtype == dtype
        assert torch.equal(weight, weights[name])
    infinity.close(other)


def test_moving_to_the_same_place_is_harmless(trained: Any) -> None:
    trained[0].to("cpu").to(torch.bfloat16)
    assert_next_step_is_good(*trained)


def test_a_module_that_replaced_another_is_noticed(trained: Any) -> None:
    model, batch, _ = trained
    model.model.embed_tokens = nn.Embedding(200, 64).bfloat16()
    with pytest.raises(infinity.ModelError, match="'embed_tokens' was replaced"):
        loss_of(model, batch)


def test_resizing_the_embeddings_after_a_step_is_refused(trained: Any) -> None:
    with pytest.raises(infinity.ModelError, match="cannot be offloaded again: an optimizer was made for it"):
        trained[0].resize_token_embeddings(200)
    assert_next_step_is_good(*trained)


def test_a_parameter_that_is_resized_in_gathered_is_noticed(trained: Any) -> None:
    model = trained[0]

    def resize(*, write: bool) -> None:
        with infinity.gathered(model, model.lm_head, write=write):
            model.lm_head.weight.data = torch.zeros(200, 64, dtype=torch.bfloat16)

    for write in (False, True):
        with pytest.raises(infinity.ModelError, match=r"'lm_head.weight' has shape \(200, 64\).*change values only"):
            resize(write=write)
    assert_next_step_is_good(*trained)


def test_what_is_resized_in_vain_in_gathered_is_resized_without_it(offload: Any) -> None:
    model, batch = llama(layers=2)
    model = offload(model)
    with pytest.raises(infinity.ModelError, match=r"resize_token_embeddings\(\) needs no infinity\.gathered"):  # noqa: SIM117
        with infinity.gathered(model, model.lm_head, write=True):
            model.lm_head.weight.data = torch.zeros(200, 64)
    model.resize_token_embeddings(200)
    step(model, batch, infinity.AdamW(model.parameters()))
    assert weights_of(model)["lm_head.weight"].shape == (200, 64)


def test_changing_a_weight_in_place_outside_the_forward_raises_whatever_is_on_the_device(trained: Any) -> None:
    model, batch, _ = trained
    loss_of(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            with pytest.raises(infinity.ReleasedParameterError, match="mul_ uses parameter"):
                parameter.mul_(1.5)
            with pytest.raises(infinity.ReleasedParameterError, match="`.data` of parameter"):
                parameter.data.mul_(1.5)
    assert_next_step_is_good(*trained)
    before = weights_of(model)["lm_head.weight"]
    with infinity.gathered(model, model.lm_head, write=True), torch.no_grad():
        model.lm_head.weight.mul_(2)
        model.lm_head.weight.data.mul_(2)
    assert torch.equal(weights_of(model)["lm_head.weight"], before * 4)


def test_changing_a_weight_in_place_in_a_forward_is_noticed(offload: Any, computes_on: Any) -> None:
    """By the next forward; on a device, where what was used rests, by the change itself."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.changes = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](x))
            if self.changes:
                change(self)
            return x.sum()

    def change(model: Any) -> None:
        with torch.no_grad():
            model.blocks[1].weight.mul_(1.5)

    model = offload(Changing())
    found = "the change would be lost"
    if computes_on is None:
        model(torch.randn(2, 8))
        found = "was changed outside infinity"
    with pytest.raises(infinity.ModelError, match=f"'blocks.1.weight'.*{found}.*`with infinity.gathered"):
        model(torch.randn(2, 8))
    infinity.close(model)
    model, plain = Changing(), Changing()
    model.changes = plain.changes = False
    plain.load_state_dict(model.state_dict())
    model = offload(model)
    for _ in range(2):
        assert torch.equal(*(each(torch.ones(2, 8)) for each in (model, plain)))
        with infinity.gathered(model, model.blocks[1], write=True):
            change(model)
        change(plain)


def test_a_forked_worker_cannot_use_the_model(trained: Any) -> None:
    def worker(channel: Any) -> None:
        try:
            loss_of(model, batch)
            channel.send("it ran")
        except infinity.ForkError as error:
            channel.send(str(error))

    model, batch, _ = trained
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs,))
    process.start()
    assert "cannot be used in a forked child" in ours.recv()
    process.join(60)
    assert process.exitcode == 0
    assert_next_step_is_good(*trained)


def test_a_dataloader_with_forked_workers_is_fine(trained: Any) -> None:
    model, batch, optim = trained
    rows = torch.utils.data.TensorDataset(batch["input_ids"])
    for (ids,) in torch.utils.data.DataLoader(rows, num_workers=2, multiprocessing_context="fork"):
        step(model, {"input_ids": ids, "labels": ids}, optim)


class Breaks:
    """Raises once, when armed, wherever it is called."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.armed = True

    def __call__(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise self.error


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_an_interrupted_one_is_good(where: str, error: Any, recompute: bool, trained: Any) -> None:
    model, batch, _ = trained
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    breaks = Breaks(error)
    if where == "forward":
        handle = model.model.layers[2].mlp.register_forward_hook(breaks)
    else:
        handle = model.model.layers[1].register_full_backward_pre_hook(breaks)
    with pytest.raises(type(error)):
        loss_of(model, batch).backward()
    assert not breaks.armed
    handle.remove()
    assert_next_step_is_good(*trained)


def test_step_right_after_an_interrupted_forward_works(trained: Any) -> None:
    model, batch, optim = trained
    handle = model.model.layers[2].mlp.register_forward_hook(Breaks(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, batch)
    handle.remove()
    optim.step()
    assert_next_step_is_good(*trained)


def test_a_gradient_that_an_interrupted_backward_took_away_is_not_made_up(trained: Any) -> None:
    """The handle was taken, the gradient never came, zero_grad forgot it, and the next backward has none of it."""
    model, batch, optim = trained
    last = model.lm_head.weight
    loss_of(model, batch).backward()
    loss = loss_of(model, batch)
    breaks = last.register_hook(Breaks(RuntimeError("mine")))
    with pytest.raises(RuntimeError, match="mine"):
        loss.backward()
    breaks.remove()
    optim.zero_grad()
    model.model(input_ids=batch["input_ids"]).last_hidden_state.float().sum().backward()
    assert last.grad is None
    optim.zero_grad()
    assert_next_step_is_good(*trained)


def test_use_after_close_is_an_error(trained: Any) -> None:
    model, batch, _ = trained
    infinity.close(model)
    infinity.close(model)
    with pytest.raises(infinity.InfinityError, match="was closed"):
        loss_of(model, batch)


def test_a_parameter_that_is_not_offloaded_is_refused() -> None:
    with pytest.raises(infinity.ModelError, match="call infinity.offload"):
        infinity.AdamW([nn.Parameter(torch.zeros(3))])


def test_unfreezing_after_a_step_is_refused(offload: Any) -> None:
    model, batch = llama()
    model.lm_head.weight.requires_grad_(False)
    model = offload(model)
    optim = infinity.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    step(model, batch, optim)
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(infinity.ModelError, match="before the first optimizer is made"):
        infinity.AdamW(model.parameters())
    with pytest.raises(infinity.ModelError, match="leave requires_grad=True until the optimizer of the other param"):
        optim.add_param_group({"params": model.lm_head.parameters()})


def test_what_is_frozen_after_the_optimizer_was_made_is_unfrozen_by_add_param_group(offload: Any) -> None:
    """The error's advice works."""
    ends = []
    for kind in (torch.optim.AdamW, infinity.AdamW):
        torch.manual_seed(0)
        model, batch = llama(layers=2)
        model = offload(model) if kind is infinity.AdamW else model
        head, body = [model.lm_head.weight], list(model.model.parameters())
        optim = kind(head, lr=1e-2)
        model.model.requires_grad_(False)
        losses = [step(model, batch, optim) for _ in range(2)]
        model.model.requires_grad_(True)
        optim.add_param_group({"params": body, "lr": 3e-3})
        losses += [step(model, batch, optim) for _ in range(2)]
        model.model.requires_grad_(False)
        losses += [step(model, batch, optim) for _ in range(2)]
        model.model.requires_grad_(True)
        losses += [step(model, batch, optim) for _ in range(2)]
        ends.append((losses, [optim.state_dict()["state"][index]["step"] for index in range(len(body) + 1)]))
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=1e-5, atol=1e-6)
    assert list(map(int, ends[0][1])) == ends[1][1] == [8, *[4] * len(body)]


def test_offloading_twice_is_refused(trained: Any, swap_config: Any) -> None:
    """Closed or not, it has no values to offload again; a model that is made anew has."""
    for close in (lambda: None, lambda: infinity.close(trained[0])):
        close()
        with pytest.raises(
            infinity.ModelError, match="is offloaded already.*load the model again, and offload the new one"
        ):
            infinity.offload(trained[0], swap_config())
    again = infinity.offload(llama()[0].bfloat16(), swap_config(memory=TIGHT))
    assert step(again, trained[1], infinity.AdamW(again.parameters())) > 0
    infinity.close(again)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gradients", "device"),
    ],
)
def test_what_is_not_built_yet_is_refused(key: str, value: Any) -> None:
    with pytest.raises(infinity.NotAvailableError, match="is not available yet; use"):
        infinity.load_config({key: value})


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, torch.func.vmap, torch.func.jacrev, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))],
)
def test_a_transform_of_torch_func_around_the_model_is_refused_and_autograd_does_it(
    transform: Any, offload: Any
) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, x = offload(copy.deepcopy(plain), memory={"device": "8KiB", "host": "64MiB"}), torch.ones(2, 8)
    with pytest.raises(infinity.ModelError, match="torch.func.*use torch.autograd.grad"):
        transform(lambda x: model(x).sum())(x)
    given = x.requires_grad_()
    assert torch.equal(*(torch.autograd.grad(each(given).sum(), given)[0] for each in (model, plain)))
    jacobian = torch.autograd.functional.jacobian
    assert torch.equal(jacobian(lambda x: model(x), x), jacobian(lambda x: plain(x), x))


def test_a_step_in_a_backward_pass_is_refused_and_one_after_it_does_the_same(offload: Any) -> None:
    """In torchtune's optimizer_in_bwd, and in PyTorch's tutorial, hooks step an optimizer for each parameter."""
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model, x = offload(copy.deepcopy(plain), memory={"device": "8KiB", "host": "64MiB"}), torch.ones(2, 8)

    def step_in_backward(model: nn.Module, kind: Any) -> list[Any]:
        optims = {each: kind([each], lr=1.0) for each in model.parameters()}
        return [each.register_post_accumulate_grad_hook(lambda each: optims[each].step()) for each in optims]

    step_in_backward(plain, torch.optim.SGD)
    handles = step_in_backward(model, infinity.SGD)
    with pytest.raises(infinity.ModelError, match=r"in a backward pass.*Make one optimizer for model.parameters\(\)"):
        model(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    optim = infinity.SGD(model.parameters(), lr=1.0)
    optim.zero_grad()
    model(x).square().sum().backward()
    optim.step()
    plain(x).square().sum().backward()
    assert all(torch.equal(weights_of(model)[name], value) for name, value in plain.state_dict().items())
