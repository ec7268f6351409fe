"""Models of steps, which `--save-every` and `--save-best` save for use while the run goes on.

OUTPUT-steps has a directory step-N for each of --save-every, and best-N for one that was only saved because it was the
best so far. The link `best` names the one with the lowest loss on held-out data. A run goes on from its store and not
from these. The last step's model is the output itself.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.cli.evaluation import Evaluated, best_of
from infinity.cli.marked import Owner
from infinity.cli.models import save_model
from infinity.cli.options import require_alone
from infinity.cli.world import World, told
from infinity.echo import raised
from infinity.errors import ConfigError, InfinityError, PeerError, SwapIOError, printable
from infinity.io import durable
from infinity.sizes import format_bytes

_BEST = "best"
_NEW_LINK = ".best"
_SHOWN = 4
_NAME_CHARS = 48


def directory_of(output: Path) -> Path:
    return output.with_name(f"{output.name}-steps")


class SavedSteps:
    """The directory of a run.

    Args:
        options: of the run.
        last: its last step.

    Attributes:
        failed: sentences about models that could not be saved.
    """

    def __init__(
        self, options: argparse.Namespace, tokenizer: Any, last: int, world: World, owner: Owner | None
    ) -> None:
        self._options = options
        self._output: Path = options.output
        self._every: int | None = options.save_every
        self._limit: int | None = options.save_limit
        self._keeps_best = bool(options.save_best)
        self._tokenizer = tokenizer
        self._last = last
        self._world = world
        self._owner = owner
        self.failed: list[str] = []

    @property
    def _directory(self) -> Path:
        return directory_of(self._output)

    def go_on(self, done: int, evaluations: Sequence[Evaluated]) -> None:
        """The run goes on after this step. What an interruption has left half made is removed, and what is of later
        steps, which are done again. Raises OSError."""
        if self._owner is None or not (self._every or self._keeps_best) or not self._directory.is_dir():
            return
        for path in list(self._directory.iterdir()):
            number = _step_of(path.name)
            if re.match(r"\.(step|best)-", path.name) or (number is not None and number > done):
                shutil.rmtree(path)
        link, best = self._directory / _BEST, best_of(evaluations)
        if link.is_symlink() and not link.exists():
            link.unlink()
            if best is not None and (target := self._saved(best.step)) is not None:
                self._link_best(target)

    def require_room(self, model_bytes: int, done: int) -> None:
        """Raises ConfigError if the disk has no room for what will be saved, and for the output beside it."""
        there = len(self._saved_steps())
        most = 2 * self._keeps_best
        if self._every is not None:
            more = (self._last - 1) // self._every - max(done - 1, 0) // self._every
            most += more if self._limit is None else max(min(more, self._limit + 1 - there), 1)
        needed, free = (most + 1) * model_bytes, shutil.disk_usage(self._output.parent).free
        if most and needed > free:
            option, fewer = "--save-every", "Save less often, keep fewer (--save-limit)"
            if self._every is None:
                option, fewer = "--save-best", "Leave --save-best out"
            raise ConfigError(
                f"{option}: {most} models of {format_bytes(model_bytes)} and the output take "
                f"{format_bytes(needed)}, and the disk of {printable(self._output.parent)} has {format_bytes(free)} "
                f"free. {fewer}, or choose an --output on another disk."
            )

    def due(self, step: int, evaluations: Sequence[Evaluated]) -> bool:
        """Whether `save` has something to do after this step."""
        return 0 < step < self._last and (self._is_periodic(step) or self._is_best(step, evaluations))

    def save(self, model: Any, step: int, evaluations: Sequence[Evaluated]) -> str:
        """Save the model of a step, and remove those that are not kept. All ranks call. Returns a line for the
        terminal.

        Raises:
            SwapIOError: the weights could not be read.
            PeerError: another rank failed.
        """
        is_best = self._is_best(step, evaluations)
        target = self._directory / (f"step-{step}" if self._is_periodic(step) else f"{_BEST}-{step}")
        try:
            self._write(model, target, is_best=is_best)
        except (PeerError, SwapIOError):
            raise
        except (InfinityError, OSError) as error:
            if not self._world.speaks:
                return ""  # rank 0 says it
            why = f"step {step}: the model is not saved in {printable(target)}: {raised(error)}"
            self.failed.append(why)
            print(f"warning: {why}; the run goes on", file=sys.stderr, flush=True)
            return ""
        best = " (the best so far)" if is_best else ""
        return f"step {step}: the model is saved in {printable(target)}{best}"

    def _write(self, model: Any, target: Path, *, is_best: bool) -> None:
        """Raises InfinityError, OSError."""
        if not told(model, "whether the step is saved", target.is_dir())[0]:
            problem: Exception | None = None
            if self._owner is not None:
                try:
                    self._owner.make(self._directory)
                except (InfinityError, OSError) as error:
                    problem = error
            save_model(model, target, self._options)  # which all ranks begin, and which says it where it cannot be
            if problem is not None:
                raise problem
        if not self._world.speaks:
            return
        self._tokenizer.save_pretrained(target)  # also where a crash came between the two
        if is_best:
            self._link_best(target)
        self._remove_old()

    def conclude(self, evaluations: Sequence[Evaluated]) -> list[str]:
        """The output is there. Returns lines for the terminal that say where models are."""
        best = best_of(evaluations) if self._keeps_best else None
        link = self._directory / _BEST
        try:
            if best is not None and best.step == self._last and self._owner is not None:
                self._owner.make(self._directory)
                self._link_best(self._output)
                self._remove_old()
        except (InfinityError, OSError) as error:
            self.failed.append(f"{printable(link)} does not name the best model, the output: {raised(error)}")
        lines = list(self.failed)
        if there := [f"step-{step}" for step in self._saved_steps()]:
            shown = ", ".join(there) if len(there) <= _SHOWN else f"{there[0]}, …, {there[-1]}"
            lines.append(f"models of steps: {printable(self._directory)}: {shown}")
        if best is not None:
            where = link if best.step == self._linked_step() else "its model could not be saved"
            lines.append(f"lowest held-out loss: {best.loss:.4f}, of step {best.step}: {where}")
        return [printable(line) for line in lines]

    def _is_periodic(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def _is_best(self, step: int, evaluations: Sequence[Evaluated]) -> bool:
        best = best_of(evaluations)
        return self._keeps_best and best is not None and best.step == step

    def _saved_steps(self) -> list[int]:
        """Steps of --save-every whose models are in the directory."""
        if not self._directory.is_dir():
            return []
        names = [path.name for path in self._directory.iterdir() if path.name.startswith("step-")]
        return sorted(step for step in map(_step_of, names) if step is not None)

    def _saved(self, step: int) -> Path | None:
        """The model of a step, where it was saved."""
        found = (self._directory / f"{name}-{step}" for name in ("step", _BEST))
        return next((path for path in found if path.is_dir()), None)

    def _linked_step(self) -> int | None:
        """The step whose model the link `best` names."""
        link = self._directory / _BEST
        if not link.is_dir():
            return None
        target = link.resolve()
        return self._last if target == self._output.resolve() else _step_of(target.name)

    def _link_best(self, target: Path) -> None:
        new = self._directory / _NEW_LINK
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(target, self._directory), target_is_directory=True)
        os.replace(new, self._directory / _BEST)
        durable.fsync(self._directory)

    def _remove_old(self) -> None:
        """Remove what --save-limit says, and the models that were only saved because they were the best. The directory
        is this run's, which marked it."""
        link = self._directory / _BEST
        best = Path(os.readlink(link)).name if link.is_symlink() else ""
        old = {path.name for path in self._directory.glob(f"{_BEST}-*")}
        if self._limit is not None:
            old |= {f"step-{step}" for step in self._saved_steps()[: -self._limit]}
        for name in old - {best}:
            shutil.rmtree(self._directory / name)


def _step_of(name: str) -> int | None:
    """The step that a directory's name says."""
    found = re.fullmatch(rf"(?:step|{_BEST})-([1-9][0-9]*)", name)
    return int(found[1]) if found else None


def prepare(options: argparse.Namespace, owner: Owner) -> None:
    """Raises ConfigError where models cannot be saved beside the output, or another run's are there."""
    if not (options.save_every or options.save_best):
        return
    directory = directory_of(options.output)
    owner.require(directory, "the models of --save-every and --save-best", "--output")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{directory.name[:_NAME_CHARS]}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(
            f"{printable(directory)}, for the models of --save-every and --save-best, cannot be made: "
            f"{error.strerror}. Choose an --output in a directory that can be written."
        ) from error


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do nothing without another one."""
    held_out = options.eval_data or options.eval_split
    require_alone("--save-limit", options.save_limit, "--save-every", options.save_every)
    require_alone("--save-best", options.save_best or None, "--eval-data or --eval-split", held_out)
    if options.save_best and options.eval_steps is None:
        raise ConfigError("--save-best needs --eval-steps: else the last step is the only one that is evaluated")
