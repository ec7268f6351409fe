"""The complete options of a run of `infinity finetune`.

The options come from the command line, and from the original run if a run is resumed.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from infinity.base.accelerator import current_device
from infinity.checkpoint.portable import STATE_NAME, PortableCopy
from infinity.cli.default_dtype import default_dtype
from infinity.cli.finetune_options import FinetuneOptions, ResumeRole, defaults
from infinity.cli.options import option, options_of
from infinity.cli.run_ranks import RunRank
from infinity.cli.suggested_command import command
from infinity.cli.tokenizer import has_tokenizer
from infinity.cli.trainer_options import Given
from infinity.config import SwapConfig, load_config
from infinity.durable.generation_body import parse_body
from infinity.errors import ConfigError, ManifestError, ResumeError
from infinity.io.directory import generations_in
from infinity.io.headers import header_in, members_of
from infinity.io.manifest import read_manifest
from infinity.ranks.paths import rank_path
from infinity.sharded.rank_agreement import Tell
from infinity.sharded.rank_stores import furthest_in, ranks_text, steps_of

NAME = "finetune"
"""Name of the tracked object that contains a run's options."""

_REQUIRED = ("model", "data", "config", "output")
_PATHS = ("data", "eval_data", "output")
_LENGTH = ("steps", "epochs")
_PLACES, _MEANWHILE, _TRAINING = (
    defaults(ResumeRole.PLACE),
    defaults(ResumeRole.MEANWHILE),
    defaults(ResumeRole.TRAINING),
)
_KEPT = _PLACES | _TRAINING | _MEANWHILE
_LR = {"sft": (1e-5, 1e-4), "dpo": (1e-6, 1e-5), "reward": (1e-5, 1e-4)}
"""Default learning rates for all parameters and for adapters, by --method."""


@dataclass(frozen=True)
class RunOrigin:
    """Facts about a run's beginning. The facts do not change when the run is resumed.

    Attributes:
        run: id of the run.
        model: name of the model at the run's beginning. The model's files may have been moved since then.
        extended: whether the run's number of steps has changed since its beginning.
    """

    run: str
    model: str
    extended: bool = False


