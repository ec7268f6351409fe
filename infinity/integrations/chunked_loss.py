"""The loss of a transformers language model, computed without its logits.

[Note: where the loss is computed]
A causal model calls its head, may scale and cap the logits, and passes the logits and the labels to `loss_function`. At
this time all logits are in memory. To save this memory, infinity computes the loss already when the head is called,
from the weights of the head and the labels that the model was called with (runtime/cross_entropy.py). The head returns
a `_PlaceholderLogits`, which is a tensor without values. A `_PlaceholderLogits` records the operations that the model
applies to the logits. Later, `loss_function` returns the loss that was computed in the call of the head.

A trial call on a few tokens shows whether the loss of a model can be computed in this way, and which operations the
model applies to its logits.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from infinity.errors import InfinityError, ModelError
from infinity.runtime.cross_entropy import ChunkedLossOptions, cross_entropy
from infinity.runtime.guards import UncopyableHook
from infinity.runtime.tiles import TiledLinear

logger = logging.getLogger(__name__)

_TRIED_TOKENS = 16
_IGNORED = -100
_TOLERANCE = 1e-4

Step = tuple[str, float]
"""An operation on all logits: ("times", c) is a multiplication, ("by", c) a division, and ("tanh", 0) the hyperbolic
tangent.
"""


def use_chunked_loss(model: nn.Module, use: bool = True) -> str:
    """Compute the loss in chunks, without the complete logits, when the model is called with labels.

    The loss and the gradients are the same as with complete logits (infinity.chunked_cross_entropy). The `logits` of
    the output have a shape but no values, and reading the values is an error. If the model is called without labels, it
    computes logits as before.

    A trial call on a few tokens, without an autograd graph, shows whether the model's loss can be computed in chunks.

    Args:
        model: a causal language model of transformers, or a module around one, such as PEFT's.
        use: whether to compute the loss in chunks. False restores the ordinary loss.

    Returns:
        "", or the reason why the model keeps its ordinary loss. The reason is also logged.
    """
    why = _use(model) if use else _do_not_use(model)
    if why:
        logger.warning("the loss is computed from complete logits: %s", why)
    return why


def _use(model: nn.Module) -> str:
    found = _language_model(model)
    if found is None:
        return f"{type(model).__name__} contains no language model of transformers"
    language, head = found
    if isinstance(language.loss_function, _ChunkedLoss):
        return ""
    if isinstance(head, TiledLinear):
        return "its head runs in tiles of its rows (infinity.tile)"
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a linear layer"
    if language.loss_function is not ForCausalLMLoss:
        return (
            f"its loss is {getattr(language.loss_function, '__name__', 'one of its own')}, not the loss of a causal "
            "model"
        )
    if "labels" not in inspect.signature(language.forward).parameters:
        return f"the forward of {type(language).__name__} takes no labels"
    chunked = _ChunkedLoss(language, head)
    why = chunked.attempt()
    if why:
        chunked.remove()
    return why


def _do_not_use(model: nn.Module) -> str:
    found = _language_model(model)
    if found is not None and isinstance(found[0].loss_function, _ChunkedLoss):
        found[0].loss_function.remove()
    return ""


def _language_model(model: nn.Module) -> tuple[Any, nn.Module] | None:
    """Return the outermost transformers model that has a head, and the head."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            try:
                head = module.get_output_embeddings()
            except NotImplementedError:
                continue
            if isinstance(head, nn.Module):
                return module, head
    return None


@dataclass
class _LabelledCall:
    """A call of the model with labels.

    Attributes:
        targets: the token that each hidden state should predict, int64 [..., tokens].
        divisor: divisor of the sum of the losses, or None for the number of losses.
        labels: labels as they were passed to the model.
        loss: the loss; None before the call of the head.
        raw: the head's output in the trial call.
    """

    targets: torch.Tensor
    divisor: Any
    labels: Any
    loss: torch.Tensor | None = None
    raw: torch.Tensor | None = None


class _UnreadableError(ModelError):
    """An operation needs the values of logits, but these logits were not computed."""


