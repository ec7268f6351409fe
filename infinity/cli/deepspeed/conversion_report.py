"""The output of `infinity convert`: the swap config with its comments, and the report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from infinity.cli.deepspeed.config_reader import AUTO, SourceConfig
from infinity.cli.deepspeed.conversion import ConfigConversion, KeyFinding, SwapConfigLine
from infinity.cli.deepspeed.keys import KeyTreatment
from infinity.cli.deepspeed.training import training_of
from infinity.cli.suggested_command import command
from infinity.errors import printable
from infinity.quoting import one_line

PLACEHOLDER = "swap.yaml"
_PLAIN = re.compile(r"(?:~?/)[A-Za-z0-9_./~-]*|[a-z][a-z0-9]*|[0-9]+[KMG]iB")
_NAMED_MAX = 50
"""Maximum number of keys that one part of the report names."""
_NAME_CHARS_MAX = 120
_WORDS = ("yes", "no", "on", "off", "true", "false", "null", "y", "n")


def swap_text(conversion: ConfigConversion, source: SourceConfig) -> str:
    """Return the swap config in YAML.

    A comment in each line names the key of the DeepSpeed config from which the line is made.
    """
    name = shlex.quote(printable(source.accelerate or source.file))
    out = [
        f"# Made by `infinity convert {name}`. Each value is followed by its source.",
        "# Other values are measured or chosen; `infinity run --verbose` prints them.",
    ]
    for section, lines in groupby(conversion.lines, key=lambda line: line.key.rpartition(".")[0]):
        indent = "  " if section else ""
        out += [f"{section}:"] if section else []
        for line in lines:
            out.append(f"{indent}{line.key.rpartition('.')[2]}: {_scalar(line.value)}  # {one_line(line.why)}")
    return "\n".join(out) + "\n"


def values_of(lines: Iterable[SwapConfigLine]) -> dict[str, Any]:
    """Return the swap config as a mapping."""
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


def report(conversion: ConfigConversion, source: SourceConfig, output: Path | None) -> str:
    """Return the report.

    The report begins with the settings that have no counterpart. The settings that need no action, and the command that
    starts the training, are at the end. Settings that became keys of the swap config are named in its comments.
    """
    out: list[str] = []
    for fate in KeyTreatment:
        if fate is KeyTreatment.SCRIPT and conversion.remarks:
            out += ["Notes:", *(f"  {remark}" for remark in conversion.remarks)]
        if fate is not KeyTreatment.MAPPED:
            out += _listed(fate.value, conversion.of(fate))
    return "\n".join([*out, *_how_to_start(source, output)]) + "\n"


def _listed(title: str, findings: Sequence[KeyFinding]) -> list[str]:
    """Return one line for all keys with the same text. If the text is only a reason, each key has its own value."""
    lines: dict[str, list[str]] = {}
    for finding in findings[:_NAMED_MAX]:
        name, short = one_line(finding.shown[: _NAME_CHARS_MAX + 1]), len(finding.shown) <= _NAME_CHARS_MAX
        value, said = _said_of(finding)
        lines.setdefault(said, []).append((name if short else f"{name[:_NAME_CHARS_MAX]}…") + value)
    more = [f"  and {len(findings) - _NAMED_MAX} more"] if len(findings) > _NAMED_MAX else []
    return [f"{title}:", *(f"  {', '.join(names)}{said}" for said, names in lines.items()), *more] if findings else []


def _said_of(finding: KeyFinding) -> tuple[str, str]:
    """Return the text for this key alone, and the text that other keys of the line may share."""
    if finding.fate is KeyTreatment.NOT_NEEDED:
        return "", ""  # the page on DeepSpeed has the reasons
    if finding.fate is KeyTreatment.SCRIPT and finding.value == AUTO:
        return "", f": {finding.says}"
    places = " | ".join(filter(None, (finding.trainer, finding.to)))
    if places:
        return "", f": {finding.value} -> {places}" + (f" ({finding.says})" if finding.says else "")
    return f": {finding.value}", f" - {finding.says}" if finding.says else ""


def _how_to_start(source: SourceConfig, output: Path | None) -> list[str]:
    training, config = training_of(source), str(output or PLACEHOLDER)
    arguments, options = _line(training.arguments), _line(training.options)
    file, accelerate = shlex.quote(printable(source.file)), shlex.quote(printable(source.accelerate))
    before = "torchrun" if source.fsdp else "deepspeed"
    if source.accelerate:
        before = f"accelerate launch --config_file {accelerate}"
    taken = (
        f"Remove `--deepspeed {file}` from ITS ARGUMENTS, and deepspeed= from TrainingArguments in the script."
        if not source.fsdp
        else f"Remove `--fsdp_config {file}` and `--fsdp` from ITS ARGUMENTS, and both from TrainingArguments."
    )
    calls = "wraps its model with FSDP" if source.fsdp else "calls deepspeed.initialize"
    loop = f" with {training.optimizer_call}" if training.optimizer_call else ""
    fixed = (
        "The arguments after ITS ARGUMENTS are Trainer arguments that the config sets. If the script does not read its "
        "command line, set them in its TrainingArguments."
    )
    return [
        "",
        *([taken] if source.file else []),
        "Then start the same training with" if source.file else "Start the same training with",
        f"  {command('run', config, 'train.py')} ITS ARGUMENTS {arguments}".rstrip(),
        f"in place of `{before} train.py ITS ARGUMENTS`.",
        *([fixed] if arguments else []),
        f"A script that {calls} itself becomes a plain loop{loop}: see infinity's page on DeepSpeed.",
        f"Without a script (a causal language model, on text or chats{_to_add(training.options)}):",
        f"  {command('finetune', '--config', config)} --model MODEL --data DATA --output OUT {options}".rstrip(),
    ]


def _to_add(options: Mapping[str, str]) -> str:
    """Return which options of finetune the user has to add, because the config leaves them to the script."""
    left = [name for name in ("--lr", "--warmup-steps", "--dtype") if name not in options]
    return f"; add your own {', '.join(left)}, which this config does not set" if left else ""


def _line(options: Mapping[str, str]) -> str:
    return shlex.join(word for option in options.items() for word in option)
