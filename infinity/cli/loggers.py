"""Where the figures of a run go while it trains: --logger, by the trackers of Accelerate and two of ours."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from infinity.cli.evaluation import Evaluated
from infinity.cli.job import values_of
from infinity.cli.marked import Owner
from infinity.cli.options import require_alone
from infinity.cli.output import require_apart
from infinity.cli.progress import StepFacts
from infinity.durable import rng
from infinity.echo import raised
from infinity.errors import ConfigError, printable

_PROJECT = "infinity"
_COLUMNS = ("step", "loss", "learning_rate", "grad_norm", "tokens_per_s", "seconds", "eval_loss")
_MODULES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}


class Entry(NamedTuple):
    """Figures of a step, by the names that transformers' Trainer has for them. `eval_loss` is the loss on held-out
    data; `loss` is the mean of the steps since the entry before, without those that are not finite."""

    step: int
    values: dict[str, float | str]


class Entries:
    """Makes entries of steps.

    Args:
        every: steps between two.
        last: step of the run, which has an entry.
    """

    def __init__(self, every: int, last: int) -> None:
        self._every = every
        self._last = last
        self._facts: list[StepFacts] = []

    def of(self, facts: StepFacts) -> list[Entry]:
        self._facts.append(facts)
        if facts.step % self._every and facts.step != self._last:
            return []
        since, self._facts = self._facts, []
        losses = [each.loss for each in since if math.isfinite(each.loss)]
        seconds = sum(each.seconds for each in since)
        values: dict[str, float | str] = {
            "loss": sum(losses) / len(losses) if losses else math.nan,
            "learning_rate": facts.learning_rate,
            "grad_norm": facts.grad_norm,
            "tokens_per_s": sum(each.tokens for each in since) / max(seconds, 1e-9),
            "seconds": seconds,
        }
        return [Entry(facts.step, values)]


class Loggers:
    """The loggers of a run. One that fails is named once on stderr, and the run goes on without it. What a library
    draws of random numbers changes nothing of the training.

    Args:
        options: of the run.
        last: its last step.
        facts, evaluations: of the steps before a resume.
        written: what the model wrote after each of these evaluations, by the prompt.
        owner: of the directory; None: nothing is logged here.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        last: int,
        facts: Sequence[StepFacts],
        evaluations: Sequence[Evaluated],
        written: Sequence[dict[str, str]],
        owner: Owner | None,
    ) -> None:
        self._options = options
        self._entries = Entries(options.log_every or 1, last)
        self._past = [entry for each in facts for entry in self._entries.of(each)]
        self._past += [_of_evaluation(*each) for each in zip(evaluations, written, strict=True)]
        self._past.sort(key=lambda entry: entry.step)
        self._trackers: dict[str, Any] = {}
        for name in options.logger or ():
            if owner is not None:
                self._try(name, "begin", partial(self._begin, name, owner))

    def _begin(self, name: str, owner: Owner) -> None:
        directory = directory_of(self._options)
        owner.make(directory)
        if name == "csv":
            self._trackers[name] = _CsvFile(directory / "log.csv", self._past)
            return
        if name == "jsonl":
            self._trackers[name] = _JsonFile(directory / "log.jsonl", self._past)
            return
        from accelerate import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()  # which the trackers' own log asks for
        tracker: Any
        if name == "tensorboard":
            knows = False
            tracker = TensorBoardTracker(name, directory, purge_step=0)  # all of it is written again
            tracker.start()
        else:
            tracker = WandBTracker(
                os.environ.get("WANDB_PROJECT", _PROJECT),
                name=self._options.output.name,
                dir=str(directory),
                id=owner.run,
                resume="allow",
            )
            tracker.start()
            knows = bool(getattr(tracker.tracker, "resumed", False))
        if not knows:
            self._say_options(name, tracker)
            for step, values in self._past:
                tracker.log(_all_grouped(values), step=step)
        self._trackers[name] = tracker

    def _say_options(self, name: str, tracker: Any) -> None:
        values = {key: value for key, value in values_of(self._options).items() if value is not None}
        if name == "tensorboard":  # its own way to keep them makes a further run of each
            tracker.log({"options": "\n".join(f"    {key}: {_scalar(each)}" for key, each in values.items())}, step=0)
        else:
            tracker.store_init_configuration({key: _scalar(value) for key, value in values.items()})

    def step(self, facts: StepFacts) -> None:
        """A step is done."""
        self._log(self._entries.of(facts))

    def evaluated(self, found: Evaluated, written: dict[str, str]) -> None:
        """The model was evaluated. Args: written: what it wrote, by the prompt."""
        self._log([_of_evaluation(found, written)])

    def _log(self, entries: Iterable[Entry]) -> None:
        for step, values in entries:
            for name in list(self._trackers):
                given = values if name in ("csv", "jsonl") else _all_grouped(values)
                self._try(name, "log", partial(self._trackers[name].log, given, step=step))

    def close(self) -> None:
        for name in list(self._trackers):
            self._try(name, "end", self._trackers[name].finish)

    def _try(self, name: str, act: str, do: Callable[[], object]) -> None:
        drawn = rng.snapshot()
        try:
            do()
        except Exception as error:  # a library's, or the disk's: none of them is worth the run
            self._trackers.pop(name, None)
            print(
                f"warning: --logger {name} could not {act} ({raised(error)}); the run goes on without it",
                file=sys.stderr,
                flush=True,
            )
        finally:
            rng.restore(drawn)