class _ChunkedLoss(UncopyableHook):
    """Replacement of a model's `loss_function`. It also observes the calls of the model and of the model's head.

    Attributes:
        steps: operations that the model applies to its logits; None during the trial call.
    """

    def __init__(self, language: Any, head: nn.Linear) -> None:
        self._language = language
        self._head = head
        self._here = threading.local()
        self._had_own = "_loss_function" in vars(language)
        self._names = list(inspect.signature(language.forward).parameters)
        self._tried: tuple[float, float] | None = None
        self.steps: tuple[Step, ...] | None = None
        self._handles = [
            language.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True),
            language.register_forward_hook(self._ends, always_call=True),
        ]
        object.__setattr__(head, "forward", self._of_head)
        language.loss_function = self

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        object.__delattr__(self._head, "forward")
        if self._had_own:
            self._language.loss_function = ForCausalLMLoss
        else:
            del self._language._loss_function

    def attempt(self) -> str:
        """Run the trial call.

        Return the reason why the model needs its complete logits; "" if it does not need them.
        """
        device = next(self._language.parameters()).device
        vocabulary = self._head.out_features
        ids = torch.arange(_TRIED_TOKENS, device=device)[None] % vocabulary
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
                self._language(input_ids=ids, labels=ids)
        except _UnreadableError as error:
            return str(error)
        except InfinityError:
            raise
        except Exception as error:
            return f"{type(self._language).__name__} could not be tried ({type(error).__name__}: {error})"
        if self._tried is None:
            return f"{type(self._language).__name__} does not compute its loss from the output of its head"
        ordinary, ours = self._tried
        if not math.isclose(ordinary, ours, rel_tol=_TOLERANCE):
            self.steps = None
            return f"its loss is {ordinary}, but {ours} when computed from its head alone"
        return ""

    # -- a call -------------------------------------------------------------------------------------------------------

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        labels, targets = given.get("labels"), given.get("shift_labels")
        if labels is None:
            return  # if only shift_labels are given, the model computes no loss
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        self._here.call = _LabelledCall(targets, given.get("num_items_in_batch"), labels)

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._here.call = None

    def _of_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the loss in place of the head's forward. Return `_PlaceholderLogits` without values."""
        call: _LabelledCall | None = getattr(self._here, "call", None)
        weight, bias = self._head.weight, self._head.bias
        if (
            call is None
            or call.loss is not None
            or hidden.shape[:-1] != call.targets.shape
            or hidden.dtype != weight.dtype
            or torch.is_autocast_enabled(hidden.device.type)
        ):
            return nn.functional.linear(hidden, weight, bias)
        if self.steps is None:
            call.raw = nn.functional.linear(hidden, weight, bias)
            return _PlaceholderLogits.of(call.raw.shape, call.raw.dtype, whole=call.raw)
        loss = _loss_after(self.steps, call.divisor)
        blank = _PlaceholderLogits.of((*hidden.shape[:-1], self._head.out_features), hidden.dtype)
        call.loss, logits = cross_entropy(hidden, weight, bias, call.targets.to(hidden.device), loss, blank)
        return logits

    def __call__(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace `loss_function`: return the loss that was computed in the call of the head."""
        call: _LabelledCall | None = getattr(self._here, "call", None)
        if not isinstance(logits, _PlaceholderLogits):
            return ForCausalLMLoss(logits, labels, *args, **kwargs)
        if call is None or labels is not call.labels or kwargs.get("ignore_index", _IGNORED) != _IGNORED:
            raise _UnreadableError("its loss uses other labels than those that the model was called with")
        if self.steps is None:
            assert call.raw is not None
            ordinary = ForCausalLMLoss(logits.whole, labels, *args, **kwargs)
            self.steps = logits.steps
            ours = _loss_after(self.steps).shaped(call.raw.float()).flatten(0, -2)
            self._tried = ordinary.item(), nn.functional.cross_entropy(ours, call.targets.reshape(-1)).item()
            return ordinary
        if call.loss is None or logits.steps != self.steps:
            raise ModelError(
                f"{type(self._language).__name__} used its logits in another way ({logits.steps}) than when it was "
                f"tried ({self.steps}), so its loss cannot be computed without complete logits"
            )
        return call.loss


def _loss_after(steps: tuple[Step, ...], divisor: Any = None) -> ChunkedLossOptions:
    """Return the function that computes the loss of logits to which the operations `steps` are applied.

    Raise _UnreadableError if `steps` has operations other than scaling and capping.
    """
    scale, cap, rest = 1.0, None, list(steps)
    if len(rest) >= 3 and [kind for kind, _ in rest[-3:]] == ["by", "tanh", "times"] and rest[-3][1] == rest[-1][1]:
        cap, rest = rest[-1][1], rest[:-3]
    for kind, number in rest:
        if kind == "tanh":
            raise _UnreadableError("it does more with its logits than scaling and capping")
        scale *= number if kind == "times" else 1.0 / number
    return ChunkedLossOptions(scale, cap, divisor)


class _PlaceholderLogits(torch.Tensor):
    """Logits that have a shape but no values.

    Attributes:
        steps: operations that were applied to the logits so far.
        whole: the logits with their values, which exist only in the trial call; None in other calls.
    """

    steps: tuple[Step, ...]
    whole: torch.Tensor | None

    @classmethod
    def of(
        cls, shape: Any, dtype: torch.dtype, steps: tuple[Step, ...] = (), whole: torch.Tensor | None = None
    ) -> _PlaceholderLogits:
        made: _PlaceholderLogits = torch.Tensor._make_subclass(cls, torch.empty(shape, dtype=dtype, device="meta"))
        made.steps, made.whole = steps, whole
        return made

    def after(self, func: Callable[..., Any], args: Any, kwargs: Any, *steps: Step) -> _PlaceholderLogits:
        whole = None if self.whole is None else func(self.whole, *args, **kwargs)
        like = self if whole is None else whole
        return _PlaceholderLogits.of(like.shape, like.dtype, (*self.steps, *steps), whole)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"logits of shape {tuple(self.shape)}, which were never computed (infinity.use_chunked_loss)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "register_hook"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits, *others = args
        number = others[0] if len(others) == 1 and isinstance(others[0], int | float) else None
        kind = _STEPS.get(name)
        if isinstance(logits, _PlaceholderLogits):
            if kind == "tanh" or (kind is not None and number is not None):
                return logits.after(func, others, kwargs, (kind, float(number or 0)))
            if name in ("float", "contiguous") or (name == "to" and not logits.steps):
                return logits.after(func, others, kwargs)
        raise _UnreadableError(
            f"`{name}` of logits, which infinity.use_chunked_loss does not compute completely. To get complete logits, "
            "call the model without labels, or call infinity.use_chunked_loss(model, False)"
        )


_STEPS = {
    **dict.fromkeys(("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"), "times"),
    **dict.fromkeys(("div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide"), "by"),
    "tanh": "tanh",
}
