"""A device whose arithmetic is not the CPU's is refused, with the name of the difference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity import _native
from infinity.device_update import arithmetic_check
from infinity.device_update.arithmetic_check import ArithmeticCheck
from infinity.device_update.compared_updates import StateDtypes
from infinity.device_update.rules import Scratch
from infinity.device_update.states import DeviceStates, update_on_device
from infinity.device_update.sum_squares import sums_of_squares
from tests.device_update import cases

POOL = _native.ThreadPool(1)
SPLIT16 = StateDtypes(torch.bfloat16, "split16", torch.bfloat16)
FORMS = [
    SPLIT16,
    StateDtypes(torch.float32, "weight", torch.float32),
    StateDtypes(torch.bfloat16, "fp32", torch.float16),
    StateDtypes(torch.float16, "fp32", torch.float32),
]


def check() -> ArithmeticCheck:
    return ArithmeticCheck(cases.CPU, POOL)


class Altered(TorchDispatchMode):
    """A device with one fault in its arithmetic."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.operations = 0
        self._products: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__.rstrip("_"), kwargs or {}
        self.operations += 1
        exact = self._contracted(name, args) if self.fault == "contraction" else None
        if name == "div" and self.fault == "division":
            return args[0].mul_(args[1].reciprocal())
        out = func(*args, **kwargs)
        wide = isinstance(out, torch.Tensor) and out.dtype == torch.float64
        if name == "sqrt" and (self.fault == "sqrt" or (self.fault == "narrow sqrt" and not wide)):
            out.mul_(1 - 2**-24)
        elif name in ("mul", "add", "sub", "div") and self.fault == "denormals" and out.dtype == torch.float32:
            out.masked_fill_(out.abs() < 2**-126, 0.0)
        elif name == "add" and wide and self.fault == "sum of squares":
            out.mul_(1 + 2**-52)
        elif name == "add" and out.dtype == torch.int32 and self.fault == "rounding":
            out.add_(0x8000)
        elif name == "aminmax" and self.fault == "finite":
            return tuple(each.nan_to_num() for each in out)
        if isinstance(out, torch.Tensor) and not func.is_view:
            self._products.pop(out.data_ptr(), None)
            if exact is not None:
                out.copy_(exact)
            if name == "mul" and exact is not None:
                self._products[out.data_ptr()] = exact
        return out

    def _contracted(self, name: str, args: Any) -> torch.Tensor | None:
        """Return a product before it is rounded, or a sum of such products."""
        if name not in ("mul", "add", "sub") or args[0].dtype != torch.float32:
            return None
        one, other = (
            self._products.get(each.data_ptr(), each.double()) if isinstance(each, torch.Tensor) else each
            for each in args[:2]
        )
        if name == "mul":
            return args[0].double() * (args[1].double() if isinstance(args[1], torch.Tensor) else args[1])
        return one + other if name == "add" else one - other


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtypes", FORMS, ids=str)
@pytest.mark.parametrize("rule", cases.RULES)
def test_this_device_has_the_native_kernels_arithmetic(rule: Any, dtypes: StateDtypes) -> None:
    assert check().verdict(rule, dtypes).difference is None


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("sqrt", "sqrt"),
        ("division", "division"),
        ("contraction", "contraction"),
        ("denormals", "denormals"),
        ("sum of squares", "sum of squares"),
        ("rounding", "rule"),
        ("finite", "rule"),
    ],
)
def test_another_arithmetic_is_refused_by_its_name(fault: str, name: str) -> None:
    with Altered(fault):
        assert check().verdict("adamw", SPLIT16).difference == name


@pytest.mark.parametrize("fault", ["sqrt", "division"])
@pytest.mark.parametrize("rule", ["lion", "sgd"])
def test_a_rule_without_roots_and_quotients_needs_none(rule: Any, fault: str) -> None:
    with Altered(fault):
        assert check().verdict(rule, SPLIT16).difference is None


def test_a_wide_root_is_chosen_only_where_the_narrow_one_is_wrong() -> None:
    with Altered("narrow sqrt"):
        assert check().verdict("adamw", SPLIT16) == (None, True, None)
    with Exact():
        assert check().verdict("adamw", SPLIT16) == (None, False, None)