def _of_evaluation(found: Evaluated, written: dict[str, str]) -> Entry:
    samples = {f"sample {number}": text for number, text in enumerate(written.values(), 1)}
    return Entry(found.step, {"eval_loss": found.loss, **samples})


class _CsvFile:
    """The entries as a table. Args: past: what a run that is resumed has logged until the step it goes on from."""

    def __init__(self, path: Path, past: Sequence[Entry]) -> None:
        _write(path, [self._row(_COLUMNS), *(self._line(entry.values, entry.step) for entry in past)])
        self._file = path.open("a", newline="", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int) -> None:
        self._file.write(self._line(values, step))
        self._file.flush()

    def finish(self) -> None:
        self._file.close()

    def _line(self, values: dict[str, Any], step: int) -> str:
        return self._row([({"step": step} | values).get(name, "") for name in _COLUMNS])

    @staticmethod
    def _row(cells: Sequence[Any]) -> str:
        text = io.StringIO()
        csv.writer(text).writerow(cells)
        return text.getvalue()


class _JsonFile:
    """Each entry a line of JSON, with null in place of what is not finite. Arguments as of _CsvFile."""

    def __init__(self, path: Path, past: Sequence[Entry]) -> None:
        _write(path, [self._line(entry.values, entry.step) for entry in past])
        self._file = path.open("a", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int) -> None:
        self._file.write(self._line(values, step))
        self._file.flush()

    def finish(self) -> None:
        self._file.close()

    @staticmethod
    def _line(values: dict[str, Any], step: int) -> str:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        return json.dumps({"step": step} | finite, allow_nan=False, ensure_ascii=False) + "\n"


def _write(path: Path, lines: Sequence[str]) -> None:
    """All of it, or what was there before."""
    aside = path.with_name(f".{path.name}")
    aside.write_text("".join(lines), encoding="utf-8", newline="")
    os.replace(aside, path)


def _all_grouped(values: dict[str, float | str]) -> dict[str, float | str]:
    """With the names that Trainer gives to its trackers."""
    of_evaluations = ("eval_", "sample")
    return {
        (f"eval/{name.removeprefix('eval_')}" if name.startswith(of_evaluations) else f"train/{name}"): value
        for name, value in values.items()
    }


def _scalar(value: Any) -> str | float | bool:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)


def directory_of(options: argparse.Namespace) -> Path:
    directory: Path = options.log_dir or options.output.with_name(f"{options.output.name}-logs")
    return directory


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do nothing, or need a library that is not there."""
    require_alone("--log-dir", options.log_dir, "--logger", options.logger)
    for name in options.logger or ():
        wanted = _MODULES.get(name, ())
        if wanted and all(importlib.util.find_spec(module) is None for module in wanted):
            raise ConfigError(f"--logger {name} needs its library: pip install {wanted[0]}")


def prepare(options: argparse.Namespace, owner: Owner, apart: Mapping[str, Sequence[Path]]) -> None:
    """Raises ConfigError where another run has its logs, or the directory lies where something else belongs.

    Args:
        apart: directories that it must not be, contain, or lie in, by the option that names them.
    """
    if not options.logger:
        return
    directory = directory_of(options)
    for option, others in apart.items():
        for other in others:
            require_apart(f"--log-dir {printable(directory)}", directory, option, other)
    owner.require(directory, "the files of --logger", "--log-dir")
