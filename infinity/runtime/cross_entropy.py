"""The loss of a language model's head, computed without all logits in memory at once.

For 8,192 tokens and a vocabulary of 128,000, the logits take 2 GiB in bf16, and their fp32 copy for the loss takes
another 4 GiB. The gradient of the logits takes as much again. This module computes the logits piece by piece. Each
piece is used at once for the loss and for the gradients of the hidden states and of the head, so the backward only
multiplies these gradients by a factor. (SourceConfig: Liger-Kernel, arXiv 2410.10989, section 3.2.)

[Note: two ways through the logits]

                     V
            ┌─────────────────┐      by tokens: the loss, and the gradient of the hidden states, a sum over V
          T │ a piece is a row │     by words:  the gradient of the head, a sum over T
            │ of tokens, or a  │
            │ column of words  │     Each element is summed up in one product, in fp32, and rounded once, as it is
            └─────────────────┘      with whole logits.

If the head's gradient were added up token by token, each partial sum would be rounded, and the sum would need as much
memory as the head takes in fp32. The second way, by words, avoids both but computes the logits a second time, so that
there are four matrix products instead of three. If all tokens fit into one piece, the first way is enough, with three
products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from infinity.errors import ConfigError

_CHUNK_BYTES = 256 << 20
"""Bytes of one piece of the logits in fp32."""
_SCALED_NUMEL = 16 << 20


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    divisor: torch.Tensor | float | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> torch.Tensor:
    """Return the cross entropy of `hidden @ weight.T + bias` and the labels.

    The result is the same as the result of torch.nn.functional.cross_entropy for the fp32 logits, but the logits are
    never all in memory at the same time. Tokens without a label take part in no computation.

    Args:
        hidden: [..., H], the input of the head.
        weight: [V, H], the weight of the head, on the device of `hidden`, in the dtype of `hidden`.
        labels: int64 [...], the token that each hidden state must predict; this function does not shift the labels.
        bias: [V], the bias of the head.
        scale: factor by which the logits are multiplied.
        softcap: a number c; after the scaling, each logit x is replaced by c · tanh(x / c).
        ignore_index: the label of tokens that do not count in the loss.
        divisor: number by which the sum over the tokens is divided; None: the number of tokens that have a label.
        chunk_bytes: bytes of fp32 logits in memory at a time; a copy of these logits in the dtype of `hidden` takes
            additional memory.

    Returns:
        The loss, an fp32 scalar; NaN if no token has a label, as in torch.

    Raises:
        ConfigError: the shapes do not match, or a label is beyond the vocabulary.
    """
    return cross_entropy(
        hidden, weight, bias, labels, ChunkedLossOptions(scale, softcap, divisor, ignore_index, chunk_bytes)
    )[0]


@dataclass(frozen=True)
class ChunkedLossOptions:
    """The computation from logits to loss, with the arguments of chunked_cross_entropy."""

    scale: float = 1.0
    softcap: float | None = None
    divisor: Any = None
    ignore_index: int = -100
    chunk_bytes: int = _CHUNK_BYTES

    @property
    def share(self) -> float:
        """Factor by which gradients are multiplied before they are rounded: 1 / divisor without its power of two.

        The power of two is applied after rounding, where the multiplication is exact. Before rounding, the power of two
        would move small gradients out of fp16's range.
        """
        return math.frexp(1.0 / self.divisor)[0] if self.divisor and math.isfinite(self.divisor) else 1.0

    @property
    def factor(self) -> float:
        """The other factor of 1 / divisor, a power of two, which is applied in the backward."""
        return 1.0 / self.divisor / self.share if self.divisor else math.inf

    def at_a_time(self, across: int) -> int:
        """Return the number of rows of a piece of logits, if each row has `across` logits; the same for columns."""
        return max(max(self.chunk_bytes // 4, 1) // max(across, 1), 1)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the fp32 logits, [tokens, V], in the same way as the model."""
        return self.shaped(torch.nn.functional.linear(hidden, weight, bias)).float()

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap the logits."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def gradient(self, logits: torch.Tensor, normal: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the logits before scaling and capping, times `divisor * share`. The result overwrites
        the logits.

        Args:
            logits: [tokens, columns], fp32, scaled and capped; overwritten.
            normal: the logarithm of the sum of the exponentials of all logits of a token, [tokens, 1].
            labels: labels of the tokens, as offsets from the first of these columns; a label outside of these columns
                belongs to another piece.
        """
        slope = None if self.softcap is None else 1.0 - (logits / self.softcap).square_()
        gradient = logits.sub_(normal).exp_()
        rows = torch.arange(len(labels), device=labels.device)
        # a mask needs no synchronization with the host; rows whose label is outside subtract 0
        inside = (labels >= 0) & (labels < logits.shape[1])
        gradient[rows, labels.clamp(0, logits.shape[1] - 1)] -= inside.to(gradient.dtype)
        if slope is not None:
            gradient.mul_(slope)
        return gradient.mul_(self.share * self.scale)


def cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    loss: ChunkedLossOptions,
    *beside: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Compute chunked_cross_entropy, and make the tensors of `beside` additional outputs of the loss's autograd node.

    `beside` are new tensors. As outputs of the node they get no gradient, but hooks on these tensors run when the loss
    is run backward. Returns the loss, followed by the tensors of `beside`.
    """
    vocabulary, width = weight.shape
    if hidden.shape[-1] != width or hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"chunked_cross_entropy: hidden is {list(hidden.shape)}, weight {list(weight.shape)} and labels "
            f"{list(labels.shape)}; they must be [..., H], [V, H] and [...]"
        )
    flat = labels.reshape(-1)
    has_label = flat != loss.ignore_index
    least, most = torch.where(has_label, flat, 0).aminmax() if flat.numel() else (flat.new_zeros(()),) * 2
    # The three numbers take one transfer, because the host waits at each transfer for all work queued on the device.
    count, smallest, largest = torch.stack((has_label.sum(), least, most)).tolist()
    if smallest < 0 or largest >= vocabulary:
        wrong = smallest if smallest < 0 else largest
        raise ConfigError(f"chunked_cross_entropy: a label is {wrong}, and the vocabulary has {vocabulary} tokens")
    chosen = _places(has_label, count)
    loss = replace(loss, divisor=float((count or math.nan) if loss.divisor is None else loss.divisor))
    found: tuple[torch.Tensor, ...] = _CrossEntropy.apply(
        hidden.reshape(-1, width), weight, bias, chosen, flat[chosen], loss, beside
    )
    return found


