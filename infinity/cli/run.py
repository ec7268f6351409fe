"""`infinity run`: an unchanged script of Trainer, TRL, PEFT, Accelerate or Lightning, with its models offloaded."""

from __future__ import annotations

import argparse
import logging
import sys

from infinity.config import load_config
from infinity.echo import one_line
from infinity.errors import ConfigError, InfinityError
from infinity.runtime.pins import generation_of


def run(options: argparse.Namespace) -> int:
    """Run the script in this process, as `python SCRIPT ARGS` would; what it raises goes through. The exit code is 2
    where the swap config, the script or the checkpoint folder cannot be used."""
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        if options.config.suffix == ".py":
            raise ConfigError(f"{options.config} is a script: the swap config comes first, infinity run CONFIG SCRIPT")
        config = load_config(options.config)
        if options.resume is not None:
            generation_of(options.resume, config)
        if not options.script.is_file():
            raise ConfigError(f"there is no script {options.script}: infinity run CONFIG SCRIPT [ARGS...]")
    except InfinityError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    from infinity.integrations.launcher import launch

    launch(config, options.script, options.arguments, options.resume)
    return 0
