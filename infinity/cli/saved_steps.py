"""Models of steps, which `--save-every` and `--save-best` save for use while the run goes on.

OUTPUT-steps has a directory step-N for each, and the link `best` to the one with the lowest loss on held-out data. A
run goes on from its store and not from these. The last step's model is the output itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.checkpoint.save import save_pretrained
from infinity.cli.evaluation import Evaluated, best_of
from infinity.cli.world import World, told
from infinity.echo import raised
from infinity.errors import ConfigError, InfinityError, PeerError, SwapIOError, printable
from infinity.io import durable
from infinity.sizes import format_bytes

_BEST = "best"
_NEW_LINK = ".best"
_SHOWN = 4


def directory_of(output: Path) -> Path:
    return output.with_name(f"{output.name}-steps")


class SavedSteps:
    """Args:
    options: of the run.
    last: its last step.

    Attributes:
        failed: sentences about models that could not be saved.
    """

    def __init__(self, options: argparse.Namespace, tokenizer: Any, last: int, world: World) -> None:
        self._resumed = 0
        self._output = options.output
        self.directory = directory_of(options.output)
        self._every = options.save_every
        self._limit = options.save_limit
        self._keeps_best = bool(options.save_best)
        self._tokenizer = tokenizer
        self._last = last
        self._world = world
        self.failed: list[str] = []

    def resume(self, done: int) -> None:
        """The run goes on after this step."""
        self._resumed = done

    def require_room(self, model_bytes: int) -> None:
        """Raises ConfigError if the disk has no room for what will be saved, and for the output beside it."""
        saved = 0 if self._every is None else (self._last - 1) // self._every - self._resumed // self._every
        most = saved if self._limit is None else min(saved, self._limit + 1)  # the new one comes before the old goes
        most += 2 * self._keeps_best
        needed, free = (most + 1) * model_bytes, shutil.disk_usage(self._output.parent).free
        if most and needed > free:
            raise ConfigError(
                f"--save-every: {most} models of {format_bytes(model_bytes)} and the output take "
                f"{format_bytes(needed)}, and the disk of {printable(self._output.parent)} has {format_bytes(free)} "
                "free. Save less often, keep fewer (--save-limit), or choose an --output on another disk."
            )

    def due(self, step: int, evaluations: Sequence[Evaluated]) -> bool:
        """Whether `save` has something to do after this step."""
        return step > 0 and (self._is_periodic(step) or self._is_best(step, evaluations))

    def save(self, model: Any, step: int, evaluations: Sequence[Evaluated]) -> str:
        """Save the model of a step, and remove those that are not kept. All ranks call. Returns a line for the
        terminal.

        Raises:
            SwapIOError: the weights could not be read.
            PeerError: another rank failed.
        """
        is_best, target = self._is_best(step, evaluations), self.directory / f"step-{step}"
        if step == self._last:
            return ""  # the output, once it is there
        try:
            # A model of a later step is made anew: with another --steps the same step is another one.
            there = step <= self._resumed and target.is_dir()
            if not told(model, "whether the step is saved", there)[0]:
                save_pretrained(model, target)
            if self._world.speaks:
                self._tokenizer.save_pretrained(target)  # also where a crash came between the two
                if is_best:
                    self._link_best(target)
                self._remove_old()
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

    def conclude(self, evaluations: Sequence[Evaluated]) -> list[str]:
        """The output is there. Returns lines for the terminal that say where models are."""
        best = best_of(evaluations) if self._keeps_best else None
        try:
            if best is not None and best.step == self._last:
                self._link_best(self._output)
                self._remove_old()
        except OSError as error:
            self.failed.append(f"{printable(self.directory / _BEST)} does not name the best model: {raised(error)}")
        lines = list(self.failed)
        if there := [f"step-{step}" for step in self._steps()]:
            shown = ", ".join(there) if len(there) <= _SHOWN else f"{there[0]}, …, {there[-1]}"
            lines.append(f"models of steps: {printable(self.directory)}: {shown}")
        if best is not None and (self.directory / _BEST).is_dir():
            lines.append(f"lowest held-out loss: {best.loss:.4f}, of step {best.step}: {self.directory / _BEST}")
        return [printable(line) for line in lines]

    def _is_periodic(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def _is_best(self, step: int, evaluations: Sequence[Evaluated]) -> bool:
        best = best_of(evaluations)
        return self._keeps_best and best is not None and best.step == step

    def _steps(self) -> list[int]:
        """Steps whose models are in the directory."""
        if not self.directory.is_dir():
            return []
        names = (re.fullmatch(r"step-([1-9][0-9]*)", path.name) for path in self.directory.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def _link_best(self, target: Path) -> None:
        self.directory.mkdir(exist_ok=True)
        new = self.directory / _NEW_LINK
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(target, self.directory), target_is_directory=True)
        os.replace(new, self.directory / _BEST)
        durable.fsync(self.directory)

    def _remove_old(self) -> None:
        """Everything in the directory is this run's: `require_new` saw it empty."""
        best = self.directory / _BEST
        periodic = [step for step in self._steps() if self._is_periodic(step)]
        kept = {f"step-{step}" for step in (periodic if self._limit is None else periodic[-self._limit :])}
        with contextlib.suppress(OSError):
            kept.add(Path(os.readlink(best)).name)
        for step in self._steps():
            if f"step-{step}" not in kept:
                shutil.rmtree(self.directory / f"step-{step}")


def require_new(options: argparse.Namespace) -> None:
    """Raises ConfigError where models of another run are in the directory; `_remove_old` might remove them."""
    directory = directory_of(options.output)
    if (options.save_every or options.save_best) and directory.exists() and any(directory.iterdir()):
        raise ConfigError(
            f"{printable(directory)}, for the models of --save-every and --save-best, is not empty: choose another "
            "--output, or remove it"
        )


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do nothing without another one."""
    if options.save_limit is not None and options.save_every is None:
        raise ConfigError("--save-limit does nothing without --save-every")
    if options.save_best and not (options.eval_data or options.eval_split):
        raise ConfigError("--save-best does nothing without --eval-data or --eval-split")
    if options.save_best and options.eval_steps is None:
        raise ConfigError("--save-best needs --eval-steps: else the last step is the only one that is evaluated")
