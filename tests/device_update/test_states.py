"""An update in torch operations ends in the native kernel's bits."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity import _native
from infinity.device_update.rules import Scratch
from infinity.device_update.states import DeviceStates, update_on_device
from tests.device_update import cases
from tests.sampling import number

POOL = _native.ThreadPool(1)
ROOTS = {wide: Scratch(cases.CPU, 1 << 16, wide_root=wide) for wide in (False, True)}


@pytest.mark.covering
@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("grad", cases.GRADS)
@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize("rule", cases.RULES)
def test_every_rule_and_form_ends_in_the_native_kernels_bits(
    rule: Any, form: str, grad: torch.dtype, tiny: bool
) -> None:
    for seed in range(number(12, 200)):
        numel = random.Random(seed).choice([1, 2, 255, 257, 4099, 9973, 20_011])
        here, given = cases.states(form, grad, numel, seed, tiny=tiny), cases.segments(rule, numel, seed)
        there = here.map(torch.clone)
        finite = cases.native(here, given, POOL)
        assert update_on_device(there, given, ROOTS[True]).item() == finite, seed
        cases.assert_equal(here, there, seed)
        assert torch.equal(here.grad, there.grad)


@pytest.mark.parametrize("rule", cases.RULES)
def test_chunks_of_any_size_end_in_the_same_bits(rule: Any) -> None:
    given = [_native.Segment(3, 9000, rule=rule, lr=0.3, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, step=2)]
    here = cases.states("split16", torch.bfloat16, 9973, 1)
    copies = [here.map(torch.clone) for _ in range(3)]
    cases.native(here, given, POOL)
    for numel, there in zip((1000, 4099, 20_000), copies, strict=True):
        update_on_device(there, given, Scratch(cases.CPU, numel, wide_root=True))
        cases.assert_equal(here, there, numel)


@pytest.mark.covering
@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize("rule", cases.RULES)
def test_twenty_steps_in_a_row_end_in_the_same_bits(rule: Any, form: str) -> None:
    here = cases.states(form, torch.bfloat16, 3001, 0)
    there = here.map(torch.clone)
    for step in range(1, 21):
        gradient = cases.states(form, torch.bfloat16, 3001, step).grad
        for each in (here, there):
            each.grad.copy_(gradient)
        given = cases.segments(rule, 3001, step, step=step, fresh=None)
        cases.native(here, given, POOL)
        update_on_device(there, given, ROOTS[True])
        cases.assert_equal(here, there, step)


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize("rule", cases.RULES)
def test_gradients_that_are_not_finite_give_the_same_bits_and_are_reported(rule: Any, form: str) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        here = cases.states(form, torch.float32, 1000, 4)
        here.grad[::7] = bad
        there = here.map(torch.clone)
        given = [_native.Segment(0, 1000, rule=rule, lr=0.1, beta1=0.9, beta2=0.99, step=2)]
        assert not cases.native(here, given, POOL)
        assert not update_on_device(there, given, ROOTS[True])
        cases.assert_equal(here, there, bad)


@pytest.mark.parametrize("state", ["weight", "exp_avg", "exp_avg_sq"])
def test_one_result_that_overflows_is_reported(state: str) -> None:
    here = cases.states("fp32", torch.float32, 1000, 5)
    big = 3e38
    if state == "weight":
        here.weight[7], options = big, {"lr": 0.1, "weight_decay": -10.0}
    else:
        here.grad[7] = 1e20 if state == "exp_avg_sq" else big
        options = {"lr": 0.0, "beta2": 1.0 if state == "exp_avg" else 0.5, "grad_scale": 2.0}
    given = [_native.Segment(0, 1000, beta1=-10.0 if state == "exp_avg" else 0.9, eps=1e-8, step=3, **options)]
    there = here.map(torch.clone)
    finite = cases.native(here, given, POOL)
    assert not finite
    assert update_on_device(there, given, ROOTS[True]).item() == finite
    cases.assert_equal(here, there, state)


def test_a_nan_of_any_payload_stays_a_nan() -> None:
    """A device may give results of which all bits are set; half of such a master rounds to −0."""
    patterns = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7FFF8000], np.uint32).view(np.float32)
    for form in ("split16", "bf16"):
        states = cases.states(form, torch.float32, 4, 0)
        with NansOf(torch.from_numpy(patterns)):
            update_on_device(states, [_native.Segment(0, 4, rule="sgd", lr=0.1, step=1)], ROOTS[False])
        assert states.weight.isnan().all()


class NansOf(TorchDispatchMode):
    """A device whose differences are these values."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.copy_(self.result) if func.overloadpacket is torch.ops.aten.sub_ else out


