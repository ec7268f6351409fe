"""`infinity convert`: turns a DeepSpeed config into a swap config, and names the keys that have no counterpart."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from infinity.cli.deepspeed.config_reader import read
from infinity.cli.deepspeed.conversion import convert as converted
from infinity.cli.deepspeed.conversion_report import report, swap_text, values_of
from infinity.config import load_config
from infinity.errors import ConfigError, printable
from infinity.files import replacing, require_replaceable
from infinity.strict_parsers import parse_yaml


def convert(options: argparse.Namespace) -> None:
    """Print the swap config to stdout and the report to stderr. With --output, write the swap config and print the
    report.

    Raises:
        ConfigError: the input is not a DeepSpeed config; a key of the swap config depends on an invalid value of the
            input; or the output exists already or cannot be written.
    """
    output: Path | None = options.output
    if options.force and output is None:
        raise ConfigError("--force does nothing without --output")
    if output is not None and os.path.lexists(output.expanduser()) and not options.force:
        raise ConfigError(f"--output: {printable(output)} exists already; give --force to replace it")
    source = read(options.input)
    conversion = converted(source)
    text = swap_text(conversion, source)
    # the values are checked and not the written file, so that an error names the values
    load_config(values_of(conversion.lines))
    if load_config(parse_yaml(text)) != load_config(values_of(conversion.lines)):
        raise AssertionError(f"the written swap config does not have the converted values:\n{text}")
    said = report(conversion, source, output)
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        sys.stderr.write(f"\n{said}")
        return
    _write(output.expanduser(), text, replace=options.force)
    print(f"{printable(output)} was written.\n\n{said}", end="")


def _write(path: Path, text: str, *, replace: bool) -> None:
    """Write a file.

    Args:
        path: the file.
        text: its content.
        replace: whether an existing file is replaced.

    Raises:
        ConfigError: the file exists and `replace` is False, or the file cannot be written.
    """
    try:
        if replace:
            require_replaceable(path)
            with replacing(path) as file:
                file.write(text)
        else:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {printable(path)}: {error.strerror}") from error
