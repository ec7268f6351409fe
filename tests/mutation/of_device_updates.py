"""Mutants of the updates of states on a device, and of the check of a device's arithmetic."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_STATES = ("tests/device_update/test_states.py",)
_SUMS = ("tests/device_update/test_sum_squares.py",)
_CHECK = ("tests/device_update/test_arithmetic_check.py",)

OF_DEVICE_UPDATES = [
    Mutant(
        "a gradient of −0 becomes 0 without weight decay too",
        "infinity/device_update/rules.py",
        "    e.g.add_(torch.mul(e.p, c.l2, out=e.t))\n",
        "    if c.l2:\n        e.g.add_(torch.mul(e.p, c.l2, out=e.t))\n",
        _STATES,
    ),
    Mutant(
        "Lion's step of 0 stays 0",
        "infinity/device_update/rules.py",
        "torch.gt(step, 0.0, out=mask)",
        "torch.ge(step, 0.0, out=mask)",
        _STATES,
    ),
    Mutant(
        "a root in double where fp32 roots are not rounded correctly",
        "infinity/device_update/rules.py",
        "if self._wide is None:",
        "if True:",
        _STATES,
    ),
    Mutant(
        "moments begin as zero",
        "infinity/device_update/states.py",
        "    if c.fresh:\n",
        "    if False:\n",
        _STATES,
    ),
    Mutant(
        "a NaN whose bits are all set stays a NaN",
        "infinity/device_update/states.py",
        "    p.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)\n",
        "",
        _STATES,
    ),
    Mutant(
        "results that are not finite are reported",
        "infinity/device_update/states.py",
        "for values in (p, m, v) if len(values)",
        "for values in (p,) if len(values)",
        _STATES,
    ),
    Mutant(
        "elements after a gradient do not count in its sum of squares",
        "infinity/device_update/sum_squares.py",
        ".masked_fill_(beyond, 0.0)",
        "",
        _SUMS,
    ),
    Mutant(
        "a row at the end of the memory is not read past the end",
        "infinity/device_update/sum_squares.py",
        "at.clamp_(max=len(windows) - 1)",
        "at",
        _SUMS,
    ),
    Mutant(
        "a device is checked again when denormal numbers are flushed",
        "infinity/device_update/arithmetic_check.py",
        "key = rule, dtypes, _flushed_numel()",
        "key = rule, dtypes, 0",
        _CHECK,
    ),
    Mutant(
        "a device whose report of finite values differs is refused",
        "infinity/device_update/arithmetic_check.py",
        "return self._update(here, update.segments) == finite.item() and _same_states(here, there)",
        "self._update(here, update.segments)\n        return _same_states(here, there)",
        _CHECK,
    ),
]
