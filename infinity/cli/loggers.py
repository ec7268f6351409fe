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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infinity.cli.evaluation import Evaluated
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
    """Makes entries of steps. Args: every: steps between two."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._facts: list[StepFacts] = []

    def of(self, facts: StepFacts) -> list[Entry]:
        self._facts.append(facts)
        if facts.step % self._every:
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
    """The loggers of a run. One that fails is named once on stderr, and the run goes on without it.

    Args:
        options: of the run.
        values: what the run is, by name.
        facts, evaluations: of the steps before a resume.
        written: what the model wrote after each of these evaluations, by the prompt.
        run: what tells this run from others, where it can be resumed.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        values: dict[str, Any],
        facts: Sequence[StepFacts],
        evaluations: Sequence[Evaluated],
        written: Sequence[dict[str, str]],
        run: str | None,
    ) -> None:
        self._entries = Entries(options.log_every or 1)
        past = [entry for each in facts for entry in self._entries.of(each)]
        past += [_of_evaluation(*each) for each in zip(evaluations, written, strict=True)]
        past.sort(key=lambda entry: entry.step)
        done = facts[-1].step if facts else 0
        self._trackers: dict[str, Any] = {}
        drawn = rng.snapshot()  # what a library draws must not change the training
        for name in options.logger or ():
            self._try(name, "begin", lambda name=name: self._begin(name, options, values, past, done, run))
        rng.restore(drawn)

    def _begin(
        self,
        name: str,
        options: argparse.Namespace,
        values: dict[str, Any],
        past: Sequence[Entry],
        done: int,
        run: str | None,
    ) -> None:
        directory = directory_of(options)
        directory.mkdir(parents=True, exist_ok=True)
        if name == "csv":
            self._trackers[name] = _CsvFile(directory / "log.csv", past)
            return
        if name == "jsonl":
            self._trackers[name] = _JsonFile(directory / "log.jsonl", past)
            return
        from accelerate import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()  # which the trackers' own log asks for
        tracker: Any
        if name == "tensorboard":
            tracker = TensorBoardTracker(name, directory, purge_step=done + 1)
        else:
            project = os.environ.get("WANDB_PROJECT", _PROJECT)
            goes_on = {} if run is None else {"id": run, "resume": "allow"}
            tracker = WandBTracker(project, name=options.output.name, dir=str(directory), **goes_on)
        tracker.start()
        if not done:
            tracker.store_init_configuration({key: _scalar(value) for key, value in values.items()})
        self._trackers[name] = tracker

    def step(self, facts: StepFacts) -> None:
        """A step is done."""
        self._log(self._entries.of(facts))

    def evaluated(self, found: Evaluated, written: dict[str, str]) -> None:
        """The model was evaluated. Args: written: what it wrote, by the prompt."""
        self._log([_of_evaluation(found, written)])

    def _log(self, entries: Iterable[Entry]) -> None:
        for step, values in entries:
            for name in list(self._trackers):
                given = values if name in ("csv", "jsonl") else {_grouped(key): each for key, each in values.items()}
                self._try(name, "log", lambda name=name, given=given, at=step: self._trackers[name].log(given, step=at))

    def close(self) -> None:
        for name in list(self._trackers):
            self._try(name, "end", self._trackers[name].finish)

    def _try(self, name: str, act: str, do: Any) -> None:
        try:
            do()
        except Exception as error:  # a library's, or the disk's: none of them is worth the run
            self._trackers.pop(name, None)
            print(
                f"warning: --logger {name} could not {act} ({raised(error)}); the run goes on without it",
                file=sys.stderr,
                flush=True,
            )


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


def _grouped(name: str) -> str:
    """A name as Trainer gives it to its trackers."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith(("eval_", "sample")) else f"train/{name}"


def _scalar(value: Any) -> str | float | bool:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)


def directory_of(options: argparse.Namespace) -> Path:
    directory: Path = options.log_dir or options.output.with_name(f"{options.output.name}-logs")
    return directory


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do nothing, or need a library that is not there."""
    if options.log_dir is not None and not options.logger:
        raise ConfigError("--log-dir does nothing without --logger")
    for name in options.logger or ():
        wanted = _MODULES.get(name, ())
        if wanted and all(importlib.util.find_spec(module) is None for module in wanted):
            raise ConfigError(f"--logger {name} needs its library: pip install {wanted[0]}")


def require_new(options: argparse.Namespace) -> None:
    """Raises ConfigError where another run has its logs."""
    directory = directory_of(options)
    if options.logger and directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(
            f"{printable(directory)}, for the files of --logger, is not an empty directory: choose another --log-dir, "
            "or remove it"
        )
