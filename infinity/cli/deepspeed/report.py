"""What `infinity convert` writes: the swap config with its comments, the report, and the table of docs/deepspeed.md."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from infinity.cli.command import command
from infinity.cli.deepspeed.conversion import Conversion, Finding
from infinity.cli.deepspeed.keys import ACCELERATE_NAMES, KEYS, Effect, Fate, Key
from infinity.cli.deepspeed.placement import Line
from infinity.cli.deepspeed.reading import Source
from infinity.cli.deepspeed.trainer import trainer_arguments
from infinity.cli.deepspeed.training import finetune_options, optimizer_call
from infinity.echo import one_line
from infinity.errors import printable

PLACEHOLDER = "swap.yaml"
_PLAIN = re.compile(r"(?:~?/)[A-Za-z0-9_./~-]*|[a-z][a-z0-9]*|[0-9]+[KMG]iB")
_NAMED_MAX = 50
"""Keys that one part of the report names."""
_NAME_CHARS_MAX = 120
_WORDS = ("yes", "no", "on", "off", "true", "false", "null", "y", "n")


def swap_text(conversion: Conversion, source: Source) -> str:
    """The swap config in YAML: each line with the key that it comes from."""
    name = shlex.quote(printable(source.accelerate or source.file))
    out = [
        f"# Made by `infinity convert {name}`. Each value is followed by what it comes from.",
        "# What is not named here is measured or chosen; `infinity run --verbose` prints it.",
    ]
    for section, lines in groupby(conversion.lines, key=lambda line: line.key.rpartition(".")[0]):
        indent = "  " if section else ""
        out += [f"{section}:"] if section else []
        for line in lines:
            out.append(f"{indent}{line.key.rpartition('.')[2]}: {_scalar(line.value)}  # {one_line(line.why)}")
    return "\n".join(out) + "\n"


def values_of(lines: Iterable[Line]) -> dict[str, Any]:
    """The same as a mapping."""
    values: dict[str, Any] = {}
    for line in lines:
        section, _, name = line.key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[name] = line.value
    return values


def _scalar(value: str | int | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, int) or (_PLAIN.fullmatch(value) and value not in _WORDS):
        return str(value)
    return yaml.safe_dump(value, default_style='"', width=1 << 30, allow_unicode=True).strip()


# -- the report --------------------------------------------------------------------------------------------------------


def report(conversion: Conversion, source: Source, output: Path | None) -> str:
    """What the user is to know: first what is lost, last what needs no thought; and how training is started now."""
    lost, unknown = conversion.of(Fate.NONE), conversion.of(Fate.UNKNOWN)
    out: list[str] = []
    for effect in Effect:
        out += _listed(f"No counterpart, {effect.value}", [each for each in lost if each.effect is effect])
    out += _listed("Unknown keys, of which nothing was made", unknown)
    if conversion.remarks:
        out += ["To know:", *(f"  {remark}" for remark in conversion.remarks)]
    belongs = conversion.of(Fate.SCRIPT)
    out += _listed("Belongs to the training script (TrainingArguments), or to `infinity finetune` (--options)", belongs)
    out += _grouped("Not needed", conversion.of(Fate.NOT_NEEDED))
    out += _grouped("In the swap config", conversion.of(Fate.MAPPED))
    return "\n".join([*out, *_how_to_start(source, output)]) + "\n"


def _listed(title: str, findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    open_ones = [each for each in findings if each.value == "auto" and each.fate is Fate.SCRIPT]
    told = [each for each in findings if each not in open_ones]
    lines = [f"  {_name(each)}: {each.value}{_after(each)}" for each in told[:_NAMED_MAX]]
    lines += [f"  and {len(told) - _NAMED_MAX} more"] if len(told) > _NAMED_MAX else []
    return [f"{title}:", *lines, *(f"  {names}: {says}" for names, says in _groups(open_ones))]


def _after(finding: Finding) -> str:
    """Where it belongs, and what is said of it."""
    places = " | ".join(filter(None, (finding.trainer, finding.to)))
    if not places:
        return f" - {finding.says}" if finding.says else ""
    return f" -> {places}" + (f" ({finding.says})" if finding.says else "")


def _grouped(title: str, findings: Sequence[Finding]) -> list[str]:
    lines = [f"  {names}: {says}" if says else f"  {names}" for names, says in _groups(findings)]
    return [f"{title}:", *lines] if lines else []


def _groups(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """(names, what is said of all of them)."""
    groups: dict[str, list[str]] = {}
    for each in findings:
        said = each.to if each.fate is Fate.MAPPED else each.says
        groups.setdefault(said, []).append(_name(each))
    for said, names in groups.items():
        more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
        yield ", ".join(names[:_NAMED_MAX]) + more, said


def _name(finding: Finding) -> str:
    shown = one_line(finding.shown[: _NAME_CHARS_MAX + 1])
    return shown if len(finding.shown) <= _NAME_CHARS_MAX else f"{shown[:_NAME_CHARS_MAX]}…"


def _how_to_start(source: Source, output: Path | None) -> list[str]:
    config = str(output) if output is not None else PLACEHOLDER
    given = shlex.quote(printable(source.file))
    out = ["", "Start the same training with"]
    arguments = shlex.join(trainer_arguments(source))
    out.append(f"  {command('run', config, 'train.py')} ITS ARGUMENTS {arguments}".rstrip())
    file = shlex.quote(printable(source.accelerate))
    otherwise = "torchrun" if source.fsdp else "deepspeed"
    before = f"accelerate launch --config_file {file}" if source.accelerate else otherwise
    out.append(f"in place of `{before} train.py ITS ARGUMENTS`.")
    if arguments:
        out.append(
            "What follows ITS ARGUMENTS are the arguments of Trainer that the config fixes. They replace "
            "others of the same name; in a script that makes its TrainingArguments itself they belong there."
        )
    if source.file and source.fsdp:
        out.append(
            f"Take `--fsdp_config {given}` and `--fsdp` out of ITS ARGUMENTS, and both out of TrainingArguments."
        )
    elif source.file:
        out.append(
            f"Take `--deepspeed {given}` out of ITS ARGUMENTS, and deepspeed= out of TrainingArguments in the script."
        )
    call = optimizer_call(source)
    loop = f" with {call}" if call else ""
    calls = "wraps its model with FSDP" if source.fsdp else "calls deepspeed.initialize"
    out.append(f"A script that {calls} itself becomes a plain loop{loop}: docs/deepspeed.md.")
    options = shlex.join(finetune_options(source))
    out.append("Without a script (a causal language model, on text or chats):")
    out.append(f"  {command('finetune', '--config', config)} --model MODEL --data DATA --output OUT {options}".rstrip())
    return out


# -- docs/deepspeed.md -------------------------------------------------------------------------------------------------


def key_tables() -> str:
    """The table of keys as Markdown, a part for each fate. docs/deepspeed.md has it between two comments."""
    of_accelerate = {theirs: f"deepspeed_config.{name}" for name, theirs in ACCELERATE_NAMES.items()}
    parts = []
    for fate, title, header in (
        (Fate.MAPPED, "Keys that become keys of the swap config", "key of the swap config | how"),
        (
            Fate.SCRIPT,
            "Keys that belong to the script, or to `infinity finetune`",
            "`infinity finetune` | `TrainingArguments` | what to know",
        ),
        (Fate.NONE, "Keys without a counterpart", "what is lost | what happens instead"),
        (Fate.NOT_NEEDED, "Keys that are not needed", "why"),
    ):
        rows = [f"### {title}", "", f"| DeepSpeed | {header} |", "|---" * (header.count("|") + 2) + "|"]
        keys = [key for key in KEYS.values() if key.fate is fate]
        if fate is Fate.NONE:
            keys.sort(key=lambda key: list(Effect).index(key.effect))
        if fate is Fate.NOT_NEEDED:
            groups: dict[str, list[str]] = {}
            for key in keys:
                groups.setdefault(key.says, []).append(f"`{key.name}`")
            rows += [f"| {', '.join(names)} | {says} |" for says, names in groups.items()]
        else:
            rows += [_row(key, of_accelerate.get(key.name, "")) for key in keys]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _row(key: Key, of_accelerate: str) -> str:
    name = f"`{key.name}`" + (f" (Accelerate: `{of_accelerate}`)" if of_accelerate else "")
    if key.fate is Fate.MAPPED:
        return f"| {name} | {_code(key.to)} | {key.says} |"
    if key.fate is Fate.NONE:
        return f"| {name} | {key.effect.value} | {key.says} |"
    return f"| {name} | {_code(key.to)} | {_code(key.trainer)} | {key.says} |"


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ")) if names else ""
