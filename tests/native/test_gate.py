"""The entry points of a device's runtime."""

from __future__ import annotations

import pytest

from infinity import _native


@pytest.mark.parametrize("missing", ["copy", "record", "wait", "synchronize"])
def test_a_gate_needs_each_function(missing: str) -> None:
    calls = {"copy": 8, "record": 8, "wait": 8, "synchronize": 8} | {missing: 0}
    with pytest.raises(ValueError, match="copy, record, wait and synchronize"):
        _native.DeviceGate(0, **calls)
