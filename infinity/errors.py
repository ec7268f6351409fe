"""Everything infinity raises. One class per cause; each message says what happened, where, and what to do."""

from __future__ import annotations

import os

_SHOWN_MAX = 4000


def printable(text: object, *, lines: bool = False) -> str:
    """`text` as it may be shown on a terminal: control characters, escape sequences, characters that reverse the
    direction of writing, and bytes that are no UTF-8 are spelled out; what is longer than 4000 characters is cut.

    Args:
        lines: leave line breaks and tabs as they are.
    """
    whole = str(text)
    shown = whole[:_SHOWN_MAX]
    if not shown.isprintable():
        kept = "\n\t" if lines else ""
        shown = "".join(
            each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in shown
        )
    return shown if len(whole) <= _SHOWN_MAX else f"{shown}… ({len(whole)} characters)"


class InfinityError(Exception):
    """Base of every error infinity raises on purpose. Its message has names from files and models in it, so it is made
    printable."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message, lines=True))


class ConfigError(InfinityError, ValueError):
    """The swap config, or an argument, is not usable as it stands."""


class NotAvailableError(ConfigError):
    """Something the design names and this version does not have yet."""


class PlanError(InfinityError):
    """The plan does not fit a budget. Names the unit, the budget and the smallest change that would fit."""


class ModelError(InfinityError):
    """The model, or what was done to it, is not something infinity can train."""


class ReleasedParameterError(ModelError):
    """A parameter, or its gradient, was used while its values are in the store."""


class StaleWeightsError(ModelError):
    """A backward pass needs weights, or saved tensors, that were changed since its forward pass."""


class NonFiniteGradientError(InfinityError):
    """Gradients were NaN or infinite several steps in a row. The states are those of the last good step."""


class ForkError(InfinityError):
    """infinity was used in a forked child, where its threads and pinned memory do not exist."""


class BenchError(InfinityError):
    """infinity-bench cannot measure what was asked for, or found wrong data."""


class StoreLockedError(InfinityError):
    """The swap directory belongs to another run."""


class StoreNotEmptyError(InfinityError):
    """The swap directory holds the generations of an earlier run, which a new run would lose."""


class ResumeError(InfinityError):
    """There is nothing to resume, or it does not go with the model, the optimizer or the config. Says what differs."""


class NoStoreError(ResumeError):
    """The directory holds no store."""


class DirtyStoreError(ResumeError):
    """The store was updated in place (commit_every: 0): its states are of no step."""


class ManifestError(ResumeError):
    """A file that says what a store holds is damaged, or not one."""

    def __init__(self, path: object, problem: str) -> None:
        problem = printable(problem)
        super().__init__(f"{printable(path)} {problem}")
        self.path = str(path)
        self.problem = problem


class DamagedFileError(ManifestError):
    """Such a file is missing, or its bytes are not those that were written."""


class NewerVersionError(ManifestError):
    """Such a file is as it was written, by a newer infinity, in a form that this one does not know."""


_RESTART = (
    "Where generations are kept (commit_every) resume the run; else the states may be partly updated: start again."
)
_ADVICE = {
    5: "The device reported an error: check `dmesg` and the drive's health (smartctl).",
    28: "The disk is full: free space, or set nvme.paths to a larger disk.",
    22: "The file system refused the alignment or the flags: set nvme.engine: threads, or use ext4 or xfs.",
}


class SwapIOError(InfinityError, OSError):
    """A transfer to or from the store failed.

    Attributes:
        errno: the system's error number, 0 where no system call failed.
        path: the swap file.
        offset: bytes from the start of the file.
        nbytes: length of the block that failed.
        cause: in words.
        unit, state: what was being moved; empty when not known.
        step: the optimizer step during which it happened.
    """

    advice = ""

    def __init__(
        self,
        operation: str,
        *,
        path: str,
        offset: int = 0,
        nbytes: int = 0,
        errno: int = 0,
        unit: str = "",
        state: str = "",
        step: int = 0,
        detail: str = "",
    ) -> None:
        what = f"{state} of unit '{unit}'" if unit else "swap data"
        cause = detail or os.strerror(errno)
        advice = self.advice or _ADVICE.get(errno, "Check the disk that holds the path.")
        when = f" at step {step}" if step else ""
        message = printable(
            f"{operation} of {what} failed{when}: {path}, offset {offset}, {nbytes} bytes: {cause} "
            f"(errno {errno}). {advice} {_RESTART}"
        )
        OSError.__init__(self, errno, message, path)
        self.message = message
        self.operation = operation
        self.path, self.offset, self.nbytes = path, offset, nbytes
        self.cause = cause
        self.unit, self.state, self.step = unit, state, step

    def __str__(self) -> str:
        return self.message


class SwapCorruptionError(SwapIOError):
    """What was read from the store is not what was written: torn, stale, misdirected or flipped."""

    advice = "The device, its cable or its memory returned wrong data without an error: check its health (smartctl)."


class SwapTimeoutError(SwapIOError):
    """A device has not answered before nvme.deadline_s and was given up.

    It may still read or write the memory of the transfer, which is therefore never used or freed again.
    """

    advice = (
        "The device hangs, or is slower than nvme.deadline_s allows: check `dmesg` and the drive's health. This "
        "process may not be able to exit before it answers."
    )
