"""`infinity run`: an unchanged script of Trainer, TRL, PEFT or Accelerate, with its models offloaded."""

from __future__ import annotations

import argparse
import logging
import sys

from infinity.config import load_config
from infinity.echo import one_line
from infinity.errors import ConfigError, InfinityError


def run(options: argparse.Namespace) -> int:
    """Run the script in this process, as `python SCRIPT ARGS` would; what it raises goes through. The exit code is 2
    where the swap config or the script cannot be used."""
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        config = load_config(options.config)
        if not options.script.is_file():
            raise ConfigError(f"there is no script {options.script}: infinity run CONFIG SCRIPT [ARGS...]")
    except InfinityError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    from infinity.integrations.launcher import launch

    launch(config, options.script, options.arguments)
    return 0
