"""Parser and types for the options of `infinity` and `infinity-bench`. Values are checked before anything slow is
imported.

The types raise argparse.ArgumentTypeError. The parser raises ConfigError for every wrong command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from infinity.cli.trainer_options import OURS
from infinity.errors import ConfigError, printable
from infinity.files import require_possible
from infinity.quoting import one_line, quoted
from infinity.sizes import SIZE_MAX, format_bytes, parse_bytes
from infinity.state.moments import OptimizerName

Options = TypeVar("Options")
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
SGD_MOMENTUM = 0.9
DTYPE_NAMES = ("bf16", "fp16", "fp32")
DEFAULT_DTYPE = (
    "default on a GPU: bf16; on a processor: the first of bf16 and fp16 that it has instructions for, else fp32"
)
FROZEN_NAMES = ("bf16", "int8", "nf4")
LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "clearml", "swanlab")

STEPS_MAX = 10**12 - 1
"""Largest number of steps. A generation's number has twelve digits."""
SEED_MAX = 2**64 - 1
LORA_MAX = 1 << 16
TOKENS_MAX = 1 << 24
"""Maximum number of tokens in the sequences of one backward pass. More tokens would not fit into any memory."""

OTHERS_NAMES = OURS | {
    "num_epochs": "epochs",
    "micro_batch_size": "batch_size",
    "sequence_len": "sequence_length",
    "max_seq_length": "sequence_length",
    "model_name_or_path": "model",
    "base_model": "model",
    "dataset": "data",
    "datasets": "data",
    "lr_scheduler": "schedule",
    "lora_r": "lora",
    "lora_target_modules": "lora_targets",
    "val_set_size": "eval_split",
    "max_new_tokens": "max_tokens",
    "resume_from_checkpoint": "resume",
}
"""Options of Trainer and axolotl, each with infinity's name for the same option. Messages use these names as hints."""
_FOR_US = ("excludes", "needs", "methods", "role")
"""Keys of an option's metadata that are not arguments of argparse."""
_MESSAGE_MAX = 400
_TEXT_MAX = 1 << 20


