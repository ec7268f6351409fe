"""Output of a run's progress: a line that is updated in a terminal, or plain lines in other places."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import TextIO

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class StepFacts:
    """Figures of one optimizer step.

    Attributes:
        grad_norm: norm of the gradients before clipping; nan for a skipped step.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    tokens: int
    read_bytes: int
    written_bytes: int

    @property
    def skipped(self) -> bool:
        return math.isnan(self.grad_norm)

    def line(self) -> str:
        rss = psutil.Process().memory_info().rss
        read, written = self.read_bytes / self.seconds / 1e9, self.written_bytes / self.seconds / 1e9
        norm = "skipped" if self.skipped else f"norm {self.grad_norm:.3f}"
        return (
            f"loss {self.loss:.4f}  {self.tokens / self.seconds:.0f} tok/s  read {read:.2f} GB/s  written "
            f"{written:.2f} GB/s  {norm}  lr {self.learning_rate:.2e}  RAM {rss / 2**30:.2f} GiB"
        )


class PlainProgress:
    """Output of progress in plain lines.

    There is a line for the first step, a line for the last step, and further lines in between.

    Args:
        total: number of steps of the run.
        stream: stream that the lines are printed to.
        every: steps between lines. None means that `every_s` determines when lines are printed.
        every_s: minimum number of seconds between lines.
    """

    def __init__(self, total: int, stream: TextIO, every: int | None = None, every_s: float = 10.0) -> None:
        self._total = total
        self._stream = stream
        self._every = every
        self._every_s = every_s
        self._last = float("-inf")
        self._first: tuple[int, float] | None = None
        self._lines: list[str] = []
        self._writing = False

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def update(self, facts: StepFacts) -> None:
        now = time.monotonic()
        first, began = self._first = self._first or (facts.step, now)  # the first step is slower than the others
        due = now - self._last >= self._every_s if self._every is None else facts.step % self._every == 0
        if not due and facts.step not in (1, self._total):
            return
        self._last = now
        done, more = facts.step - first, self._total - facts.step
        left = f"  left {(now - began) / done * more:.0f} s" if done else ""
        self.say(f"step {facts.step}/{self._total}  {facts.line()}{left}")

    def say(self, text: str) -> None:
        """Print a line.

        A signal handler may call this method while another line is being written. The handler cannot write to the
        stream at that moment, so the handler's line is printed after the other line.
        """
        self._lines.append(text)
        while self._lines and not self._writing:
            self._writing = True
            try:
                if self._lines:  # since the check, a signal handler may have written the waiting lines
                    print(self._lines.pop(0), file=self._stream, flush=True)
            finally:
                self._writing = False


class RichProgress:
    """Output of progress in one line with a bar, which is updated in the terminal.

    Args:
        total: number of steps of the run.
        console: console that shows the line.
        every: steps between lines that remain in the terminal. None means that there are no such lines.
    """

    def __init__(self, total: int, console: Console, every: int | None = None) -> None:
        self._total = total
        self._every = every
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=total, facts="")

    def __enter__(self) -> RichProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, facts: StepFacts) -> None:
        line = facts.line()
        self._progress.update(self._task, completed=facts.step, facts=line)
        if self._every is not None and facts.step % self._every == 0:
            self.say(f"step {facts.step}/{self._total}  {line}")

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


def open_progress(total: int, every: int | None) -> PlainProgress | RichProgress:
    """Return a RichProgress if stdout is a terminal, and otherwise a PlainProgress.

    rich would obey FORCE_COLOR and similar variables. They have no effect here, so that carriage returns are never
    written to a pipe.

    Args:
        total: number of steps of the run.
        every: steps between lines, or None for the default.
    """
    if not sys.stdout.isatty():
        return PlainProgress(total, sys.stdout, every)
    return RichProgress(total, Console(file=sys.stdout), every)
