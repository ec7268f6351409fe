"""A stage's side of the protocol: each measurement is one JSON line on stdout, written as soon as it is known.

So a measurement that raises, hangs or takes the process with it does not lose the ones before it.

    {"begins": NAME}                                              what the process was doing, should it end now
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
"""`missed`: right, and slower than expected. `known`: the expectation is not met, and the reason is that today's design
cannot meet it. `noted`: a fact that nothing is expected of."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Options:
    """What the runner hands a stage as its one argument.

    Attributes:
        seconds: the stage's time limit, from its start.
        out: the folder whose files are kept; `work`: one for swap files and logs, removed afterwards.
        found: what the earlier stages measured, by stage and name.
        settings: the stage's own, for tests and by hand.
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
    """Where a stage writes its measurements. `channel` gets the lines."""

    def __init__(self, channel: TextIO, seconds: float) -> None:
        self._channel = channel
        self._ends = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the stage's time limit."""
        return self._ends - time.monotonic()

    def fileno(self) -> int:
        """Of the channel: for a child that writes lines of its own."""
        return self._channel.fileno()

    def note(self, name: str, value: Any, *, expected: str = "") -> None:
        """A fact that is judged by nobody, or by whoever reads it beside `expected`."""
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
        """Take one measurement; what it raises is written, not raised.

        Args:
            expected: in words, beside the value in the line.
            good: whether the value is as expected; None: it is noted only.
            known: why today's design does not meet the expectation; then a bad value is no failure. An exception is.
            speed: what is expected is a speed: a bad value is missed, not failed.
            least_s: it is skipped where less is left of the stage's time.

        Returns:
            The value, or None when there is none.
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
    """Run a stage as the program: options from argv[1], measurements to stdout, whatever else is printed to stderr."""
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
    os._exit(0)  # a thread of a library, or a device that hangs, must not hold the exit
