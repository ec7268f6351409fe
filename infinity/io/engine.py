"""I/O engine: opening from the config, and transfers, which wrap the engine's futures.

Errors of a transfer name the unit, the state and the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from infinity import _native
from infinity.config import NvmeConfig
from infinity.errors import ConfigError, DeviceCopyError, SwapCorruptionError, SwapIOError, SwapTimeoutError
from infinity.io.disk_profile import profile_of

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
IN_FLIGHT_BYTES = 32 << 20
_WARN_AFTER_S = 30.0


class BackgroundWork(Protocol):
    """Work in the background whose end can be awaited."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def result(self) -> None:
        """Wait, and raise the error of the work. Raises SwapIOError."""


@dataclass(frozen=True)
class Transfer:
    """Request to the engine, with the unit, state and step to which its data belong.

    Nothing may use the memory of the request before result() has returned.

    Attributes:
        future: the native request.
        unit, state, step: names of the data that the request moves, for errors.
        state_of: for a request that moves several states: function that returns the name of the state that failed.
    """

    future: _native.IOFuture
    unit: str = ""
    state: str = ""
    step: int = 0
    state_of: Callable[[_native.Failure], str] | None = None

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> None:
        """Wait until the request is done, and raise its error.

        Raises:
            SwapIOError: the device failed.
            SwapCorruptionError: the device returned data that differ from the data written.
            SwapTimeoutError: the disk did not answer before the deadline. The disk may still use the memory, so the
                memory must never be reused.
            DeviceCopyError: the runtime of the device that computes (the GPU) failed.
        """
        self.wait()
        failure = self.future.failure()
        if failure is not None:
            state = self.state if self.state_of is None else self.state_of(failure)
            raise _error_of(failure, self.unit, state, self.step)

    @property
    def has_failed(self) -> bool:
        """Whether the request has failed. Does not wait."""
        return self.done() and self.future.failure() is not None

    def wait(self) -> None:
        """Wait until the request is done or has failed."""
        if not self.future.wait(_WARN_AFTER_S):
            logger.warning("still waiting for the %s of unit '%s' after %.0f s", self.state, self.unit, _WARN_AFTER_S)
            self.future.wait()


def _error_of(failure: _native.Failure, unit: str, state: str, step: int) -> SwapIOError:
    """Return the exception for a failed request."""
    kinds = {"corruption": SwapCorruptionError, "timeout": SwapTimeoutError, "device": DeviceCopyError}
    return kinds.get(failure.kind, SwapIOError)(
        failure.operation,
        path=failure.path,
        offset=failure.offset,
        nbytes=failure.nbytes,
        errno=failure.errno,
        detail=failure.cause,
        unit=unit,
        state=state,
        step=step,
    )


def open_engine(config: NvmeConfig, faults: Sequence[_native.Fault] = ()) -> _native.IOEngine:
    """Start the engine that the config names, and log which engine is used and why.

    Values that the config omits come from the profile of the disks.

    Args:
        config: the `nvme` part of the config.
        faults: faults to inject, for tests.

    Raises:
        ConfigError: the config has `engine: io_uring` and the kernel refuses io_uring (the message says why), or a
            value is invalid.
    """
    profiles = [profile for profile in map(profile_of, config.paths) if profile is not None]
    block = config.block or max((profile.block_bytes for profile in profiles), default=BLOCK_BYTES)
    in_flight = config.in_flight or max((profile.in_flight_bytes for profile in profiles), default=IN_FLIGHT_BYTES)
    try:
        engine = _native.IOEngine(
            config.engine,
            block_bytes=block,
            queue_depth=config.queue_depth,
            in_flight_bytes=in_flight,
            deadline_s=config.deadline_s,
            faults=list(faults),
        )
    except OSError as error:
        raise ConfigError(f"nvme.engine: {config.engine}: {error}. Set nvme.engine: auto or threads.") from error
    except ValueError as error:
        raise ConfigError(f"nvme: {error}") from error
    logger.info(
        "I/O engine: %s (%s), blocks of %d KiB, %d KiB in flight",
        engine.name,
        engine.reason,
        block >> 10,
        in_flight >> 10,
    )
    return engine