class _CrossEntropy(torch.autograd.Function):
    """Autograd node of the loss; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chosen: torch.Tensor,
        labels: torch.Tensor,
        loss: ChunkedLossOptions,
        beside: Sequence[torch.Tensor],
    ) -> Any:
        ctx.set_materialize_grads(False)
        states = hidden if len(chosen) == len(hidden) else hidden[chosen]
        of_states, of_weight, of_bias = (
            torch.empty_like(each, dtype=_sums_in(each.dtype)) if wants and each is not None else None
            for each, wants in zip((states, weight, bias), ctx.needs_input_grad, strict=False)
        )
        total = _LogitsChunks(states, weight, bias, labels, loss, of_states, of_weight, of_bias).by_tokens()
        if of_states is not None and states is not hidden:
            of_hidden = torch.zeros_like(hidden, dtype=of_states.dtype)
            of_hidden[chosen] = of_states
            of_states = of_hidden
        ctx.save_for_backward(of_states, of_weight, of_bias)
        ctx.factor, ctx.dtype = loss.factor, hidden.dtype
        return (total / loss.divisor).float(), *beside

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_loss = gradients[0]
        if of_loss is None:
            return (None,) * 7
        factor = of_loss.float() * ctx.factor
        scaled = (None if each is None else _scaled(each, factor, ctx.dtype) for each in ctx.saved_tensors)
        return *scaled, *(None,) * 4


@dataclass
class _LogitsChunks:
    """Both ways through the logits ([Note: two ways through the logits]).

    Attributes:
        states: [tokens, H], the hidden states of the tokens that have labels.
        of_states, of_weight, of_bias: memory for the gradients; None where no gradient is needed.
        normals: the logarithm of the sum of the exponentials of all logits of each token, by piece, [tokens, 1].
    """

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    labels: torch.Tensor
    loss: ChunkedLossOptions
    of_states: torch.Tensor | None
    of_weight: torch.Tensor | None
    of_bias: torch.Tensor | None
    normals: list[torch.Tensor] = field(default_factory=list)

    def by_tokens(self) -> torch.Tensor:
        """Compute the gradients and return the sum of the losses, in fp64.

        The gradients of the head need a second way through the logits, by words, unless there is only one piece.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.states.device)
        wants_head = not (self.of_weight is None and self.of_bias is None)
        count = self.loss.at_a_time(len(self.weight))
        starts = range(0, len(self.states), count)
        for start in starts:
            part = slice(start, start + count)
            states, labels = self.states[part], self.labels[part]
            logits = self.loss.logits(states, self.weight, self.bias)
            normal = torch.logsumexp(logits, dim=1, keepdim=True)
            self.normals.append(normal)
            total += (normal - logits.gather(1, labels[:, None])).sum(dtype=torch.float64)
            to_head = wants_head and len(starts) == 1
            if self.of_states is None and not to_head:
                continue
            gradient = self.loss.gradient(logits, normal, labels).to(states.dtype)
            if self.of_states is not None:
                torch.mm(*(each.to(self.of_states.dtype) for each in (gradient, self.weight)), out=self.of_states[part])
            if to_head:
                self._to_head(gradient, slice(None))
        if wants_head and len(starts) != 1:
            self._by_words()
        return total

    def _by_words(self) -> None:
        """Compute the gradients of the head."""
        normal = torch.cat(self.normals) if self.normals else self.states.new_empty((0, 1), dtype=torch.float32)
        count = self.loss.at_a_time(len(self.states))
        for start in range(0, len(self.weight), count):
            part = slice(start, start + count)
            bias = None if self.bias is None else self.bias[part]
            logits = self.loss.logits(self.states, self.weight[part], bias)
            gradient = self.loss.gradient(logits, normal, self.labels - start).to(self.states.dtype)
            self._to_head(gradient, part)

    def _to_head(self, gradient: torch.Tensor, words: slice) -> None:
        if self.of_weight is not None:
            factors = (each.to(self.of_weight.dtype) for each in (gradient.t(), self.states))
            torch.mm(*factors, out=self.of_weight[words])
        if self.of_bias is not None:
            self.of_bias[words].copy_(gradient.sum(0, dtype=torch.float32))


def _places(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` indices at which a mask is true.

    The caller knows the count already, so the host need not wait for the device.
    """
    if chosen.device.type == "cpu":
        return chosen.nonzero().squeeze(1)
    return torch.nonzero_static(chosen, size=count).squeeze(1)


def _sums_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are summed up and kept until they are divided: fp32 for fp16 gradients,
    otherwise the same dtype."""
    return torch.float32 if dtype == torch.float16 else dtype


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `gradient` times `factor`, an fp32 scalar, rounded once.

    A plain product on a GPU would first round the scalar to the tensor's dtype.
    """
    found = torch.empty_like(gradient, dtype=dtype)
    rows = max(_SCALED_NUMEL // max(gradient[:1].numel(), 1), 1)
    for first in range(0, len(gradient), rows):
        part = slice(first, first + rows)
        found[part] = gradient[part].float() * factor
    return found
