"""The default of `--dtype`, and a line that says why it is the one.

The processor's flags decide, never a timing, so that a machine always has the same default: torch multiplies matrices
of a 16-bit dtype fast where the processor has instructions for it that torch uses, and elsewhere slower than fp32 ones.
On a GPU the default is bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from infinity.cli.machine_facts import processor

_ROOT = Path("/")
_X86 = {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16", "amx_fp16")}
_ARM: Mapping[str, Sequence[str]] = {"bf16": ("bf16",), "fp16": ()}
"""For each 16-bit dtype the flags of the processors that have instructions for it, in the order of preference. torch
uses none for fp16 on 64-bit ARM."""

Source = Literal["default", "option", "run"]
"""Who chose a dtype: nobody, the user, or the run that is resumed."""


class DefaultDtype(NamedTuple):
    """A dtype by its name on the command line, and why it is the default."""

    name: str
    why: str


def default_dtype(device: str, root: Path = _ROOT) -> DefaultDtype:
    """The dtype of the weights where none is chosen.

    Args:
        device: type of the device that computes, such as "cpu".
        root: of /proc, for tests.
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
    """A line for the user about the dtype `name`: why it is the default, or that it is slow on this processor. None
    for a chosen dtype that is not slow."""
    default = default_dtype(device, root)
    if source == "default":
        if name != "fp32":
            return f"dtype {name}: {default.why} (--dtype takes another)"
        return f"dtype fp32: {default.why}, so 16 bits are slower (--dtype bf16 takes half the memory for weights)"
    flags = processor(root).flags
    table = _fast_flags(flags)
    if device != "cpu" or name not in table or flags.intersection(table[name]):
        return None
    why = (
        f"this processor has {_no(table[name])}" if table[name] else "torch uses no fp16 instructions of this processor"
    )
    slow = f"{why}, so it multiplies such matrices slower than fp32 ones"
    if source == "run":
        return f"dtype {name}, with which the run began: {slow}"
    return f"dtype {name}: {slow}; --dtype {default.name} is faster"


def _fast_flags(flags: frozenset[str]) -> Mapping[str, Sequence[str]]:
    return _ARM if "asimd" in flags else _X86  # all 64-bit ARM processors have asimd


def _no(flags: Sequence[str]) -> str:
    """'no a', 'neither a nor b', 'none of a, b, c'."""
    if len(flags) > 2:
        return f"none of {', '.join(flags)}"
    return f"neither {flags[0]} nor {flags[1]}" if len(flags) == 2 else f"no {flags[0]}"
