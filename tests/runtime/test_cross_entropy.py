"""The loss without whole logits is that of torch with them, and so are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import infinity
from infinity import chunked_cross_entropy

TOKENS, VOCABULARY, WIDTH = 300, 1000, 64
Found = tuple[float, dict[str, torch.Tensor]]


def drawn(dtype: torch.dtype, *, ignored: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, VOCABULARY, (3, TOKENS // 3), generator=generator)
    if ignored:
        labels[:, ::7] = -100
    return {
        "hidden": torch.randn(3, TOKENS // 3, WIDTH, generator=generator).to(dtype),
        "weight": (torch.randn(VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5).to(dtype),
        "bias": torch.randn(VOCABULARY, generator=generator).to(dtype),
        "labels": labels,
    }


def whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    divisor: float | None = None,
) -> torch.Tensor:
    logits = functional.linear(hidden, weight, bias)
    logits = logits if scale == 1.0 else logits * scale
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    reduction = "mean" if divisor is None else "sum"
    loss = functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction=reduction)
    return loss if divisor is None else loss / divisor


def run(loss_of: Any, given: dict[str, torch.Tensor], factor: float = 1.0, **options: Any) -> Found:
    leaves = {name: each.clone().requires_grad_() for name, each in given.items() if name != "labels"}
    if not options.pop("has_bias", True):
        del leaves["bias"]
    loss = loss_of(labels=given["labels"], **leaves, **options)
    (loss * factor).backward()
    return loss.item(), {name: leaf.grad.float() for name, leaf in leaves.items()}  # type: ignore[union-attr]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"has_bias": False},
    "bias": {},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "scale and softcap": {"scale": 2.0, "softcap": 5.0, "divisor": 1234.5},
    "divisor": {"divisor": 77.0},
}
PIECES = {"one piece": 1 << 30, "many": 4 * 37 * VOCABULARY, "a token at a time": 4}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_in_fp32_it_is_that_of_whole_logits(way: str, pieces: str, factor: float) -> None:
    given = drawn(torch.float32)
    wanted = run(whole, given, factor, **WAYS[way])
    found = run(chunked_cross_entropy, given, factor, chunk_bytes=PIECES[pieces], **WAYS[way])
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        assert error(gradient, wanted[1][name]) <= 1e-6, name


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_its_error_is_no_larger_than_with_whole_logits(dtype: torch.dtype, way: str, pieces: str) -> None:
    given = drawn(dtype)
    wide = {name: each if name == "labels" else each.float() for name, each in given.items()}
    exact = run(whole, wide, **WAYS[way])
    found = run(chunked_cross_entropy, given, chunk_bytes=PIECES[pieces], **WAYS[way])
    plain = run(whole, given, **WAYS[way])
    assert abs(found[0] - exact[0]) <= 1.1 * abs(plain[0] - exact[0]) + 1e-6 * exact[0]
    for name, gradient in found[1].items():
        assert error(gradient, exact[1][name]) <= 1.1 * error(plain[1][name], exact[1][name]), name


def test_small_gradients_do_not_vanish_in_fp16() -> None:
    """In a mean over many tokens, each gradient is beyond fp16's range before it is scaled."""
    given = drawn(torch.float16, ignored=False)
    found = run(chunked_cross_entropy, given, factor=65536.0, divisor=1e6, has_bias=False)
    wide = {name: each if name == "labels" else each.float() for name, each in given.items()}
    exact = run(whole, wide, 65536.0, divisor=1e6, has_bias=False)
    assert error(found[1]["weight"], exact[1]["weight"]) < 1e-2


class _Largest(TorchFunctionMode):
    numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_no_tensor_is_larger_than_a_piece_or_the_head() -> None:
    given = drawn(torch.float32)
    with _Largest() as largest:
        run(chunked_cross_entropy, given, chunk_bytes=4 * 50 * VOCABULARY)
    assert largest.numel == VOCABULARY * WIDTH
    with _Largest() as largest:
        run(whole, given)
    assert largest.numel == TOKENS * VOCABULARY


def test_a_frozen_head_has_no_gradient_and_an_evaluation_none_at_all() -> None:
    given = drawn(torch.float32)
    hidden = given["hidden"].requires_grad_()
    loss = chunked_cross_entropy(hidden, given["weight"], given["labels"])
    loss.backward()
    assert given["weight"].grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, given["weight"], given["labels"]).item() == loss.item()


def test_without_a_label_the_loss_is_nan_as_in_torch() -> None:
    given = drawn(torch.float32)
    given["labels"][:] = -100
    found = run(chunked_cross_entropy, given)
    assert found[0] != found[0]
    assert run(whole, given)[0] != run(whole, given)[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"must be \[..., H\], \[V, H\] and \[...\]"),
        ({"weight": torch.zeros(VOCABULARY, WIDTH + 1)}, r"must be \[..., H\], \[V, H\] and \[...\]"),
        ({"labels": torch.full((3, TOKENS // 3), VOCABULARY)}, "a label is 1000, and the vocabulary has 1000 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(infinity.ConfigError, match=says):
        chunked_cross_entropy(**(drawn(torch.float32) | change))


def test_many_equal_labels_do_not_overflow_fp16() -> None:
    given = drawn(torch.float16, ignored=False)
    given["labels"][:] = 3
    given["hidden"] = given["hidden"].repeat(1, 30, 1).abs() * 30
    given["labels"] = given["labels"].repeat(1, 30)
    found = run(chunked_cross_entropy, given, has_bias=False, chunk_bytes=PIECES["many"])
    assert found[1]["weight"].isfinite().all()
    exact = run(whole, {k: v if k == "labels" else v.float() for k, v in given.items()}, has_bias=False)
    assert error(found[1]["weight"], exact[1]["weight"]) < 1e-2


def test_a_divisor_of_zero_is_what_it_is_in_torch() -> None:
    assert run(chunked_cross_entropy, drawn(torch.float32), divisor=0.0)[0] == float("inf")
