"""A stage's side of the protocol: each measurement is one JSON line on stdout, written as soon as it is known.

A measurement that raises, hangs or kills the process therefore does not lose the earlier ones.

    {"begins": NAME}                                              the measurement in progress, in case the process ends
    {"name": NAME, "value": …, "expected": TEXT, "verdict": VERDICT, "reason": TEXT, "error": TRACEBACK}
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

Verdict = Literal["ok", "failed", "missed", "known", "noted", "skipped"]
"""Judgement of a measurement.

`missed` means correct, but slower than expected. `known` means that the expectation is not met because the present
design cannot meet it. `noted` means that there is no expectation and the value is a fact.
"""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Options:
    """Options that the runner passes to a stage as its argument.

    Attributes:
        seconds: the stage's time limit, counted from its start.
        out: folder for files that are kept.
        work: folder for swap files and logs, which is removed afterwards.
        found: measurements of the earlier stages, by stage and name.
        settings: settings of this stage, for tests and manual runs.
    """

    seconds: float
    out: Path
    work: Path
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(vars(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Options:
        fields = json.loads(text)
        return cls(**fields | {"out": Path(fields["out"]), "work": Path(fields["work"])})


class Record:
    """Writer of a stage's measurements. The lines go to `channel`."""

    def __init__(self, channel: TextIO, seconds: float) -> None:
        self._channel = channel
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the stage's time limit."""
        return self._ends - time.monotonic()

    def fileno(self) -> int:
        """Return the channel's file descriptor, for a child process that writes lines of its own."""
        return self._channel.fileno()

    def note(self, name: str, value: Any, *, expected: str = "") -> None:
        """Write a fact that is not judged automatically; `expected` helps a human reader to judge it."""
        self._write(name, value=value, expected=expected, verdict="noted")

    def skip(self, name: str, reason: str, *, expected: str = "") -> None:
        self._write(name, expected=expected, verdict="skipped", reason=reason)

    def measure(
        self,
        name: str,
        expected: str,
        take: Callable[[], Value],
        *,
        good: Callable[[Value], bool] | None = None,
        known: str = "",
        speed: bool = False,
        least_s: float = 0.0,
    ) -> Value | None:
        """Take one measurement. If `take` raises, the exception is written and not raised.

        Args:
            name: name of the measurement.
            expected: the expectation in words, written to the line beside the value.
            take: function that returns the value.
            good: function that returns whether the value is as expected; None: the value is only noted.
            known: reason why the present design does not meet the expectation. With a reason, a wrong value is not a
                failure, but an exception is.
            speed: whether the expectation is a speed; if so, a wrong value is `missed` and not `failed`.
            least_s: the measurement is skipped if fewer seconds of the stage's time are left.

        Returns:
            The value; None when there is none.
        """
        if self.left_s < least_s:
            self.skip(name, f"{self.left_s:.0f} s of the stage are left, it takes {least_s:.0f} s", expected=expected)
            return None
        self._write_line({"begins": name})
        try:
            value = take()
            verdict = _judge(value, good, known=bool(known), speed=speed)
        except Exception:
            self._write(name, expected=expected, verdict="failed", error=traceback.format_exc())
            return None
        self._write(name, value=value, expected=expected, verdict=verdict, reason=known if verdict == "known" else "")
        return value

    def _write(self, name: str, **fields: Any) -> None:
        self._write_line({"name": name} | {key: value for key, value in fields.items() if value not in ("", None)})

    def _write_line(self, line: dict[str, Any]) -> None:
        print(json.dumps(line, default=str), file=self._channel, flush=True)


def _judge(value: Value, good: Callable[[Value], bool] | None, *, known: bool, speed: bool) -> Verdict:
    if good is None:
        return "noted"
    if good(value):
        return "ok"
    return "known" if known else "missed" if speed else "failed"


def run(stage: Callable[[Record, Options], None]) -> None:
    """Run a stage as the main program. Options are read from argv[1], and measurements are written to stdout.

    All other output is written to stderr.
    """
    options = Options.from_json(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    margin = min(3.0, options.seconds / 4)
    faulthandler.dump_traceback_later(options.seconds - margin, exit=False)
    stage(Record(channel, options.seconds - margin), options)
    faulthandler.cancel_dump_traceback_later()
    channel.flush()
    sys.stderr.flush()
    os._exit(0)  # a hanging device, or a library's thread that hangs, must not block the exit
