"""The house rule that the arithmetic of updates is one operation of torch per rounding."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity import device_update

FOLDER = Path(device_update.__path__[0])
_TWO_AT_ONCE = (
    "lerp",
    "addcmul",
    "addcdiv",
    "_foreach",
    "fma",
    "addmm",
    "baddbmm",
    "dot",
    "rsqrt",
    "reciprocal",
    "pow",
)
_DIVISIONS = ("div", "divide", "true_divide")


def forbidden(text: str) -> list[str]:
    """Return the operations in a source that may round in another way than the native kernel.

    A division may only be by the result of a call, which is a tensor: some devices divide by a Python scalar through
    its reciprocal.
    """
    return sorted(_found(ast.parse(text)))


def _found(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg in ("alpha", "value", "rounding_mode"):
            yield node.arg
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name.strip("_").startswith(tuple(each.strip("_") for each in _TWO_AT_ONCE)):
                yield name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            by = node.args[-1] if node.args else None
            if node.func.attr.rstrip("_") in _DIVISIONS and not isinstance(by, ast.Call):
                yield ast.unparse(node)


@pytest.mark.parametrize("file", ["rules.py", "states.py", "sum_squares.py"])
def test_no_source_of_the_arithmetic_has_an_operation_that_may_round_differently(file: str) -> None:
    assert forbidden((FOLDER / file).read_text()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = m / c.eps", ["m / c.eps"]),
        ("m /= 2", ["m /= 2"]),
        ("m.div_(c.step_size)", ["m.div_(c.step_size)"]),
        ("torch.div(m, 3.0, out=g)", ["torch.div(m, 3.0, out=g)"]),
        ("g.div_(root(v))", []),
        ("p.add_(g, alpha=-lr)", ["alpha"]),
        ("m.lerp_(g, 0.1)", ["lerp_"]),
        ("torch.addcmul(v, g, g)", ["addcmul"]),
        ("p.addcdiv_(m, v)", ["addcdiv_"]),
        ("torch._foreach_add_(a, b)", ["_foreach_add_"]),
        ("v.rsqrt_()", ["rsqrt_"]),
        ("numel // 2", []),
    ],
)
def test_what_may_round_differently(text: str, found: list[str]) -> None:
    assert forbidden(text) == found
