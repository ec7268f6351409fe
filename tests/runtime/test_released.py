"""Every public way to read or write a parameter, while its values are away: a right value or an error, never NaN."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack

import infinity
from infinity.coordinator import registry
from infinity.units.released_parameters import ReleasedParameter
from tests.conftest import weights_of

Use = Callable[[nn.Parameter], Any]

WIDTH = 16


def _assigned(parameter: nn.Parameter) -> Any:
    other = torch.zeros(WIDTH, WIDTH)
    other.data = parameter
    return other


def _as_gradient(parameter: nn.Parameter) -> Any:
    leaf = torch.ones(WIDTH, WIDTH, requires_grad=True)
    (leaf * 1).backward(parameter)
    return leaf.grad


def _saved(parameter: nn.Parameter) -> Any:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _copied(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros(WIDTH, WIDTH).copy_(parameter)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


_leaf = torch.ones(WIDTH, WIDTH, requires_grad=True)


def _written_to_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.ones(WIDTH, WIDTH)


READS: dict[str, Use] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p[0, 0]),
    "bool": lambda p: bool(p[0, 0]),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "np.asarray": lambda p: np.asarray(p.detach()),
    "np.array": lambda p: np.array(p),
    "from_dlpack": lambda p: torch.from_dlpack(p.detach()),
    "__dlpack__": lambda p: torch.from_dlpack(p),
    "index": lambda p: p[0],
    "slice": lambda p: p[1:3, ::2],
    "mask": lambda p: p[torch.eye(WIDTH).bool()],
    "iterate": lambda p: list(p),
    "unbind": lambda p: p.unbind(),
    "contains": lambda p: 0.5 in p,
    "T": lambda p: p.T,
    "mT": lambda p: p.mT,
    "real": lambda p: p.real + 0,
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(4, -1),
    "flatten": lambda p: p.flatten(),
    "expand": lambda p: p.expand(2, WIDTH, WIDTH),
    "permute": lambda p: p.permute(1, 0),
    "contiguous": lambda p: p.contiguous() + 0,
    "to double": lambda p: p.to(torch.float64),
    "to itself, copied": lambda p: p.to("cpu", copy=True),
    "double()": lambda p: p.double(),
    "half()": lambda p: p.half(),
    "type(dtype)": lambda p: p.type(torch.float64),
    "untyped_storage": lambda p: torch.empty(0).set_(p.untyped_storage(), p.storage_offset(), (WIDTH, WIDTH)),
    "data_ptr": lambda p: p.data_ptr() and None,
    "to_dlpack": lambda p: torch.from_dlpack(to_dlpack(p.detach())),
    "func.jvp": lambda p: torch.func.jvp(lambda w: w * 2, (p,), (torch.ones(WIDTH, WIDTH),))[0],
    "functional_call": lambda p: torch.func.functional_call(nn.Linear(WIDTH, 2), {"weight": p}, torch.ones(2, WIDTH)),
    "autograd.Function": lambda p: _Twice.apply(p),
    "torch.ops": lambda p: torch.ops.aten.mul.Tensor(p, 2),
    "checkpoint": lambda p: checkpoint(lambda w: w * 2, p, use_reentrant=False),
    "collate": lambda p: torch.utils.data.default_collate([p]),
    "norm": lambda p: p.norm(),
    "linalg.norm": lambda p: torch.linalg.norm(p),
    "sum": lambda p: p.sum(),
    "mean": lambda p: torch.mean(p),
    "max": lambda p: p.max(),
    "argmax": lambda p: p.argmax(),
    "sort": lambda p: p.sort(),
    "isnan": lambda p: p.isnan().float(),
    "==": lambda p: (p == p).float(),
    "equal": lambda p: torch.equal(p, p),
    "allclose": lambda p: torch.allclose(p, torch.ones(WIDTH, WIDTH)),
    "+": lambda p: p + 1,
    "reversed -": lambda p: 1 - p,
    "@": lambda p: torch.ones(2, WIDTH) @ p,
    "reversed @": lambda p: p @ torch.ones(WIDTH, 2),
    "linear": lambda p: F.linear(torch.ones(2, WIDTH), p),
    "linear's bias": lambda p: F.linear(torch.ones(2, WIDTH), torch.ones(WIDTH, WIDTH), p[0]),
    "embedding": lambda p: F.embedding(torch.arange(4), p),
    "layer_norm": lambda p: F.layer_norm(torch.ones(2, WIDTH), (WIDTH,), p[0]),
    "conv1d": lambda p: F.conv1d(torch.ones(1, WIDTH, 4), p[:, :, None]),
    "einsum": lambda p: torch.einsum("ij,kj->ik", torch.ones(2, WIDTH), p),
    "bmm": lambda p: torch.bmm(torch.ones(1, 2, WIDTH), p[None]),
    "stack": lambda p: torch.stack([p, p]),
    "cat": lambda p: torch.cat([p, torch.ones(1, WIDTH)]),
    "where": lambda p: torch.where(torch.eye(WIDTH).bool(), p, p),
    "foreach_norm": lambda p: torch._foreach_norm([p]),
    "foreach_add": lambda p: torch._foreach_add([p], 1.0),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "copy into": _copied,
    "lerp into": lambda p: torch.zeros(WIDTH, WIDTH).lerp_(p, 0.5),
    "out=": lambda p: torch.add(p, 1, out=torch.empty(0)),
    "new_tensor of it": lambda p: torch.ones(1).new_tensor(p.detach()),
    "asarray": lambda p: torch.asarray(p.detach()),
    "Parameter of it": lambda p: nn.Parameter(p.detach()),
    "addmm": lambda p: torch.addmm(torch.ones(2, WIDTH), torch.ones(2, WIDTH), p),
    "gather": lambda p: p.gather(0, torch.zeros(1, WIDTH, dtype=torch.long)),
    "autocast linear": lambda p: F.linear(torch.ones(2, WIDTH), p).float(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": _saved,
    "repr": repr,
    "format": "{}".format,
}
WRITES: dict[str, Use] = {
    "data =": _written_to_data,
    "data.copy_": lambda p: p.data.copy_(torch.ones(WIDTH, WIDTH)),
    "mul_": lambda p: p.mul_(1.0),
    "copy_": lambda p: p.copy_(torch.ones(WIDTH, WIDTH)),
    "item =": lambda p: p.__setitem__(0, 1.0),
    "fill_": lambda p: p.fill_(1.0),
    "init.normal_": nn.init.normal_,
    "foreach_add_": lambda p: torch._foreach_add_([p], 1.0),
    "out= itself": lambda p: torch.add(torch.ones(WIDTH, WIDTH), 1, out=p),
    "resize_": lambda p: p.resize_(2, 2),
    "share_memory_": lambda p: p.share_memory_(),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.ones(WIDTH * WIDTH), [p]),
    "load": lambda p: p.__setstate__((torch.ones(1).untyped_storage(), 0, (1,), (1,))),
}
METADATA: dict[str, Use] = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(1),
    "stride": lambda p: p.stride(),
    "is_contiguous": lambda p: p.is_contiguous(),
    "numel": lambda p: p.numel(),
    "torch.numel": torch.numel,
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "len": len,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "element_size": lambda p: p.element_size(),
    "nbytes": lambda p: p.nbytes,
    "type": lambda p: p.type(),
    "is_leaf": lambda p: p.is_leaf,
    "requires_grad": lambda p: p.requires_grad,
    "grad": lambda p: p.grad,
    "grad_fn": lambda p: p.grad_fn,
    "is_cuda": lambda p: p.is_cuda,
    "is_floating_point": lambda p: p.is_floating_point(),
    "torch.is_floating_point": torch.is_floating_point,
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "hash": lambda p: hash(p) == id(p),
    "in a dict": lambda p: {p: 1}[p],
    "to nothing new": lambda p: p.to("cpu", torch.float32) is p,
    "float() nothing new": lambda p: p.float() is p,
    "zeros_like": torch.zeros_like,
    "zeros_like's strides": lambda p: torch.zeros_like(p).stride(),
    "new_zeros": lambda p: p.new_zeros(2),
    "x.to(p)": lambda p: torch.ones(1, dtype=torch.float64).to(p).dtype,
    "x.type_as(p)": lambda p: torch.ones(1, dtype=torch.float64).type_as(p).dtype,
    "x.view_as(p)": lambda p: torch.ones(WIDTH * WIDTH).view_as(p).shape,
    "x.expand_as(p)": lambda p: torch.ones(1).expand_as(p).shape,
}
LEAKS: dict[str, Use] = {
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.Tensor": lambda p: torch.Tensor(p),
    "torch.FloatTensor": lambda p: torch.FloatTensor(p),
    "new": lambda p: torch.ones(1).new(p),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "_make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p),
    "torch.as_tensor to another dtype": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "torch.asarray to another dtype": lambda p: torch.asarray(p, dtype=torch.float64),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor),
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
    "func.grad": lambda p: torch.func.grad(lambda w: (w * w).sum())(p),
    "other.data =": _assigned,
    "other.set_": lambda p: torch.zeros(WIDTH, WIDTH).set_(p),
    "backward(p)": _as_gradient,
    "grad_outputs=": lambda p: torch.autograd.grad(_leaf * 1, [_leaf], grad_outputs=[p]),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p]).to_padded_tensor(0.0),
}
"""Operations that do not ask the class of their argument ([Note: never a silent NaN])."""

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Reader(nn.Module):
    """Calls its first blocks, and then lets a test use the weight of one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.use: Use | None = None

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks[:3]:
            x = block(x)
        return x.sum() if self.use is None else self.use(self.blocks[5].weight)


