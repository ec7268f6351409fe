"""The default of `--dtype`, and a line of text that explains the default.

On a GPU the default is bf16. On a CPU, a product of 16-bit matrices is fast only if the processor has instructions for
their dtype, and torch uses these instructions. Otherwise the product of fp32 matrices is faster. The default depends on
the processor's flags and not on a timing, so that a machine always has the same default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from infinity.cli.machine_facts import processor

_ROOT = Path("/")
_X86 = {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16", "amx_fp16")}
_ARM: Mapping[str, Sequence[str]] = {"bf16": ("bf16",), "fp16": ()}
"""Flags of processors that have instructions for a 16-bit dtype, by dtype.

The preferred dtype comes first. On 64-bit ARM torch uses no fp16 instructions.
"""

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
    for name, fast in _fast_flags(flags).items():
        found = next((flag for flag in fast if flag in flags), None)
        if found is not None:
            return DefaultDtype(name, f"this processor has {found}" + (f", but {_no(missing)}" if missing else ""))
        missing += fast
    return DefaultDtype("fp32", f"this processor has {_no(missing)}")


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
    flags = processor(root).flags
    table = _fast_flags(flags)
    if device != "cpu" or name not in table or flags.intersection(table[name]):
        return None
    why = (
        f"this processor has {_no(table[name])}" if table[name] else "torch uses no fp16 instructions of this processor"
    )
    slow = f"{why}, so it multiplies such matrices more slowly than fp32 matrices"
    if source == "run":
        return f"dtype {name}, as when the run began: {slow}"
    return f"dtype {name}: {slow}; --dtype {default.name} is faster"


def _fast_flags(flags: frozenset[str]) -> Mapping[str, Sequence[str]]:
    return _ARM if "asimd" in flags else _X86  # all 64-bit ARM processors have asimd


def _no(flags: Sequence[str]) -> str:
    """Return 'no a', 'neither a nor b' or 'none of a, b, c'."""
    if len(flags) > 2:
        return f"none of {', '.join(flags)}"
    return f"neither {flags[0]} nor {flags[1]}" if len(flags) == 2 else f"no {flags[0]}"
