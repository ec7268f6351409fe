"""The native core: the instruction set that it chose, and the I/O engine that works here."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from infinity.cli.doctor.mends import pip_install, restarted, written
from infinity.cli.doctor.rows import Found, Probes

_ROOT = Path("/")
_TRIED_BYTES = 1 << 20


def core(engine: str, root: Path = _ROOT) -> Probes:
    """Args: engine: as the swap config asks for it."""
    looks = Core(engine, root)
    return Probes.of(
        "native core",
        {"instruction set": looks.instruction_set, "I/O engine": looks.engine, "registered buffers": looks.registered},
    )


class Core:
    """Args:
    wanted: 'auto', 'io_uring' or 'threads'.
    root: of /sys and /proc, for tests.
    """

    def __init__(self, wanted: str, root: Path = _ROOT) -> None:
        self._wanted, self._root = wanted, root

    def instruction_set(self) -> Found:
        try:
            from infinity import _native
        except ImportError as error:
            return Found("missing", f"the native core cannot be imported: {error}", pip_install("infinity-offload"))
        supported, asked = _native.supported_isas(), os.environ.get("INFINITY_ISA")
        try:
            used = _native.select_isa()
        except ValueError as error:
            return Found("missing", str(error), "unset INFINITY_ISA")
        if used != supported[-1]:
            return Found("slower", f"{used}, as INFINITY_ISA={asked} says; {supported[-1]} works", "unset INFINITY_ISA")
        if used == "baseline":
            return Found("slower", "baseline: infinity has no faster code for this processor")
        return Found("ok", f"{used}, of {', '.join(supported)}")

    def engine(self) -> Found:
        opened, refused = self._opened
        if opened is None:
            return Found("missing", f"nvme.engine: {self._wanted}: {refused}", self._mend(refused))
        said = f"{opened.name}: {opened.reason}"
        if opened.name == "io_uring" or self._wanted == "threads":
            return Found("ok", said)
        return Found("slower", f"{said}; transfers take more processor time", self._mend(opened.reason))

    def registered(self) -> Found:
        """Whether the kernel keeps the memory of transfers at hand."""
        from infinity import _native

        opened, _ = self._opened
        if opened is None:
            return Found("unknown", "there is no engine to try it with")
        if opened.name != "io_uring":
            return Found("ok", f"only io_uring has them; the engine is {opened.name}")
        refused = opened.register_memory(_native.Arena(_TRIED_BYTES).view(0, _TRIED_BYTES))
        if not refused:
            return Found("ok", "they work")
        return Found("slower", f"{refused}; transfers take more processor time. See 'locked memory'")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The engine, or None and why there is none."""
        from infinity import _native

        try:
            return _native.IOEngine(self._wanted), ""
        except OSError as error:
            return None, str(error)

    def _mend(self, reason: str) -> str:
        """Of a kernel that refuses io_uring."""
        from infinity.cli.machine_facts import describe_machine

        if "liburing" in reason:
            build = pip_install("infinity-offload", how="--force-reinstall --no-deps --no-binary infinity-offload")
            return f"sudo apt-get install liburing-dev && {build}"
        if describe_machine(self._root).io_uring_disabled:
            return written("0", "/proc/sys/kernel/io_uring_disabled")
        if "seccomp" in reason:
            return restarted("--security-opt seccomp=unconfined", self._root)
        return ""
