"""A device whose arithmetic is not the CPU's is refused, with the name of the difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity import _native
from infinity.device_update.check import ArithmeticCheck
from infinity.device_update.trials import Form
from tests.device_update import cases

POOL = _native.ThreadPool(1)
SPLIT16 = Form(torch.bfloat16, "split16", torch.bfloat16)
FORMS = [
    SPLIT16,
    Form(torch.float32, "weight", torch.float32),
    Form(torch.bfloat16, "fp32", torch.float16),
    Form(torch.float16, "fp32", torch.float32),
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
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rule", cases.RULES)
def test_this_device_has_the_native_kernels_arithmetic(rule: Any, form: Form) -> None:
    assert check().verdict(rule, form).difference is None


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
        assert check().verdict("adamw", SPLIT16) == (None, True)
    with Exact():
        assert check().verdict("adamw", SPLIT16) == (None, False)


class Exact(TorchDispatchMode):
    """A device whose fp32 roots are correctly rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.sqrt and out.dtype == torch.float32:
            out.copy_(args[0].double().sqrt())
        return out


def test_a_check_is_done_once_per_rule_and_form() -> None:
    checked = check()
    for rule, form in (("sgd", SPLIT16), ("lion", SPLIT16), ("sgd", FORMS[1])):
        first, second = Altered("none"), Altered("none")
        with first:
            checked.verdict(rule, form)  # type: ignore[arg-type]
        with second:
            checked.verdict(rule, form)  # type: ignore[arg-type]
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
        check().verdict("adamw", Form(torch.bfloat16, "none", torch.bfloat16))
