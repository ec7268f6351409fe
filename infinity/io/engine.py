"""The engine as the rest of infinity sees it: futures that raise SwapIOError with the unit, the state and the step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from infinity import _native
from infinity.config import NvmeConfig
from infinity.errors import ConfigError, SwapCorruptionError, SwapIOError, SwapTimeoutError
from infinity.io.profile import DiskProfile, profile_of
from infinity.sizes import PAGE_BYTES, round_up

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
QUEUE_DEPTH = 32
_WARN_AFTER_S = 30.0


@dataclass(frozen=True)
class Transfer:
    """One request under way, and what it is for.

    `result` raises SwapIOError when the device failed; until it returned, the memory must not be touched.
    """

    future: _native.IOFuture
    unit: str
    state: str
    step: int

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> None:
        """Wait for the end.

        Raises:
            SwapIOError: the device failed.
            SwapCorruptionError: it returned something else than what was written.
            SwapTimeoutError: it was given up. The memory may be in use for ever: do not reuse it.
        """
        if not self.future.wait(_WARN_AFTER_S):
            logger.warning("still waiting for the %s of unit '%s' after %.0f s", self.state, self.unit, _WARN_AFTER_S)
            self.future.wait()
        failure = self.future.failure()
        if failure is not None:
            raise error_of(failure, self.unit, self.state, self.step)


def error_of(failure: _native.Failure, unit: str = "", state: str = "", step: int = 0) -> SwapIOError:
    """The exception that tells of a failed request."""
    kinds = {"corruption": SwapCorruptionError, "timeout": SwapTimeoutError}
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
    """Start the engine the config asks for and log which one and why. What it leaves open the disks' profile says.

    Raises:
        ConfigError: `engine: io_uring` where the kernel refuses it; says why.
    """
    profiles = [profile for profile in map(profile_of, config.paths) if profile is not None]
    block, depth = _settings(config, profiles)
    try:
        engine = _native.IOEngine(
            config.engine, block_bytes=block, queue_depth=depth, deadline_s=config.deadline_s, faults=list(faults)
        )
    except OSError as error:
        raise ConfigError(f"nvme.engine: {config.engine}: {error}. Set nvme.engine: auto or threads.") from error
    except ValueError as error:
        raise ConfigError(f"nvme: {error}") from error
    logger.info("I/O engine: %s (%s), blocks of %d KiB, %d in flight", engine.name, engine.reason, block >> 10, depth)
    return engine


def _settings(config: NvmeConfig, profiles: Sequence[DiskProfile]) -> tuple[int, int]:
    """Block and depth: as configured, else as the deepest disk measured needs, else the defaults."""
    block = config.block or max((profile.block_bytes for profile in profiles), default=BLOCK_BYTES)
    depth = config.queue_depth or max((profile.queue_depth for profile in profiles), default=QUEUE_DEPTH)
    return round_up(block, PAGE_BYTES) if config.block is None else block, depth