def test_nothing_changes_outside_the_segments_and_in_skipped_ones() -> None:
    states = cases.states("split16", torch.bfloat16, 1000, 6)
    before = states.map(torch.clone)
    options: dict[str, Any] = {"lr": 0.3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    given = [_native.Segment(0, 300, step=0, skip=True, **options), _native.Segment(500, 700, step=1, **options)]
    assert update_on_device(states, given, ROOTS[True])
    for one, other in zip(states.tensors[:4], before.tensors[:4], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one[:500], other[:500])
        assert torch.equal(one[700:], other[700:])
        assert not torch.equal(one[500:700], other[500:700])
    assert update_on_device(states, given[:1], ROOTS[True])


def test_moments_that_begin_are_not_read() -> None:
    states = [cases.states("split16", torch.bfloat16, 100, 7) for _ in range(2)]
    for moment in states[1].tensors[2:4]:
        assert moment is not None
        moment.fill_(float("nan"))
    for each in states:
        given = [_native.Segment(0, 100, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, step=9, fresh=True)]
        assert update_on_device(each, given, ROOTS[True])
    cases.assert_equal(*states, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master": "none", "residual": None}, "master 'none' is updated on the CPU only"),
        ({"exp_avg": torch.zeros(4, dtype=torch.bfloat16)}, "moments: bf16 and int8 are updated on the CPU only"),
        ({"exp_avg_sq": torch.zeros(8192, dtype=torch.uint8)}, "moments: bf16 and int8 are updated on the CPU only"),
        ({"weight": torch.zeros(4, dtype=torch.float16)}, "weights in torch.float16 with master 'split16'"),
        ({"grad": torch.zeros(4, dtype=torch.float64)}, "grad in torch.float64"),
        ({"residual": None}, "master 'split16' needs a residual of dtype torch.int16"),
        ({"grad": torch.zeros(5)}, "flat contiguous tensors of the same length"),
        ({"exp_avg": torch.zeros(8)[::2]}, "flat contiguous tensors of the same length"),
    ],
)
def test_states_that_a_device_does_not_update_are_refused(change: dict[str, Any], message: str) -> None:
    names = ("weight", "residual", "exp_avg", "exp_avg_sq", "grad")
    tensors = dict(zip(names, cases.states("split16", torch.bfloat16, 4, 0).tensors, strict=True))
    with pytest.raises(ValueError, match=message):
        DeviceStates(**{"master": "split16", **tensors, **change})


@pytest.mark.parametrize(
    ("rule", "ranges", "message"),
    [
        ("adagrad", [(0, 3), (3, 5)], "within 4 elements"),
        ("adagrad", [(0, 3), (2, 4)], "sorted, disjoint"),
        ("adamw", [(0, 2)], "rule 'adamw' uses exp_avg, which is None"),
    ],
)
def test_segments_that_do_not_go_with_the_states_change_nothing(
    rule: Any, ranges: list[tuple[int, int]], message: str
) -> None:
    states = cases.states("fp32", torch.float32, 4, 0)
    without = DeviceStates("weight", states.weight, None, None, states.exp_avg_sq, states.grad)
    before = states.map(torch.clone)
    given = [_native.Segment(begin, end, rule=rule, lr=0.1, step=1) for begin, end in ranges]
    with pytest.raises(ValueError, match=message):
        update_on_device(without, given, ROOTS[True])
    cases.assert_equal(states, before, None)


class Operations(TorchDispatchMode):
    """Counts the bytes that operations read and write, and refuses operations that round differently somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        assert not any(word in name for word in ("lerp", "addcmul", "addcdiv", "foreach", "rsqrt", "reciprocal")), name
        if name.startswith(("add", "sub")):
            assert kwargs.get("alpha", 1) == 1
            assert len(args) == 2
        if name.startswith("div"):
            assert all(isinstance(each, torch.Tensor) and each.shape == args[0].shape for each in args)
        out = func(*args, **kwargs)
        if not func.is_view:
            read = args[1:] if name in ("copy_", "zero_", "fill_") else args
            for each in torch.utils._pytree.tree_leaves([read, out]):
                if isinstance(each, torch.Tensor):  # every second element takes as much as all of them
                    self.nbytes += each.numel() * each.itemsize * (each.stride(-1) if each.dim() else 1)
        return out


@pytest.mark.parametrize(
    ("nbytes", "scale", "wide_root"), [(194, 1.0, False), (202, 0.5, False), (226, 1.0, True), (234, 0.5, True)]
)
def test_an_update_moves_as_many_bytes_as_its_docstring_says(nbytes: int, scale: float, wide_root: bool) -> None:
    numel = 10_000
    states, segment = cases.states("split16", torch.bfloat16, numel, 0), _native.Segment(0, numel, lr=0.1, step=3)
    given = [segment.at(0, numel, step=3, index=0, fresh=False, grad_scale=scale)]
    with Operations() as operations:
        update_on_device(states, given, ROOTS[wide_root])
    assert operations.nbytes // numel == nbytes


@pytest.mark.parametrize("rule", cases.RULES)
def test_every_division_is_by_a_tensor_and_no_operation_rounds_once_for_two(rule: Any) -> None:
    for form, momentum in itertools.product(cases.FORMS, (0.0, 0.9)):
        options: dict[str, Any] = {"beta1": momentum, "nesterov": momentum > 0, "initial_accumulator": 0.5}
        given = [_native.Segment(0, 100, rule=rule, lr=0.1, weight_decay=0.1, step=1, grad_scale=0.5, **options)]
        with Operations() as operations:
            update_on_device(cases.states(form, torch.bfloat16, 100, 0), given, ROOTS[True])
        assert operations.nbytes
