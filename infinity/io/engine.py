"""The engine as the rest of infinity sees it: futures that raise SwapIOError with the unit, the state and the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infinity import _native
from infinity.config import NvmeConfig
from infinity.errors import ConfigError, SwapIOError

logger = logging.getLogger(__name__)


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
        self.future.wait()
        failure = self.future.failure()
        if failure is not None:
            raise SwapIOError(
                failure.operation,
                path=failure.path,
                offset=failure.offset,
                nbytes=failure.nbytes,
                errno=failure.errno,
                detail=failure.message,
                unit=self.unit,
                state=self.state,
                step=self.step,
            )


EngineFactory = Callable[[NvmeConfig], _native.IOEngine]


def open_engine(config: NvmeConfig, faults: Sequence[_native.Fault] = ()) -> _native.IOEngine:
    """Start the engine the config asks for and log which one and why.

    Raises:
        ConfigError: `engine: io_uring` where the kernel refuses it; says why.
    """
    try:
        engine = _native.IOEngine(
            config.engine, block_bytes=config.block, queue_depth=config.queue_depth, faults=list(faults)
        )
    except OSError as error:
        raise ConfigError(f"nvme.engine: {config.engine}: {error}. Set nvme.engine: auto or threads.") from error
    except ValueError as error:
        raise ConfigError(f"nvme: {error}") from error
    logger.info("I/O engine: %s (%s)", engine.name, engine.reason)
    return engine
