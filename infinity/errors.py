"""The exceptions of infinity: one class per cause. Each message says what happened, where, and what to do."""

from __future__ import annotations

import os
from typing import Any

_SHOWN_MAX = 4000


def printable(text: object, *, lines: bool = False) -> str:
    """`text`, safe to show on a terminal: control characters, escape sequences, characters that reverse the direction
    of writing, and bytes that are not UTF-8 are spelled out. Text of more than 4000 characters is cut.

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
    """Base of every error that infinity raises on purpose. A message may quote names from files and models, so it is
    made printable."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message, lines=True))


def cause_of(error: BaseException | None) -> InfinityError | None:
    """The error of infinity that an error is, or was raised from; None where there is none."""
    while error is not None and not isinstance(error, InfinityError):
        error = error.__cause__
    return error


class ConfigError(InfinityError, ValueError):
    """The swap config or an argument has a wrong value."""


class NotAvailableError(ConfigError):
    """A feature that the swap config names and this version does not have yet."""


class PlanError(InfinityError):
    """The plan does not fit a budget. Names the unit, the budget and the smallest change that would fit."""


class ModelError(InfinityError):
    """infinity cannot train this model, or the model was changed in a way that infinity does not support."""


class DeviceRoomError(PlanError):
    """memory.device has no room for the units that are needed at once. All ranks have this error, or none has.

    Attributes:
        limit_bytes: of memory.device, for this process.
        peers: the other ranks, as the plan knew them (plan/problem.py: Peers).
    """

    def __init__(self, message: str, limit_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.peers: Any = None

    def among(self, peers: Any) -> DeviceRoomError:
        """The error of a process among these ranks."""
        self.peers = peers
        return self


class TooLateError(ModelError):
    """A model that was changed after it was offloaded cannot be offloaded anew; nothing was done."""


class ReleasedParameterError(ModelError):
    """A parameter, or its gradient, was used while its values are in the store."""


class StaleWeightsError(ModelError):
    """A backward pass needs weights, or saved tensors, that were changed since its forward pass."""


class DeviceError(InfinityError, RuntimeError):
    """The device's runtime failed, and what was on its way to or from the device is lost."""


class NonFiniteGradientError(InfinityError):
    """Gradients were NaN or infinite several steps in a row. The states are those of the last good step."""


class ForkError(InfinityError):
    """infinity was used in a forked child, where its threads and pinned memory do not exist."""


class BenchError(InfinityError):
    """infinity-bench cannot measure what it was asked to, or a disk returned wrong data."""


class StoreLockedError(InfinityError):
    """The swap directory belongs to another run."""


class StoreNotEmptyError(InfinityError):
    """The swap directory holds the generations of an earlier run, which a new run would lose."""


class ResumeError(InfinityError):
    """There is nothing to resume, or it does not fit the model, the optimizer or the config. Says what differs."""


class NoStoreError(ResumeError):
    """The directory holds no store."""


class DirtyStoreError(ResumeError):
    """The store was updated in place, without commits, so its states belong to no single step."""


class ManifestError(ResumeError):
    """A small file of a store or of a portable copy cannot be used: it cannot be read, or has wrong values."""

    def __init__(self, path: object, problem: str) -> None:
        problem = printable(problem)
        super().__init__(f"{printable(path)} {problem}")
        self.path = str(path)
        self.problem = problem


class DamagedFileError(ManifestError):
    """A small file of a store is missing, or its bytes are not those that were written."""


class NewerVersionError(ManifestError):
    """A small file of a store is undamaged, but was written by a newer infinity in a form that this version cannot
    read."""


class PeerError(InfinityError):
    """This rank cannot go on, because of another rank or of what the ranks do together.

    Attributes:
        rank: the rank at fault; None where no single one is known to be.
        ranks: all that are at fault, ascending.
        cause: what happened, in words.
        advice: what to do.
    """

    ADVICE = "All ranks must end: remove the cause, start all of them again, and resume from the last generation."

    def __init__(self, cause: str, ranks: tuple[int, ...] = (), advice: str = ADVICE) -> None:
        self.ranks, self.cause, self.advice = tuple(sorted(ranks)), printable(cause), advice
        super().__init__(f"{self.cause.removesuffix('.')}. {advice}".rstrip())

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if len(self.ranks) == 1 else None

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, tuple[int, ...], str]]:
        return type(self), (self.cause, self.ranks, self.advice)

    def again(self) -> PeerError:
        """The same error, to be raised once more: one that was raised keeps its first traceback."""
        copy = PeerError(self.cause, self.ranks, self.advice)
        copy.__cause__ = self.__cause__
        return copy


_RESTART = (
    "With commit_every, resume the run. Without it the states may be partly updated: start again from a saved model."
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
        cause: what went wrong, in words.
        unit, state: what was being moved; "" when not known.
        step: the optimizer step during which the transfer failed.

    Args:
        begun: states were being moved; False while the store is made.
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
        begun: bool = True,
    ) -> None:
        what = f"{state} of unit '{unit}'" if unit else "swap data"
        cause = detail or os.strerror(errno)
        advice = self.advice or _ADVICE.get(errno, "Check the disk that holds the path.")
        when = f" at step {step}" if step else ""
        self.operation = operation
        self.path, self.offset, self.nbytes = path, offset, nbytes
        self.errno, self.cause = errno, cause
        self.unit, self.state, self.step = unit, state, step
        after = _RESTART if begun else "Nothing was moved yet."
        self.message = printable(f"{operation} of {what} failed{when}: {self._where()}. {advice} {after}")
        OSError.__init__(self, errno, self.message, path)

    def _where(self) -> str:
        return f"{self.path}, offset {self.offset}, {self.nbytes} bytes: {self.cause} (errno {self.errno})"

    def __str__(self) -> str:
        return self.message


class SwapCorruptionError(SwapIOError):
    """The store returned other data than was written: torn, stale, misdirected or with flipped bits."""

    advice = "The device, its cable or its memory returned wrong data without an error: check its health (smartctl)."


class SwapTimeoutError(SwapIOError):
    """A device did not answer within nvme.deadline_s and was given up.

    The device may still read or write the memory of the transfer, so that memory is never used or freed again.
    """

    advice = (
        "The device hangs, or is slower than nvme.deadline_s allows: check `dmesg` and the drive's health. This "
        "process may not be able to exit before it answers."
    )


class DeviceCopyError(SwapIOError, DeviceError):
    """What was read from the store, or was to be written there, did not get to or from the device that computes.

    `path` names the device, and `cause` has the number of the runtime's error; there is no place in a file.
    """

    advice = (
        "Error 2 is out of memory: lower memory.device, or free what others have there. Others are in the "
        "documentation of the device's runtime, and mostly end what the process does on the device."
    )

    def _where(self) -> str:
        return f"{self.path}: {self.cause}"