class SavedJob:
    """A tracked object with a run's options, which each generation contains."""

    def __init__(self, options: FinetuneOptions, config: SwapConfig, world: RunRank, origin: RunOrigin) -> None:
        self._values = values_of(options)
        self._config = config.model_dump(mode="json")
        self._ranks = world.count
        self._origin = origin

    def state_dict(self) -> dict[str, Any]:
        return {
            "options": self._values,
            "config": self._config,
            "ranks": self._ranks,
            "origin": asdict(self._origin),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, because resolve() has already used the options of the original run, before the model was made."""


def values_of(options: FinetuneOptions) -> dict[str, Any]:
    """Return the options that the generations of a run contain, as values of JSON."""
    return {name: _plain(getattr(options, name)) for name in _KEPT}


@dataclass(frozen=True)
class ResolvedJob:
    """A job.

    Attributes:
        options: all options.
        config: swap config.
        origin: origin of the run.
        steps: number of optimizer steps that the resumed run has done; None if no run is resumed.
    """

    options: FinetuneOptions
    config: SwapConfig
    origin: RunOrigin
    steps: int | None


def resolve(options: argparse.Namespace, world: RunRank, tell: Tell) -> ResolvedJob:
    """Return a job's complete options, its swap config, and the run that it resumes.

    Rank 0 looks for the run to resume.

    If a run is resumed, options that the user does not give have the values of the original run. --resume reads these
    values from a generation in the given directory, or in the first of nvme.paths. --from-checkpoint reads them from an
    exported checkpoint. --steps and --epochs may differ from the run's options; all other options that affect the
    result must be the same.

    Args:
        options: options of the command line.
        world: this process among the ranks.
        tell: function that sends a value to all ranks and returns the values of all.

    Raises:
        ConfigError: an option is missing, or differs from the option of the original run. The error names the option.
        ResumeError: --resume names a directory without generations, or the directory of an exported checkpoint.
    """
    config = load_config(options.config) if options.config is not None else None
    new = uuid.uuid4().hex
    default = default_dtype(current_device().type).name
    found, new, default = tell(
        "the run to go on with", [_past(options, config), new, default] if world.speaks else None
    )[0]
    _make_absolute(options)
    if found is None:
        _require(options)
        _fill(options, defaults(ResumeRole.PROCESS) | _KEPT)
        if options.lr is None:
            options.lr = _LR[options.method][options.lora is not None]
        options.dtype = options.dtype or default
        if config is None:
            raise AssertionError("a job without a config")
        return ResolvedJob(_completed(options), config, RunOrigin(new, options.model), None)
    saved, steps = found
    # The exported checkpoint contains neither the base model of adapters nor the reference model of --method dpo.
    needed = saved["options"]["lora"] is not None or saved["options"]["method"] == "dpo"
    if options.from_checkpoint is not None and options.model is None and not needed:
        copy = options.from_checkpoint.expanduser().absolute()
        options.model = str(copy) if has_tokenizer(copy) else None
    ranks = saved.get("ranks", 1)
    had = f"{saved['options']['gradient_accumulation']} with {ranks_text(ranks)}"
    as_shared = "" if ranks == world.count else f" for {world}, as {had}"
    extended = _take_over(_with_form(_shared(saved, world), saved, options), options, steps, as_shared)
    _fill(options, defaults(ResumeRole.PROCESS))
    origin = RunOrigin(**saved["origin"]) if "origin" in saved else RunOrigin(new, saved["options"]["model"])
    origin = replace(origin, extended=origin.extended or extended)
    return ResolvedJob(_completed(options), config or _saved_config(saved, options), origin, steps)


def _completed(options: argparse.Namespace) -> FinetuneOptions:
    """Return all options of a new run: the given options, and defaults for the others.

    Raises:
        ConfigError: an option would have no effect.
    """
    if options.logger == ["none"]:
        options.logger = None
    elif "none" in (options.logger or ()):
        raise ConfigError(
            f"--logger {' '.join(options.logger)}: 'none' excludes trackers; leave out 'none', or the trackers"
        )
    return options_of(FinetuneOptions, options)


def _fill(options: argparse.Namespace, defaults: dict[str, Any]) -> None:
    for name, default in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, default)


def _shared(saved: dict[str, Any], world: RunRank) -> dict[str, Any]:
    """Return the original run's options, with the batches of a step divided among the current number of ranks.

    Raises:
        ConfigError: the batches of a step cannot be divided evenly among the ranks.
    """
    values: dict[str, Any] = saved["options"]
    ranks = saved.get("ranks", 1)
    batches = values["gradient_accumulation"] * ranks
    if batches % world.count:
        raise ConfigError(
            f"the resumed run has {batches} batches in each step, which {world} cannot divide evenly: start a number "
            f"of ranks that divides {batches}"
        )
    return values | {"gradient_accumulation": batches // world.count}


def _with_form(values: dict[str, Any], saved: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the run's options.

    If --frozen is given now, but was not given when the run began, the result has `frozen` of the run's swap config as
    --frozen. The two can then be compared.
    """
    if options.frozen is None or values["frozen"] is not None:
        return values
    return values | {"frozen": saved["config"].get("frozen", "auto")}


def _take_over(values: dict[str, Any], options: argparse.Namespace, done: int, shared: str) -> bool:
    """Complete the given options with the options of the original run.

    Return whether the number of steps of the run changes.

    Args:
        values: options of the run.
        options: options of the command line, which are completed.
        done: number of steps that the run has already done.
        shared: text that says how the original run divided the batches of a step among its ranks, for error messages.

    Raises:
        ConfigError: a given option would change the run.
    """
    length = {name: getattr(options, name) for name in _LENGTH}
    extended = length != dict.fromkeys(_LENGTH) and _end_of(length) != _end_of(values)
    if extended:
        _extend(values, length, done)
        values = values | length
    _require_same_fields(options.trainer or {}, values["trainer"] or {})
    for name in _TRAINING:
        given = None if name in (*_LENGTH, "trainer") else _plain(getattr(options, name, None))
        if given is not None and given != values[name]:
            raise ConfigError(
                f"{option(name)} is {_said(given)}, but the resumed run has {_said(values[name])}"
                + (shared if name == "gradient_accumulation" else "")
                + ": leave it out, or begin a new run"
            )
        setattr(options, name, values[name])
    for name in (*_PLACES, *_MEANWHILE):
        if getattr(options, name, None) is None:
            setattr(options, name, _as_paths(values[name]) if name in _PATHS else values[name])
    return extended


def _require_same_fields(given: Given, kept: Given) -> None:
    """Check that the given fields of TRL's configs have the same values as in the original run.

    Raises:
        ConfigError: a field would change the run.
    """
    for name, value in given.items():
        if value != kept.get(name):
            raise ConfigError(
                f"{name} is {_said(value)}, but the resumed run has {_said(kept.get(name))}: leave it out, or begin a "
                "new run"
            )


def _said(value: Any) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _extend(values: dict[str, Any], length: dict[str, Any], done: int) -> None:
    """Print that the number of steps of the run has changed, and how this affects the schedule.

    Raises:
        ConfigError: the run has already done more than the new number of steps.
    """
    steps = length["steps"]
    if steps is not None and steps < done:
        raise ConfigError(f"--steps is {steps}, but the resumed run has done {done} steps: give at least this number")
    was, now = _end_of(values), _end_of(length)
    print(
        f"the run was begun for {was} and now ends after {now}: from now on --schedule is computed for {now}",
        flush=True,
    )


def _end_of(values: dict[str, Any]) -> str:
    if values["steps"] is not None:
        return f"{values['steps']} steps"
    passes = "one pass" if (values["epochs"] or 1) == 1 else f"{values['epochs']} passes"
    return f"{passes} over the data"


def _require(options: argparse.Namespace) -> None:
    missing = [f"--{name}" for name in _REQUIRED if getattr(options, name, None) is None]
    if missing:
        raise ConfigError(f"the following arguments are required: {', '.join(missing)}")


def _make_absolute(options: argparse.Namespace) -> None:
    """Make the paths of the options absolute, because a run may be resumed from another working directory."""
    for name in ("output", "trace"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).expanduser().absolute())
    for name in ("data", "eval_data"):
        if getattr(options, name) is not None:
            setattr(options, name, [path.expanduser().absolute() for path in getattr(options, name)])
    if options.model is not None and Path(options.model).expanduser().is_dir():
        options.model = str(Path(options.model).expanduser().absolute())