@pytest.fixture(params=["away", "on the device"])
def reader(request: pytest.FixtureRequest, offload: Any) -> Reader:
    model = Reader()
    model.values = model.blocks[5].weight.detach().clone()
    tight = {"device": "8KiB", "host": "64MiB"}
    model = offload(model, memory=tight if request.param == "away" else {"device": "64MiB", "host": "64MiB"})
    model(torch.ones(2, WIDTH))  # in the second case everything is fetched, and stays
    return model


def has_nan(value: Any) -> bool:
    leaves = [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    numbers = [leaf for leaf in tree_leaves(value) if isinstance(leaf, float)]
    arrays = [torch.from_numpy(leaf) for leaf in tree_leaves(value) if isinstance(leaf, np.ndarray)]
    return any(bool(leaf.isnan().any()) for leaf in leaves + arrays) or any(number != number for number in numbers)


def plain() -> nn.Parameter:
    torch.manual_seed(0)
    return Reader().blocks[5].weight


def outcome(use: Callable[[], Any]) -> Any:
    """Return the result of the call, or its exception."""
    try:
        return use()
    except Exception as error:
        return error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", [5, 0], ids=["not called", "called"])
def test_outside_the_forward_every_use_raises(block: int, mode: str, reader: Reader) -> None:
    weight = reader.blocks[block].weight
    for way, use in (READS | WRITES).items():
        with MODES[mode]():
            answer = outcome(lambda use=use: use(weight))
        if way in ("repr", "format"):
            assert f"'blocks.{block}.weight'" in answer
            assert "values in the store" in answer
        elif way == "equal":
            assert answer is True
        else:
            assert isinstance(answer, infinity.ReleasedParameterError), (way, answer)
            assert f"'blocks.{block}.weight'" in str(answer), way
    assert reader(torch.ones(2, WIDTH)).isfinite()


REFUSED_IN_THE_FORWARD = {"data", "deepcopy", "copy", "pickle", "torch.save"}
"""They go through `.data`, or make a second parameter."""


@pytest.mark.parametrize("mode", MODES)
def test_in_the_forward_a_weight_is_brought_when_it_is_read(mode: str, reader: Reader) -> None:
    for way, use in READS.items():
        reader.use = None
        reader(torch.ones(2, WIDTH))  # fetches others: with little memory the weight is away again
        reader.use = use
        with MODES[mode]():
            expected = outcome(lambda use=use: use(plain()))
            seen = outcome(lambda: reader(torch.ones(2, WIDTH)))
        if way in REFUSED_IN_THE_FORWARD:
            assert isinstance(seen, infinity.ReleasedParameterError), (way, seen)
        elif isinstance(expected, Exception):
            assert type(seen) is type(expected), (way, seen)
        elif way not in ("repr", "format"):
            assert not isinstance(seen, Exception), (way, seen)
            assert not has_nan(seen), way
            for mine, theirs in zip(tree_leaves(seen), tree_leaves(expected), strict=True):
                same = torch.equal if isinstance(mine, torch.Tensor) else np.array_equal
                assert same(mine, theirs), way


def test_where_the_error_says_that_values_are_they_are(reader: Reader, tmp_path: Path) -> None:
    weight = reader.blocks[5].weight
    with pytest.raises(infinity.ReleasedParameterError, match=r"inside the model's forward, or in `with infinity.gath"):
        weight.norm()
    reader.use = nn.Parameter.norm
    assert reader(torch.ones(2, WIDTH)) == reader.values.norm()
    with infinity.gathered(reader, reader.blocks[5]):
        assert weight.norm() == reader.values.norm()
    assert torch.equal(dict(infinity.state_dict(reader))["blocks.5.weight"], reader.values)
    infinity.save_pretrained(reader, tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["blocks.5.weight"], reader.values)


def test_a_weight_that_an_optimizer_of_torch_cannot_change_is_changed_by_one_of_infinity(reader: Reader) -> None:
    """The error's advice works, and so does infinity.gathered."""
    reader.use = lambda weight: (torch.ones(2, WIDTH) @ weight).square().sum()
    reader(torch.ones(2, WIDTH)).backward()
    with pytest.raises(infinity.ReleasedParameterError, match=r"such as infinity\.AdamW\(model\.parameters\(\)\)"):
        nn.init.normal_(reader.blocks[5].weight)
    infinity.AdamW(reader.parameters(), lr=1e-2).step()
    assert not torch.equal(weights_of(reader)["blocks.5.weight"], reader.values)
    with infinity.gathered(reader, reader.blocks[5], write=True):
        nn.init.ones_(reader.blocks[5].weight)
    assert bool((weights_of(reader)["blocks.5.weight"] == 1).all())


def test_metadata_is_that_of_the_values(reader: Reader) -> None:
    weight = reader.blocks[5].weight
    for way, ask in METADATA.items():
        mine, theirs = ask(weight), ask(plain())
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, way
        assert isinstance(weight, ReleasedParameter), way


def test_a_parameter_stays_where_accelerate_sends_that_of_a_rank(reader: Reader) -> None:
    """An ordinary tensor would be copied: torch treats `cpu:0` and `cpu` as different places."""
    weight = reader.blocks[5].weight
    for device in ("cpu:0", torch.device("cpu", 1)):
        assert weight.to(device) is weight
        assert weight.to(device=device) is weight


def test_storage_of_a_released_parameter_gives_no_address_to_write_to(reader: Reader) -> None:
    with pytest.raises((RuntimeError, BufferError)):
        to_dlpack(reader.blocks[5].weight)


def test_replacing_the_storage_of_a_parameter_is_noticed(reader: Reader) -> None:
    with torch.no_grad():
        reader.blocks[5].weight.set_(torch.ones(WIDTH, WIDTH))
    with pytest.raises(infinity.ModelError, match="'blocks.5.weight'.* was changed outside infinity"):
        reader(torch.ones(2, WIDTH))


def test_the_leaks_that_are_documented_are_all(offload: Any) -> None:
    """Should torch close one, its words in the documentation go."""
    model = offload(Reader(), memory={"device": "8KiB", "host": "64MiB"})
    for way, use in LEAKS.items():
        assert has_nan(use(model.blocks[5].weight)), way


def test_after_a_use_in_the_forward_gradients_are_those_of_torch(reader: Reader) -> None:
    reader.use = lambda weight: (torch.ones(2, WIDTH) @ weight).square().sum()
    theirs = plain()
    (torch.ones(2, WIDTH) @ theirs).square().sum().backward()
    optim = infinity.SGD(reader.parameters(), lr=1.0)
    reader(torch.ones(2, WIDTH)).backward()
    optim.step()
    updated = dict(infinity.state_dict(reader))["blocks.5.weight"]
    assert torch.equal(updated, reader.values - theirs.grad)


def test_hooks_and_requires_grad_of_a_released_parameter_work(reader: Reader) -> None:
    weight, seen = reader.blocks[0].weight, []
    handle = weight.register_hook(lambda gradient: seen.append(gradient.shape))
    reader(torch.ones(2, WIDTH)).backward()
    assert seen == [weight.shape]
    handle.remove()
    weight.requires_grad_(True)
    assert torch.autograd.grad(reader(torch.ones(2, WIDTH)), [weight])[0].shape == weight.shape


@pytest.mark.parametrize("call", [torch.Tensor.backward, torch.autograd.backward])
def test_a_backward_pass_for_some_parameters_gives_these_their_gradients(call: Any, reader: Reader) -> None:
    """`loss.backward(inputs=[...])`."""
    weight, other = reader.blocks[0].weight, reader.blocks[1].weight
    call(reader(torch.ones(2, WIDTH)), inputs=[weight])
    assert weight.grad.norm() > 0
    assert other.grad is None


def test_a_hook_in_backward_may_read_its_parameter(reader: Reader) -> None:
    weight, seen = reader.blocks[0].weight, []
    before = dict(infinity.state_dict(reader))["blocks.0.weight"]
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.detach().clone()))
    reader(torch.ones(2, WIDTH)).backward()
    assert torch.equal(seen[0], before)
    with pytest.raises(infinity.ReleasedParameterError):
        weight.norm()


