"""A check at first use: does the arithmetic of a device give the bits of the native kernel?"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from infinity import _native
from infinity.device_update.rules import Scratch
from infinity.device_update.states import DeviceStates, update_on_device
from infinity.device_update.sum_squares import sums_of_squares
from infinity.device_update.trials import NUMEL, Difference, Form, Trial, raw, trials
from infinity.state.dtypes import native_name

_GRAIN = 32_768  # elements that torch gives to one thread at least


class Verdict(NamedTuple):
    """The result of a check.

    Attributes:
        difference: first difference that was found; None if all bits are equal.
        wide_root: argument of ScratchFile with which all bits are equal.
    """

    difference: Difference | None
    wide_root: bool


class ArithmeticCheck:
    """Checks of one device, each done once.

    Args:
        device: the device.
        pool: threads of the native kernel.
    """

    def __init__(self, device: torch.device, pool: _native.ThreadPool) -> None:
        self._device = device
        self._pool = pool
        self._verdicts: dict[tuple[_native.RuleName, Form, int], Verdict] = {}

    def verdict(self, rule: _native.RuleName, form: Form) -> Verdict:
        """Return whether `update_on_device` and `sums_of_squares` give the native kernel's bits on the device.

        The check is done at the first call for a rule and a form, and again after torch's mode for denormal numbers has
        changed (torch.set_flush_denormal). It waits for the device.

        Raises:
            ValueError: the form is updated on the CPU only, see DeviceStates.
        """
        key = rule, form, _flushed_numel()
        if key not in self._verdicts:
            self._verdicts[key] = self._check(rule, form)
        return self._verdicts[key]

    def _check(self, rule: _native.RuleName, form: Form) -> Verdict:
        difference = None
        for wide_root in (False, True):
            scratch = Scratch(self._device, NUMEL // 2, wide_root=wide_root)
            different = (trial.shows for trial in trials(rule, form) if not self._is_equal(trial, scratch))
            difference = next(different, None)
            if difference is None:
                return Verdict(None, wide_root)
        return Verdict(difference, True)

    def _is_equal(self, trial: Trial, scratch: Scratch) -> bool:
        """Return whether the device's results have the native kernel's bits."""
        here, there = trial.states.map(torch.clone), trial.states.map(lambda state: state.to(self._device, copy=True))
        if trial.shows == "sum of squares":
            parts = [slice(*each) for each in pairwise((0, 3, 40, NUMEL))]
            sums = sums_of_squares([there.grad[part] for part in parts], range(len(parts)))
            expected = [self._sums_of_squares(here.grad[part], first) for first, part in enumerate(parts)]
            return _same_values(torch.cat(expected), sums.cpu())
        finite = update_on_device(there, trial.segments, scratch)
        return self._update(here, trial.segments) == finite.item() and _same_states(here, there)

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