class Exact(TorchDispatchMode):
    """A device whose fp32 roots are correctly rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.sqrt and out.dtype == torch.float32:
            out.copy_(args[0].double().sqrt())
        return out


class TorchKernels:
    """Kernels for a device without Triton: torch operations, with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def update(self, states: DeviceStates, segments: list[tuple[int, int, _native.Constants]]) -> torch.Tensor:
        if self.fault == "fails":
            raise RuntimeError("no compiler for this device")
        given = [Chosen(begin, end, c) for begin, end, c in segments]
        finite = update_on_device(states, given, Scratch(cases.CPU, 1 << 16, wide_root=True))  # type: ignore[arg-type]
        if self.fault == "update":
            states.weight[0] = -states.weight[0]
        return finite

    def sums_of_squares(
        self, gradient: torch.Tensor, first: int, out: torch.Tensor, partial_numel: int, width: int
    ) -> None:
        assert (partial_numel, width) == (65_536, 32)
        out.copy_(sums_of_squares([gradient], [first], torch.empty(1 << 20, dtype=torch.uint8)))
        if self.fault == "sums":
            out.mul_(1 + 2**-52)


class Chosen(NamedTuple):
    """A segment whose constants are known."""

    begin: int
    end: int
    constants: _native.Constants
    skip: bool = False


def test_kernels_are_used_only_where_their_bits_are_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    right, dtypes = TorchKernels(""), [SPLIT16.grad, torch.float32]
    without = check().verdict("adamw", SPLIT16)
    monkeypatch.setattr(arithmetic_check, "kernels_of", lambda device: right)
    assert check().verdict("adamw", SPLIT16) == (None, without.wide_root, right)
    assert check().kernels_of_sums(dtypes) is right
    for fault in ("update", "fails", "sums"):
        kernels = TorchKernels(fault)
        monkeypatch.setattr(arithmetic_check, "kernels_of", lambda device, kernels=kernels: kernels)
        verdict = check().verdict("adamw", SPLIT16)
        assert verdict[:2] == without[:2]
        assert verdict.kernels is (kernels if fault == "sums" else None)
        assert check().kernels_of_sums(dtypes) is (None if fault == "sums" else kernels)


@pytest.mark.parametrize("memory_bytes", [8, 1 << 20])
def test_sums_by_kernels_are_those_of_torch_operations(memory_bytes: int) -> None:
    values = torch.arange(200_000, dtype=torch.float32).sin_().bfloat16()
    gradients, firsts = [values, values[:0], values[7:100_000], values[:1]], [0, 3, 65_535, 9]
    memory = torch.empty(memory_bytes, dtype=torch.uint8)
    by_kernels = sums_of_squares(gradients, firsts, memory, TorchKernels(""))
    assert torch.equal(by_kernels, sums_of_squares(gradients, firsts, torch.empty(1 << 20, dtype=torch.uint8)))


def test_a_check_is_done_once_per_rule_and_form() -> None:
    checked = check()
    for rule, dtypes in (("sgd", SPLIT16), ("lion", SPLIT16), ("sgd", FORMS[1])):
        first, second = Altered("none"), Altered("none")
        with first:
            checked.verdict(rule, dtypes)  # type: ignore[arg-type]
        with second:
            checked.verdict(rule, dtypes)  # type: ignore[arg-type]
        assert second.operations < 10 < first.operations


def test_a_check_is_repeated_when_denormals_are_flushed() -> None:
    checked = check()
    assert checked.verdict("lion", SPLIT16).difference is None
    try:
        torch.set_flush_denormal(True)
        assert checked.verdict("lion", SPLIT16).difference == "denormals"
    finally:
        torch.set_flush_denormal(False)
    assert checked.verdict("lion", SPLIT16).difference is None


def test_a_form_that_is_updated_on_the_cpu_only_is_refused() -> None:
    with pytest.raises(ValueError, match="master 'none' is updated on the CPU only"):
        check().verdict("adamw", StateDtypes(torch.bfloat16, "none", torch.bfloat16))