class StrictArgumentParser(argparse.ArgumentParser):
    """A parser that accepts no abbreviations of options. A new option could change the meaning of an abbreviation.

    Args:
        take: function that finds the fields of TRL's configs among the arguments that this parser does not know. The
            fields that it finds become `trainer` in the namespace.
        renamed: other names of options, with underscores, and infinity's names for these options.
        options: arguments for the constructor of ArgumentParser.
    """

    def __init__(
        self,
        take: Callable[[Sequence[str]], tuple[Any, list[str]]] | None = None,
        renamed: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._take = take
        self._renamed = renamed

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message in one line."""
        line = one_line(message)
        line = line if len(line) <= _MESSAGE_MAX else f"{line[:_MESSAGE_MAX]}…"
        raise ConfigError(f"{line} (see `{self.prog} --help`)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments. A sub-parser parses the arguments of its command.

        Raises:
            ConfigError: an argument is unknown. The error names the known argument that is most similar.
        """
        given = sys.argv[1:] if args is None else list(args)
        for text in given:
            if re.fullmatch(r"--[^=]+=--", text):  # argparse would read '--' as an empty list
                self.error(f"argument {text.removesuffix('=--')}: '--' is not a value")
        known, unknown = super().parse_known_args(list(map(self._by_our_name, given)), namespace)
        if self._take is not None:
            taken, unknown = self._take(unknown)
            known = argparse.Namespace(**(vars(known) | {"trainer": taken}))
        if unknown:
            name = unknown[0].partition("=")[0][:_MESSAGE_MAX]
            others = option(OTHERS_NAMES.get(name.removeprefix("--").replace("-", "_"), ""))
            known_ones = self._option_string_actions
            near = difflib.get_close_matches(name, known_ones, n=1, cutoff=0.5)
            near = [others] if others in known_ones else near
            hint = f"; did you mean {near[0]}?" if near and name.startswith("-") else ""
            self.error(f"unknown argument {quoted(unknown[0])}{hint}")
        return known, unknown

    def _by_our_name(self, text: str) -> str:
        """Return an argument.

        If it begins with another name of an option, replace this name by the parser's own name.
        """
        if self._renamed is None or not text.startswith("--"):
            return text
        flag, sign, value = text.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        ours = option(self._renamed.get(name, name))
        return f"{ours}{sign}{value}" if ours in self._option_string_actions else text


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return the argparse type for whole numbers from `low` to `high`. The form 3.0 is also accepted."""

    def parse(text: str) -> int:
        if re.fullmatch(r"[-+]?[0-9]{1,4000}(\.0+)?", text) is None:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number")
        value = int(text.partition(".")[0])
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, not {_short(text)}")
        if value > high:
            raise argparse.ArgumentTypeError(f"must be at most {high}, not {_short(text)}")
        return value

    return parse


def unless(unset: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type that accepts the values of the type `read` and the value `unset`.

    The value `unset` means that the option is not given.
    """
    return lambda text: None if text == unset else read(text)


def number(low: float, high: float, *, or_zero: bool = False) -> Callable[[str], float]:
    """Return the argparse type for numbers from `low` to `high`. If `or_zero` is true, 0 is also accepted."""

    def parse(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number")
        if low <= value <= high or (or_zero and value == 0):
            return value
        if value < 0 or (value == 0 and low > 0):
            raise argparse.ArgumentTypeError(
                f"must be positive{' or 0' if or_zero or low == 0 else ''}, not {_short(text)}"
            )
        raise argparse.ArgumentTypeError(f"must be between {low:g} and {high:g}, not {_short(text)}")

    return parse


def size(low: int, high: int = SIZE_MAX) -> Callable[[str], int]:
    """Return the argparse type for sizes from `low` to `high` bytes."""

    def parse(text: str) -> int:
        try:
            nbytes = int(str(parse_bytes(text)))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not low <= nbytes <= high:
            limits = f"between {format_bytes(low)} and {format_bytes(high)}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {_short(text)}")
        return nbytes

    return parse


def name(text: str) -> str:
    """Return an argument that is the name of a model, after a check. The name is a path or a hub id."""
    try:
        require_possible(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def path(text: str) -> Path:
    return Path(name(text))


def word(text: str) -> str:
    """Return an argument that argparse will compare with the choices of the option, after a check that it is short."""
    if not 0 < len(text) <= 80:
        raise argparse.ArgumentTypeError(f"invalid choice: {quoted(text)}")
    return text


def text(given: str) -> str:
    """Return an argument that is a text, such as a prompt, after a check of its length and encoding."""
    if not given.strip():
        raise argparse.ArgumentTypeError("is empty")
    if len(given) > _TEXT_MAX:
        raise argparse.ArgumentTypeError(f"has {len(given)} characters; at most {_TEXT_MAX} are possible")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{quoted(given)} is not UTF-8") from None
    return given


def steps(text: str) -> tuple[int, int]:
    """Return A and B of an argument 'A:B'. A is the first step and B the last step, both counted from 1."""
    match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not A:B with 1 <= A <= B, such as 2:6")
    return int(match[1]), int(match[2])


def argument(told: str, read: Callable[[str], Any] | None = None, default: Any = None, **more: Any) -> Any:
    """Return a field of a dataclass of options.

    Args:
        told: text of the option in --help.
        read: argparse type of the value, or None for a flag.
        default: default value.
        more: arguments of argparse's add_argument, such as metavar, nargs, choices, required; and for add_arguments and
            require_needed `excludes`, the name of a later field that may not be given together with this one; `needs`,
            the names of other fields of which one must be given; `methods`, the values of --method that use the option
            (names and values are separated by spaces); and `role`, for the caller.
    """
    kind = {"action": "store_true"} if read is None else {"type": read}
    return dataclasses.field(default=False if read is None else default, metadata={"help": told} | kind | more)


def add_arguments(parser: argparse._ActionsContainer, options: type, *, given_only: bool = False) -> None:
    """Add an option for each field of a dataclass to a parser, or to a group of a parser.

    Args:
        parser: the parser or group.
        options: the dataclass.
        given_only: whether an option that is not given gets None instead of the default of its field.
    """
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for each in dataclasses.fields(options):
        told = {key: value for key, value in each.metadata.items() if key not in _FOR_US}
        if "needs" in each.metadata:
            told["help"] += f"; needs {_any_of(each.metadata['needs'].split())}"
        place = exclusive.get(each.name, parser)
        if "excludes" in each.metadata:
            place = exclusive[each.metadata["excludes"]] = parser.add_mutually_exclusive_group()
        place.add_argument(option(each.name), default=None if given_only else each.default, **told)


def options_of(kind: type[Options], found: argparse.Namespace) -> Options:
    """Return the options of a parser's namespace as a dataclass.

    Raises:
        ConfigError: an option would do nothing.
    """
    require_needed(found, kind)
    return kind(**{each.name: getattr(found, each.name) for each in dataclasses.fields(kind)})  # type: ignore[arg-type]


def require_file_place(option: str, place: Path | None) -> None:
    """Check that a file can be written, before the work begins. Devices are accepted, and so are FIFOs with a reader.

    Raises:
        ConfigError: the file cannot be written.
    """
    if place is None:
        return
    there = place.expanduser().absolute()
    new = not os.path.lexists(there)
    try:
        os.close(os.open(there, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666))
        if new:
            there.unlink()
    except OSError as error:
        why = "nobody reads this FIFO" if error.errno == errno.ENXIO else error.strerror
        raise ConfigError(f"{option}: cannot write to {printable(place)}: {why}") from error


def option(name: str) -> str:
    """Return the option of the command line that has the name `name` in a namespace."""
    return f"--{name.replace('_', '-')}"


def require_needed(options: Any, kind: type) -> None:
    """Check that each given option has an effect: the options that it requires are given, and the --method uses it.

    Args:
        options: object with the values.
        kind: dataclass that declares the options.

    Raises:
        ConfigError: an option would do nothing.
    """
    for each in dataclasses.fields(kind):
        if getattr(options, each.name) in (None, False, each.default):
            continue
        needs, methods = (each.metadata.get(name, "").split() for name in ("needs", "methods"))
        if needs and not any(getattr(options, name) for name in needs):
            raise ConfigError(f"{option(each.name)} does nothing without {_any_of(needs)}")
        if methods and options.method not in methods:
            raise ConfigError(f"{option(each.name)} does nothing with --method {options.method}: leave it out")


def _any_of(names: Sequence[str]) -> str:
    return " or ".join(map(option, names))


def _short(text: str) -> str:
    return text if len(text) <= 40 else quoted(text)
