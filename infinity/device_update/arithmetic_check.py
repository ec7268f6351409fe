"""A check at first use: does the arithmetic of a device give the bits of the native kernel?"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import NamedTuple

import torch

from infinity import _native
from infinity.device_update.compared_updates import (
    NUMEL,
    ComparedUpdate,
    Difference,
    StateDtypes,
    compared_gradient,
    compared_updates,
    raw,
)
from infinity.device_update.kernels import Kernels, kernels_of
from infinity.device_update.rules import Scratch
from infinity.device_update.states import DeviceStates, update_on_device
from infinity.device_update.sum_squares import sums_of_squares
from infinity.state.dtypes import native_name

logger = logging.getLogger(__name__)

_GRAIN = 32_768  # elements that torch gives to one thread at least
_SUMS_BYTES = 1 << 20  # temporary memory of the sums that are compared


class Verdict(NamedTuple):
    """The result of a check.

    Attributes:
        difference: first difference that was found; None if all bits are equal.
        wide_root: argument of Scratch with which all bits are equal.
        kernels: kernels that give equal bits, too, and are faster; None: there are none.
    """

    difference: Difference | None
    wide_root: bool
    kernels: Kernels | None = None


class ArithmeticCheck:
    """Checks of one device, each done once.

    Args:
        device: the device.
        pool: threads of the native kernel.
    """

    def __init__(self, device: torch.device, pool: _native.ThreadPool) -> None:
        self._device = device
        self._pool = pool
        self._verdicts: dict[tuple[_native.RuleName, StateDtypes, int], Verdict] = {}
        self._kernels_of_sums: dict[torch.dtype, Kernels | None] = {}

    def verdict(self, rule: _native.RuleName, dtypes: StateDtypes) -> Verdict:
        """Return whether `update_on_device` and `sums_of_squares` give the native kernel's bits on the device.

        The check is done at the first call for a rule and dtypes, and again after torch's mode for denormal numbers has
        changed (torch.set_flush_denormal). It waits for the device.

        Raises:
            ValueError: states of these dtypes are updated on the CPU only, see DeviceStates.
        """
        key = rule, dtypes, _flushed_numel()
        if key not in self._verdicts:
            self._verdicts[key] = self._check(rule, dtypes)
        return self._verdicts[key]

    def kernels_of_sums(self, dtypes: Collection[torch.dtype]) -> Kernels | None:
        """Return the kernels if they compute the sums of squares of gradients of all these dtypes to the native
        kernel's bits. The check is done at the first call for a dtype. It waits for the device."""
        for dtype in dtypes:
            if dtype not in self._kernels_of_sums:
                self._kernels_of_sums[dtype] = self._check_kernels_of_sums(dtype)
        kernels = [self._kernels_of_sums[dtype] for dtype in dtypes]
        return kernels[0] if kernels and None not in kernels else None

    def _check_kernels_of_sums(self, dtype: torch.dtype) -> Kernels | None:
        grad = compared_gradient(dtype)
        return self._kernels_if(lambda kernels: self._has_equal_sums(grad, kernels))

    def _check(self, rule: _native.RuleName, dtypes: StateDtypes) -> Verdict:
        difference = None
        for wide_root in (False, True):
            difference = self._difference(rule, dtypes, Scratch(self._device, NUMEL // 2, wide_root=wide_root))
            if difference is None:
                return Verdict(None, wide_root, self._kernels_if(lambda kernels: self._agree(rule, dtypes, kernels)))
        return Verdict(difference, True)

    def _kernels_if(self, agree: Callable[[Kernels], bool]) -> Kernels | None:
        """Return the kernels if a comparison finds no difference; None if there are no kernels, or if they fail."""
        kernels = kernels_of(self._device)
        if kernels is None:
            return None
        try:
            if agree(kernels):
                return kernels
        except Exception as error:  # Triton has no compiler for the device, or its release is incompatible
            logger.info("Triton cannot be used for updates on %s (%s: %s)", self._device, type(error).__name__, error)
        else:
            logger.warning("Triton's kernels update to other bits on %s, and are not used", self._device)
        return None

    def _agree(self, rule: _native.RuleName, dtypes: StateDtypes, kernels: Kernels) -> bool:
        return self._difference(rule, dtypes, Scratch(self._device, NUMEL // 2, kernels=kernels)) is None

    def _difference(self, rule: _native.RuleName, dtypes: StateDtypes, scratch: Scratch) -> Difference | None:
        different = (each.shows for each in compared_updates(rule, dtypes) if not self._is_equal(each, scratch))
        return next(different, None)

    def _is_equal(self, update: ComparedUpdate, scratch: Scratch) -> bool:
        """Return whether the device's results have the native kernel's bits."""
        if update.shows == "sum of squares":
            grad = update.states.grad
            return self._has_equal_sums(grad, self.kernels_of_sums([grad.dtype]))
        here, there = update.states.map(torch.clone), update.states.map(lambda state: state.to(self._device, copy=True))
        finite = update_on_device(there, update.segments, scratch)
        return self._update(here, update.segments) == finite.item() and _same_states(here, there)

    def _has_equal_sums(self, grad: torch.Tensor, kernels: Kernels | None) -> bool:
        there = grad.to(self._device, copy=True)
        parts = [slice(*each) for each in pairwise((0, 3, 40, NUMEL))]
        memory = torch.empty(_SUMS_BYTES, dtype=torch.uint8, device=self._device)
        sums = sums_of_squares([there[part] for part in parts], range(len(parts)), memory, kernels)
        expected = [self._sums_of_squares(grad[part], first) for first, part in enumerate(parts)]
        return _same_values(torch.cat(expected), sums)

    def _sums_of_squares(self, grad: torch.Tensor, first: int) -> torch.Tensor:
        sums = _native.sums_of_squares(raw(grad), native_name(grad.dtype), self._pool, first=first)
        return torch.tensor(sums, dtype=torch.float64, device="cpu")

    def _update(self, states: DeviceStates, segments: list[_native.Segment]) -> bool:
        return _native.optimizer_update(
            *(None if each is None else raw(each) for each in states.tensors),
            weight_dtype=native_name(states.weight.dtype),
            master=states.master,
            grad_dtype=native_name(states.grad.dtype),
            segments=segments,
            pool=self._pool,
        )


@functools.cache
def check_of(device: torch.device) -> ArithmeticCheck:
    """Return this process's checks of a device."""
    return ArithmeticCheck(device, _native.ThreadPool(1))


def why_not_there(device: torch.device, rule: _native.RuleName, states: Collection[StateDtypes]) -> str:
    """Return why a device cannot update states to the native kernel's bits; "" if it can."""
    for dtypes in states:
        difference = check_of(device).verdict(rule, dtypes).difference
        if difference is not None:
            return f"the arithmetic of {device} is not the CPU's ({difference})"
    return ""


def _flushed_numel() -> int:
    """Return how many of some denormal numbers torch's threads flush to zero."""
    numel = _GRAIN * torch.get_num_threads()
    values = torch.ones(numel, dtype=torch.int32, device="cpu").view(torch.float32).mul_(1.0)
    return numel - int(values.view(torch.int32).count_nonzero())


def _same_states(here: DeviceStates, there: DeviceStates) -> bool:
    """Return whether states have the same bits, except for the payload of NaNs and the residual of NaNs."""
    numbers = ~here.weight.isnan()
    for one, other in zip(here.tensors, there.tensors, strict=True):
        if one is None or other is None:
            continue
        kept = numbers if one.dtype == torch.int16 else slice(None)
        if not _same_values(one[kept], other.cpu()[kept]):
            return False
    return True


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return bool(((one.view(bits) == other.view(bits)) | (one.isnan() & other.isnan())).all())