def test_a_parameter_of_a_model_that_is_gone_says_so(swap_config: Any) -> None:
    model = infinity.offload(Reader(), swap_config(memory={"device": "8KiB", "host": "64MiB"}))
    weight = model.blocks[5].weight
    infinity.close(model)
    with pytest.raises(infinity.InfinityError, match="outside the model's forward"):
        weight.norm()
    assert registry.find(weight) is not None


def test_torch_compile_looks_at_released_parameters_and_computes_with_their_values(offload: Any) -> None:
    """Dynamo asks for everything that a tensor has while it traces, and reads no values."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain_model = copy.deepcopy(model)
    model = offload(model, memory={"device": "8KiB", "host": "64MiB"})
    optims = infinity.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain_model.parameters(), lr=0.1)
    compiled, x = torch.compile(model, backend="eager"), torch.randn(2, WIDTH)
    for _ in range(2):
        losses = [each(x).square().sum() for each in (compiled, plain_model)]
        assert losses[0].item() == losses[1].item()
        for loss, optim in zip(losses, optims, strict=True):
            loss.backward()
            optim.step()
            optim.zero_grad()


@pytest.mark.parametrize("wrapped", [True, False], ids=["torch.compile", "Module.compile"])
def test_torch_compile_around_compiled_parts_leaves_the_hooks_out(
    wrapped: bool, offload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    losses = []
    for kind in (torch.optim.SGD, infinity.SGD):
        torch.manual_seed(0)
        model: Any = Reader()
        for index, block in enumerate(model.blocks):
            if wrapped:
                model.blocks[index] = torch.compile(block, backend="eager")
            else:
                block.compile(backend="eager")
        if kind is infinity.SGD:
            model = offload(model, memory={"device": "8KiB", "host": "64MiB"})
        optim, compiled = kind(model.parameters(), lr=1e-3), torch.compile(model, backend="eager")
        for _ in range(3):
            loss = compiled(torch.ones(2, WIDTH)) ** 2
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)
    assert "recompile_limit" not in caplog.text  # as where the hooks are compiled, once for each module


def test_a_parametrization_that_is_registered_in_a_forward_changes_no_value(reader: Reader) -> None:
    """During the registration, torch sets the parameter to itself. PEFT does this in each forward."""
    block = reader.blocks[5]

    def use(weight: nn.Parameter) -> torch.Tensor:
        parametrize.register_parametrization(block, "weight", nn.Identity())
        with parametrize.cached():
            total = block.weight.sum()
        parametrize.remove_parametrizations(block, "weight", leave_parametrized=False)
        return total

    reader.use = use
    for _ in range(2):
        assert reader(torch.ones(2, WIDTH)) == reader.values.sum()
    registry.coordinator_of(reader).require_untouched()


def test_two_parameters_are_compared_between_steps(reader: Reader) -> None:
    """Lightning's BaseFinetuning compares them before it adds unfrozen parameters to the optimizer."""
    first, second, *_, last = (block.weight for block in reader.blocks)
    assert torch.equal(first, first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, reader.blocks[0].bias)
    assert torch.equal(last, reader.values)
    with pytest.raises(infinity.ReleasedParameterError):
        last.norm()
