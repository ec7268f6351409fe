"""The default of `--dtype`, and a line of text that explains the default.

On a GPU the default is bf16. On a CPU, a product of 16-bit matrices is fast only if the processor has instructions for
their dtype, and torch uses these instructions. Otherwise the product of fp32 matrices is faster. The default depends on
the processor's flags and not on a timing, so that a machine always has the same default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from infinity.base.machine_facts import fast_flags, none_of, processor, slow_dtype

_ROOT = Path("/")

Source = Literal["default", "option", "run"]
"""Source of a dtype: the default, an option of the user, or the run that is resumed."""


class DefaultDtype(NamedTuple):
    """Name of the default dtype on the command line, and the reason why this dtype is the default."""

    name: str
    why: str


def default_dtype(device: str, root: Path = _ROOT) -> DefaultDtype:
    """Return the dtype that weights have if the user chooses no dtype.

    Args:
        device: type of the device that computes, such as "cpu".
        root: directory that contains /proc, for tests.
    """
    if device != "cpu":
        return DefaultDtype("bf16", "the default on a GPU")
    flags = processor(root).flags
    missing: list[str] = []
    for name, fast in fast_flags(flags).items():
        found = next((flag for flag in fast if flag in flags), None)
        if found is not None:
            return DefaultDtype(name, f"this processor has {found}" + (f", but {none_of(missing)}" if missing else ""))
        missing += fast
    return DefaultDtype("fp32", f"this processor has {none_of(missing)}")


def dtype_line(name: str, source: Source, device: str, root: Path = _ROOT) -> str | None:
    """Return a line for the user about the dtype `name`.

    The line says why this dtype is the default, or that it is slow on this processor.

    Args:
        name: the dtype by its name on the command line.
        source: source of the dtype.
        device: type of the device that computes, such as "cpu".
        root: directory that contains /proc, for tests.

    Returns:
        None if the user chose the dtype, and the dtype is not slow.
    """
    default = default_dtype(device, root)
    if source == "default":
        if name != "fp32":
            return f"dtype {name}: {default.why} (--dtype chooses another)"
        return f"dtype fp32: {default.why}, so 16 bits are slower (--dtype bf16 takes half the memory for weights)"
    slow = slow_dtype(name, processor(root).flags) if device == "cpu" else None
    if slow is None:
        return None
    return f"{slow}; the run began with it" if source == "run" else f"{slow}; --dtype {default.name} is faster"