def _absolute(paths: Sequence[Path]) -> list[Path]:
    return [path.expanduser().resolve() for path in paths]


def _as_paths(value: Any) -> Any:
    if value is None:
        return None
    return [Path(path) for path in value] if isinstance(value, list) else Path(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _past(options: argparse.Namespace, config: SwapConfig | None) -> tuple[dict[str, Any], int] | None:
    """Return the run's record (SavedJob.state_dict) from the newest readable generation, and the generation's step.

    The result is None if there is nothing to resume.
    """
    if options.from_checkpoint is not None:
        copy = PortableCopy(options.from_checkpoint.expanduser())
        return checked(copy.body.tracked, copy.directory)[NAME], copy.manifest.step
    directory = directory_of(options, config)
    if directory is None:
        return None
    store = store_in(directory.expanduser())
    of_all = steps_of(directory.expanduser(), furthest_in(directory.expanduser()))
    problem = _without_generations(store)
    for path in (path for step, path in generations_in(store).items() if step in of_all):
        try:
            manifest = read_manifest(path)
            tracked = parse_body(manifest.body, path).tracked
        except ManifestError as error:
            problem = str(error)
            continue
        return checked(tracked, path)[NAME], manifest.step
    # a new run in this directory would remove the files of the exported checkpoint
    if options.resume or (store / STATE_NAME).is_file():
        raise ResumeError(f"nothing to resume in {directory}: {problem}")
    print(f"nothing to resume in {directory}: {problem}; the run begins at step 0", flush=True)
    return None


def store_in(directory: Path) -> Path:
    """Return the path of rank 0's store below the swap directory of a run."""
    return rank_path(directory, 0, furthest_in(directory))


def directory_of(options: argparse.Namespace, config: SwapConfig | None) -> Path | None:
    """Return the swap directory of the run to resume; None if --resume is not given.

    Raises:
        ConfigError: the options do not name the directory, or name two different directories.
    """
    if options.resume is None:
        return None
    if options.resume:
        directory = Path(options.resume)
        if config is not None and _absolute(config.nvme.paths[:1]) != _absolute([directory]):
            raise ConfigError(
                f"--resume {directory} is not the first of nvme.paths in --config "
                f"({config.nvme.paths[0] if config.nvme.paths else 'which has none'}): a run is resumed in its own "
                f"directory. To move the run, export it with `{command('checkpoint', 'export')}` and use "
                "--from-checkpoint."
            )
        return directory
    if config is not None and config.nvme.paths:
        return config.nvme.paths[0]
    raise ConfigError("--resume needs the swap directory of the run: --resume DIR, or --config with nvme.paths")


def _without_generations(directory: Path) -> str:
    """Return the reason why a directory has no generations, as text for an error."""
    if not directory.is_dir():
        return "there is no such directory"
    if (directory / STATE_NAME).is_file():
        return "it contains a checkpoint that `checkpoint export` wrote: resume from it with --from-checkpoint"
    try:
        header = header_in(directory).header
    except ResumeError:
        return "it contains no run"
    if header.member:
        return (
            f"it is part {header.member + 1} of a store whose generations are in {header.members[0]}: name that "
            "directory"
        )
    if header.mode == "in place":
        return "its run kept no generations, because commit_every was 0 or there was no room for generations"
    return "no generation was committed there"


def checked(tracked: dict[str, Any], source: object) -> dict[str, Any]:
    """Return the tracked objects of a run, after a check that this version's `infinity finetune` made the run.

    Raises:
        ResumeError: the run was not made by this version's `infinity finetune`.
    """
    saved = tracked.get(NAME)
    known = isinstance(saved, dict) and isinstance(saved.get("options"), dict) and isinstance(saved.get("config"), dict)
    if not known or saved is None:
        raise ResumeError(
            f"{source} belongs to a run that `infinity finetune` did not make; resume the run with the program that "
            "made it"
        )
    if set(saved["options"]) != set(_KEPT):
        raise ResumeError(
            f"{source} belongs to a run of another version of infinity, with other options; use that version"
        )
    return tracked


def model_of(tracked: dict[str, Any]) -> tuple[str, str | None] | None:
    """Return the model of a run of `infinity finetune` and its revision; None if another program made the run."""
    try:
        options: dict[str, Any] = checked(tracked, "the run")[NAME]["options"]
    except ResumeError:
        return None
    return str(options["model"]), options["revision"]


def _saved_config(saved: dict[str, Any], options: argparse.Namespace) -> SwapConfig:
    """Return the run's swap config.

    If --resume names a directory that is not in the run's nvme.paths, the store was moved, and nvme.paths is changed.

    Raises:
        ResumeError: the store was moved and has several directories, so that the new paths of the other directories are
            unknown.
    """
    values = dict(saved["config"])
    if options.resume:
        directory = Path(options.resume).expanduser().absolute()
        store = store_in(directory)
        parts = members_of(store)
        values["nvme"] = values["nvme"] | {"paths": [str(p if store == directory else p.parent) for p in parts]}
    return load_config(values)
