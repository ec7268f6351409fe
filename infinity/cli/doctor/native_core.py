"""Probes of the native core: the selected instruction set, and the I/O engine that works on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from infinity.base.small_files import number_of
from infinity.cli.doctor.fixes import pip_install, restarted, written
from infinity.cli.doctor.probes import ProbeFinding

_ROOT = Path("/")
_TRIED_BYTES = 1 << 20
_DISABLED = "/proc/sys/kernel/io_uring_disabled"


def instruction_set() -> ProbeFinding:
    try:
        from infinity import _native
    except ImportError as error:
        return ProbeFinding("missing", f"the native core cannot be imported: {error}", pip_install("infinity-offload"))
    supported, asked = _native.supported_isas(), os.environ.get("INFINITY_ISA")
    try:
        used = _native.select_isa()
    except ValueError as error:
        return ProbeFinding("missing", str(error), "unset INFINITY_ISA")
    if used != supported[-1]:
        return ProbeFinding(
            "slower",
            f"{used}, because of INFINITY_ISA={asked}; the processor supports {supported[-1]}",
            "unset INFINITY_ISA",
        )
    if used == "baseline":
        return ProbeFinding("slower", "baseline: infinity has no faster code for this processor")
    return ProbeFinding("ok", f"{used}, of {', '.join(supported)}")


def engine(wanted: str, root: Path = _ROOT) -> ProbeFinding:
    """Return a row that says which I/O engine works, and whether the kernel accepts registered buffers.

    Args:
        wanted: engine of the swap config: 'auto', 'io_uring' or 'threads'.
        root: parent of /proc, for tests.
    """
    from infinity import _native

    try:
        opened = _native.IOEngine(wanted)
    except OSError as error:
        return ProbeFinding("missing", f"nvme.engine: {wanted}: {error}", _mend(str(error), root))
    said, costs = f"{opened.name}: {opened.reason}", "transfers need more processor time"
    if opened.name != "io_uring":
        slower = ProbeFinding("slower", f"{said}; {costs}", _mend(opened.reason, root))
        return ProbeFinding("ok", said) if wanted == "threads" else slower
    refused = opened.register_memory(_native.Arena(_TRIED_BYTES).view(0, _TRIED_BYTES))
    if refused:
        return ProbeFinding("slower", f"{said}; buffers are not registered: {refused}; {costs}. See 'locked memory'")
    return ProbeFinding("ok", said)


def _mend(reason: str, root: Path) -> str:
    """Return the command that makes the kernel accept io_uring; '' if no such command is known."""
    if "liburing" in reason:
        build = pip_install("infinity-offload", how="--force-reinstall --no-deps --no-binary infinity-offload")
        return f"sudo apt-get install liburing-dev && {build}"
    if number_of(root / _DISABLED[1:]):
        return written("0", _DISABLED)
    if "seccomp" in reason:
        return restarted("--security-opt seccomp=unconfined", root)
    return ""
