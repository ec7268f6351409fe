"""Exceptions of infinity, with one class for each cause. Each message says what happened, where it happened, and what
to do."""

from __future__ import annotations

import os
from typing import Any

_SHOWN_MAX = 4000


def printable(text: object, *, lines: bool = False) -> str:
    """Return `text` in a form that is safe to show on a terminal, shortened to 4000 characters.

    Control characters, escape sequences, characters that reverse the direction of writing, and bytes that are not UTF-8
    are escaped.

    Args:
        text: the text.
        lines: whether line breaks and tabs are kept.
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
    """Base class of every error that infinity raises on purpose.

    A message may quote names from files and models, so control characters in the message are escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message, lines=True))


def cause_of(error: BaseException | None) -> InfinityError | None:
    """Return the first InfinityError among an exception, its cause, the cause of its cause, and so on; None if there is
    none."""
    while error is not None and not isinstance(error, InfinityError):
        error = error.__cause__
    return error


class ConfigError(InfinityError, ValueError):
    """The swap config or an argument has a wrong value."""


class NotAvailableError(ConfigError):
    """The swap config names a feature that this version does not have yet."""


class PlanError(InfinityError):
    """The plan does not fit a budget. The message names the unit, the budget and the smallest change that would fit."""


class ModelError(InfinityError):
    """infinity cannot train this model, or the model was changed in a way that infinity does not support."""


class DeviceRoomError(PlanError):
    """memory.device has no room for the units that are needed at the same time. Either all ranks raise this error, or
    no rank does.

    Attributes:
        limit_bytes: memory.device of this process, in bytes.
        peers: facts about the other ranks that the plan has used (plan/plan_input.py: PeerFacts); None: not set yet.
    """

    def __init__(self, message: str, limit_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.peers: Any = None

    def among(self, peers: Any) -> DeviceRoomError:
        """Set `peers`, and return the error."""
        self.peers = peers
        return self


class ReoffloadError(ModelError):
    """A model was changed after it was offloaded, and cannot be offloaded again. The failed call has changed
    nothing."""


class ReleasedParameterError(ModelError):
    """A parameter or its gradient was used while the parameter's values are in the store."""


class StaleWeightsError(ModelError):
    """A backward pass needs weights or saved tensors that were changed after its forward pass."""


class DeviceError(InfinityError, RuntimeError):
    """The runtime of the device (the GPU) failed, and data in flight to or from the device are lost."""


class NonFiniteGradientError(InfinityError):
    """Gradients were NaN or infinite in several consecutive steps.

    The states are the states after the last step with finite gradients.
    """


class ForkError(InfinityError):
    """infinity was used in a forked child process, in which its threads and pinned memory do not exist."""


class BenchError(InfinityError):
    """infinity-bench cannot do the requested measurement, or a disk returned wrong data."""


class StoreLockedError(InfinityError):
    """The swap directory is in use by another run."""


class StoreNotEmptyError(InfinityError):
    """The swap directory contains the generations of an earlier run. A new run would lose these generations."""


class ResumeError(InfinityError):
    """There is nothing to resume, or the run that would be resumed does not fit the model, the optimizer or the config.

    The message says what differs.
    """


class NoStoreError(ResumeError):
    """The directory contains no store."""


class DirtyStoreError(ResumeError):
    """The store was updated in place, without commits, so its states do not belong to the same step."""


class ManifestError(ResumeError):
    """A small file of a store or of a portable copy cannot be used: it cannot be read, or has wrong values."""

    def __init__(self, path: object, problem: str) -> None:
        problem = printable(problem)
        super().__init__(f"{printable(path)} {problem}")
        self.path = str(path)
        self.problem = problem


class DamagedFileError(ManifestError):
    """A small file of a store is missing, or its bytes differ from the bytes that were written."""


class NewerVersionError(ManifestError):
    """A small file of a store is undamaged, but a newer infinity wrote it in a form that this version cannot read."""


class PeerError(InfinityError):
    """This rank cannot continue, because another rank or a common operation of the ranks failed.

    Attributes:
        rank: the rank at fault, if exactly one rank is known to be at fault; otherwise None.
        ranks: all ranks at fault, ascending.
        cause: description of what happened.
        advice: description of what to do.
        kind: name of the class of the error with which the other rank failed; "" if it is not known.
    """

    ADVICE = "All ranks must end: remove the cause, start all of them again, and resume from the last generation."

    def __init__(self, cause: str, ranks: tuple[int, ...] = (), advice: str = ADVICE, kind: str = "") -> None:
        self.ranks, self.cause, self.advice, self.kind = tuple(sorted(ranks)), printable(cause), advice, kind
        super().__init__(f"{self.cause.removesuffix('.')}. {advice}".rstrip())

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if len(self.ranks) == 1 else None

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, tuple[int, ...], str, str]]:
        return type(self), (self.cause, self.ranks, self.advice, self.kind)

    def again(self) -> PeerError:
        """Return a new error that is equal to this one. If an error is raised a second time, it keeps the traceback of
        the first time."""
        copy = PeerError(self.cause, self.ranks, self.advice, self.kind)
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
        errno: the system's error number, 0 if no system call failed.
        path: the swap file.
        offset: bytes from the start of the file.
        nbytes: length of the block that failed.
        cause: description of what went wrong.
        unit, state: the unit and state that the transfer moved; "" if not known.
        step: the optimizer step during which the transfer failed.

    Args:
        begun: whether states have been moved; False while the store is being created.
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
        what = f"{state} of unit '{unit}'" if unit else state or "swap data"
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
    """The data that were read from the store differ from the data that were written: torn, stale, misdirected or with
    flipped bits."""

    advice = "The device, its cable or its memory returned wrong data without an error: check its health (smartctl)."


class SwapTimeoutError(SwapIOError):
    """A disk did not complete a transfer within nvme.deadline_s, and infinity no longer waits for the transfer.

    The disk may still read or write the memory of the transfer, so this memory is never reused or freed.
    """

    advice = (
        "The device hangs, or is slower than nvme.deadline_s allows: check `dmesg` and the drive's health. This "
        "process may not be able to exit before the device answers."
    )


class DeviceCopyError(SwapIOError, DeviceError):
    """A copy to or from the GPU failed. Its data were read from the store, or would have been written to the store.

    `path` is the name of the device, and `cause` has the number of the runtime's error. The error has no position in a
    file.
    """

    advice = (
        "Error 2 is out of memory: lower memory.device, or free memory that other processes use there. The "
        "documentation of the device's runtime lists the other errors; after most of them the process cannot use the "
        "device any more."
    )

    def _where(self) -> str:
        return f"{self.path}: {self.cause}"
