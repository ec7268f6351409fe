"""What an output says of how to do its run again: the options, the swap config, and the command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from infinity.cli.command import command
from infinity.cli.job import Origin, values_of
from infinity.config import SwapConfig

OPTIONS_NAME = "run.yaml"
CONFIG_NAME = "swap.yaml"
_NOT_AGAIN = ("output", "log_dir")
"""Each run has its own."""


def write_again(options: argparse.Namespace, config: SwapConfig, origin: Origin, directory: Path) -> None:
    """Write the options of a run and its swap config, as `again` names them. Raises OSError."""
    values = {
        name.replace("_", "-"): value
        for name, value in (values_of(options) | {"model": origin.model}).items()
        if value is not None and value is not False and name not in _NOT_AGAIN
    }
    for name, content in ((OPTIONS_NAME, values), (CONFIG_NAME, config.model_dump(mode="json"))):
        # JSON is YAML, and leaves no doubt which words are texts.
        lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in content.items())
        (directory / name).write_text("".join(lines), encoding="utf-8")


def again(options: argparse.Namespace, *, extended: bool) -> str:
    """The command that does the run again, once its output is complete."""
    options_file, config_file = options.output / OPTIONS_NAME, options.output / CONFIG_NAME
    line = command("finetune", "--options", options_file, "--config", config_file, "--output", "DIRECTORY")
    if extended:
        line += " (this run was begun for another number of steps, so its learning rates were others)"
    return line
