"""`infinity finetune --trace`: a timeline of a few steps of the run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch import nn

from infinity.cli.finetune_options import FinetuneOptions
from infinity.errors import ConfigError, printable
from infinity.runtime.trace import require_writable, trace

_STEPS = 5
"""Default number of traced steps: enough to see how a step overlaps with the next step, and few enough for a viewer in
a browser."""


def check(options: FinetuneOptions) -> None:
    """Check that the file of --trace can be written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if options.trace is None:
        return
    if options.trace.exists() and not options.trace.is_file():  # a device file must not be replaced by a regular file
        raise ConfigError(f"--trace {printable(options.trace)}: it is not a regular file")
    require_writable(options.trace)
    if options.output in options.trace.parents:
        raise ConfigError(f"--trace {options.trace}: --output must be empty when the run ends; write it elsewhere")


class TracedSteps(ExitStack):
    """A trace of some steps of a run.

    If the run ends before the last of these steps, the trace has only the steps that were done.

    Args:
        model: the offloaded model.
        path: file for the trace, or None to trace nothing.
        steps: the first and the last step of the trace. None means the second to the sixth step of this process. The
            first step is left out, because it learns the order of the units.
        done: number of steps that the run has done.
        total: number of all steps of the run.

    Attributes:
        path: file for the trace; None if nothing is traced.

    Raises:
        ConfigError: the steps are not among the steps that this process will do.
    """

    def __init__(
        self, model: nn.Module, path: Path | None, steps: tuple[int, int] | None, *, done: int, total: int
    ) -> None:
        super().__init__()
        self._model = model
        self.path = path
        self._first, self._last = steps or (min(done + 2, total), done + 1 + _STEPS)
        if path is not None and done < total and not (self._last > done and self._first <= total):
            raise ConfigError(f"--trace-steps {self._first}:{self._last}: this run does steps {done + 1} to {total}")
        self._first = max(self._first, done + 1)
        self._last = min(self._last, total)

    def before(self, step: int) -> None:
        if self.path is not None and step == self._first:
            self.enter_context(trace(self._model, self.path))

    def after(self, step: int, *, stopping: bool = False) -> bool:
        """Write the trace if this was its last step, or if the run stops now.

        Returns:
            Whether this call has written the trace.
        """
        if self.path is None or not self._first <= step <= self._last or (step != self._last and not stopping):
            return False
        self.close()
        return True
