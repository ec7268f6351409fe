"""The update of flat states on a device: forms of the master, segments, and chunks of bounded temporary memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from infinity import _native
from infinity.device_update.rules import Elements, Scratch, rule_of

_WEIGHTS: dict[_native.MasterName, tuple[torch.dtype, ...]] = {
    "weight": (torch.float32,),
    "split16": (torch.bfloat16,),
    "fp32": (torch.bfloat16, torch.float16),
}
_RESIDUALS: dict[_native.MasterName, torch.dtype | None] = {
    "weight": None,
    "split16": torch.int16,
    "fp32": torch.float32,
}
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DeviceStates:
    """The states of a group of parameters: flat contiguous tensors of the same length on one device.

    Attributes:
        master: form of the fp32 master: "weight", "split16" or "fp32", see csrc/cpu_adam/state_format.hpp.
        weight: fp32 for master "weight", bf16 for "split16", bf16 or fp16 for "fp32".
        residual: int16 for master "split16", the fp32 master for "fp32", None for "weight".
        exp_avg, exp_avg_sq: fp32; None if no segment uses the moment.
        grad: bf16, fp16 or fp32. No update writes to it.

    Raises:
        ValueError: a tensor has another dtype or length or is not contiguous, or the master or the moments have a form
            that is updated on the CPU only: master "none", and moments in bf16 and int8.
    """

    master: _native.MasterName
    weight: torch.Tensor
    residual: torch.Tensor | None
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    grad: torch.Tensor

    def __post_init__(self) -> None:
        if self.master not in _WEIGHTS:
            raise ValueError(f"master '{self.master}' is updated on the CPU only; a device updates {list(_WEIGHTS)}")
        moments = (self.exp_avg, self.exp_avg_sq)
        if any(moment is not None and moment.dtype != torch.float32 for moment in moments):
            raise ValueError("moments: bf16 and int8 are updated on the CPU only; a device updates moments: fp32")
        if self.weight.dtype not in _WEIGHTS[self.master] or self.grad.dtype not in _GRADIENTS:
            raise ValueError(f"weights in {self.weight.dtype} with master '{self.master}', grad in {self.grad.dtype}")
        if (None if self.residual is None else self.residual.dtype) != _RESIDUALS[self.master]:
            raise ValueError(f"master '{self.master}' needs a residual of dtype {_RESIDUALS[self.master]}")
        for tensor in self.tensors:
            if tensor is not None and not (tensor.shape == self.weight.shape[:1] and tensor.is_contiguous()):
                raise ValueError("states are flat contiguous tensors of the same length")

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The states in the order of the arguments of _native.optimizer_update."""
        return self.weight, self.residual, self.exp_avg, self.exp_avg_sq, self.grad

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> DeviceStates:
        """Return the states with each tensor replaced by `change(tensor)`."""
        return DeviceStates(self.master, *[None if each is None else change(each) for each in self.tensors])  # type: ignore[arg-type]


@torch.no_grad()
def update_on_device(states: DeviceStates, segments: Sequence[_native.Segment], scratch: Scratch) -> torch.Tensor:
    """Do one optimizer step in place, to the bits of _native.optimizer_update (except for the payload of NaNs).

    The step is queued on the current stream. With `scratch.kernels` it is one kernel for each segment, which moves 26
    bytes per element (AdamW, split16 and bf16 gradients). Otherwise it is 20 to 30 operations for each segment, or for
    each chunk of `scratch.numel` elements of a longer segment. These operations together move 194 bytes per element. A
    gradient scale other than 1 adds 8 bytes, and a wide root 32.

    Args:
        states: states of all elements. Elements outside all segments are not changed, and neither are the elements of
            segments with `skip`.
        segments: hyperparameters by ranges of elements, sorted.
        scratch: temporary memory on the device of the states, whose kernels or form of root `ArithmeticCheck`
            has found right.

    Returns:
        bool [], on the device: whether all new masters and moments are finite.

    Raises:
        ValueError: the segments overlap or are not within the states, or use a moment that is None. No state has
            changed.
    """
    numel, end = len(states.weight), 0
    constants = [None if segment.skip else segment.constants for segment in segments]
    for segment, each in zip(segments, constants, strict=True):
        if not end <= segment.begin <= segment.end <= numel:
            raise ValueError(f"segments must be sorted, disjoint and within {numel} elements")
        end = segment.end
        for moment in ("exp_avg", "exp_avg_sq"):
            if each is not None and getattr(each, f"uses_{moment}") and getattr(states, moment) is None:
                raise ValueError(f"rule '{each.rule}' uses {moment}, which is None")
    wanted = [(s.begin, s.end, each) for s, each in zip(segments, constants, strict=True) if each is not None]
    if scratch.kernels is not None:
        return scratch.kernels.update(states, wanted)
    extremes: list[torch.Tensor] = []
    for first, end, each in wanted:
        for begin in range(first, end, scratch.numel):
            part = itemgetter(slice(begin, min(begin + scratch.numel, end)))
            extremes += _update_part(states.map(part), each, scratch)
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=states.weight.device)
    return torch.stack(extremes).isfinite().all()


def _update_part(part: DeviceStates, c: _native.Constants, scratch: Scratch) -> list[torch.Tensor]:
    """Update at most `scratch.numel` elements. Return the extremes of the new values, which are finite if all are."""
    numel = len(part.weight)
    g, t, u = scratch.g[:numel], scratch.t[:numel], scratch.u[:numel]
    p = _load_master(part, scratch.p[:numel])
    g.copy_(part.grad)
    if c.grad_scale != 1.0:
        g.mul_(c.grad_scale)
    unused = g[:0]
    m = part.exp_avg if c.uses_exp_avg and part.exp_avg is not None else unused
    v = part.exp_avg_sq if c.uses_exp_avg_sq and part.exp_avg_sq is not None else unused
    if c.fresh:
        m.zero_()
        v.zero_()
    rule_of(c)(Elements(p, g, m, v, t, u), c, scratch)
    _store_weight(part, p, t)
    return [extreme for values in (p, m, v) if len(values) for extreme in torch.aminmax(values)]


def _load_master(part: DeviceStates, to: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master.

    With split16, write the master to `to` and return `to`. Otherwise, return the state that is the master.
    """
    if part.residual is None:
        return part.weight
    if part.master == "split16":
        to.copy_(part.weight).view(torch.int32).add_(part.residual)
        return to
    return part.residual


def _store_weight(part: DeviceStates, p: torch.Tensor, t: torch.Tensor) -> None:
    """Store the 16-bit weight of a new master, and its residual. bf16 is rounded half up (csrc/base/bits.hpp)."""
    if part.weight.dtype == torch.float16:
        part.weight.copy_(p)
    if part.weight.dtype != torch.bfloat16:
        return
    # A NaN with all bits set would be rounded to −0.
    p.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    rounded = torch.add(p.view(torch.int32), 0x8000, out=t.view(torch.int32))
    part.weight.view(torch.int16).copy_(_half(rounded, 1))
    if part.master == "split16" and part.residual is not None:
        part.residual.copy_(_half(p, 0))


def _half(values: torch.Tensor, index: int) -> torch.Tensor:
    """Return the lower (0) or upper (1) halves of 32-bit values, as int16."""
    return values.view(torch.int16)[index::2]
