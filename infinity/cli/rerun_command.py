"""The files in an output directory with which a user can repeat the run, and the command that repeats it.

The files are the options and the swap config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.job import RunOrigin, values_of
from infinity.cli.options import FROZEN_NAMES
from infinity.cli.suggested_command import command
from infinity.config import SwapConfig
from infinity.files import read_regular
from infinity.strict_parsers import parse_yaml

OPTIONS_NAME = "run.yaml"
CONFIG_NAME = "swap.yaml"
_FILE_BYTES_MAX = 1 << 20
_NOT_AGAIN = ("output",)
"""Options that are not written to the files, because each run has its own value."""


def write_rerun_command(options: FinetuneOptions, config: SwapConfig, origin: RunOrigin, directory: Path) -> None:
    """Write the options of a run and its swap config to the files that the command of `rerun_command` names.

    Raises:
        OSError: the files cannot be written.
    """
    of_trainer = {name: each[0] if len(each) == 1 else each or True for name, each in (options.trainer or {}).items()}
    values = {
        name.replace("_", "-"): value
        for name, value in (values_of(options) | {"model": origin.model, "trainer": None} | of_trainer).items()
        if value is not None and value is not False and name not in _NOT_AGAIN
    }
    for name, content in ((OPTIONS_NAME, values), (CONFIG_NAME, config.model_dump(mode="json"))):
        # JSON is also YAML, and quotes in JSON make clear which values are strings.
        lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in content.items())
        (directory / name).write_text("".join(lines), encoding="utf-8")


def rerun_command(options: FinetuneOptions, *, extended: bool) -> str:
    """Return the command that repeats the run. The command works when the output is complete.

    Args:
        options: options of the run.
        extended: whether the run's number of steps has changed since its beginning. If it has, the text says so.
    """
    options_file, config_file = options.output / OPTIONS_NAME, options.output / CONFIG_NAME
    line = command("finetune", "--options", options_file, "--config", config_file, "--output", "DIRECTORY")
    if extended:
        line += " (this run was started for another number of steps, so its learning rates were different)"
    return line


def form_of(directory: Path) -> tuple[str, Path] | None:
    """Return the form of the frozen weights in the run of an output, and the file that names this form.

    Args:
        directory: the output.

    Returns:
        None if no file names a form. This is the case if another program or an older version wrote the output, or if
        the run kept the weights in the form of the checkpoint.
    """
    for file in (directory / OPTIONS_NAME, directory / CONFIG_NAME):
        try:
            values: Any = parse_yaml(read_regular(file, _FILE_BYTES_MAX).decode())
        except (OSError, ValueError):
            continue  # the form is only a default, so errors are ignored
        form = values.get("frozen") if isinstance(values, dict) else None
        if form in FROZEN_NAMES:
            return str(form), file
    return None
