"""`infinity doctor`: check whether this machine is ready, and print a report.

The command writes nothing but a small file in each swap directory, and removes the file immediately.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from infinity import __version__, files
from infinity.cli.doctor import installed_packages, machine, memory, native_core
from infinity.cli.doctor.disks import disk
from infinity.cli.doctor.doctor_report import is_ready, ordered, to_issue, to_json, to_text
from infinity.cli.doctor.probes import Probe, ProbeFinding, ProbeGroup
from infinity.cli.doctor.subprocess_probes import ends, look
from infinity.cli.doctor.with_torch import with_torch
from infinity.config import SwapConfig, load_config
from infinity.errors import ConfigError, InfinityError, printable
from infinity.files import require_different

_PLAIN_WIDTH = 120
_LIMIT_S = 20


def doctor(options: argparse.Namespace) -> int:
    """Print the report. Return the exit code: 1 if something that a run needs is missing.

    Raises:
        ConfigError: the swap config cannot be used, or a directory is named twice.
        InfinityError: a directory does not respond, for example because its server cannot be reached.
    """
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        if not ends(lambda: _paths(options), _LIMIT_S):
            raise InfinityError(
                f"a swap directory, or the swap config, does not respond within {_LIMIT_S} s: are its disk and its "
                "server reachable? `findmnt` lists mounted file systems."
            )
        config, paths = _paths(options)
        rows = ordered(look(groups(config, paths, given=options.config is not None)))
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(_report(rows, paths or [Path(".")], options))
    return 0 if is_ready(rows) else 1


def _paths(options: argparse.Namespace) -> tuple[SwapConfig, list[Path]]:
    """Return the swap config and the swap directories.

    Raise ConfigError if the swap config is invalid or a directory is named twice.
    """
    config = load_config(options.config)
    paths = [*config.nvme.paths, *options.swap_dir]
    try:
        require_different(paths)
        for path in paths:
            files.nearest(path)
    except ValueError as error:
        raise ConfigError(f"--swap-dir: {error}") from None
    except OSError as error:
        raise ConfigError(f"--swap-dir: {printable(error.filename)}: {error.strerror}") from None
    return config, paths


def groups(config: SwapConfig, paths: Sequence[Path], *, given: bool) -> list[ProbeGroup]:
    """Return the groups of probes to run. Each group runs in one process.

    Args:
        config: the swap config.
        paths: the swap directories.
        given: whether the user gave a swap config. If the user gave neither a swap config nor paths, the current
            directory is checked.
    """
    if not paths and not given:
        paths = [Path(".")]
    there = [files.nearest(path) for path in paths]
    without = Probe("disk", "nvme.paths", lambda: _without_paths(config))
    disks = [disk(path) for path in paths] or [ProbeGroup([without], _LIMIT_S)]
    return [
        ProbeGroup.of(
            "versions",
            {
                "system": installed_packages.system,
                "infinity": installed_packages.infinity_version,
                "import infinity": installed_packages.imported,
                "required": installed_packages.required,
                "optional": installed_packages.optional,
            },
        ),
        ProbeGroup.of(
            "native core",
            {
                "instruction set": native_core.instruction_set,
                "I/O engine": lambda: native_core.engine(config.nvme.engine),
            },
        ),
        ProbeGroup.of("memory", {"RAM": lambda: memory.ram(config), "huge pages": memory.huge_pages}),
        ProbeGroup.of(
            "container",
            {
                "container": machine.container,
                "/dev/shm": machine.shared,
                "memory of ranks": machine.shared_memory,
                "I/O limit": machine.io_limit,
            },
        ),
        with_torch(config),
        *disks,
        ProbeGroup.of("NUMA", {"nodes": lambda: machine.numa(there)}),
    ]


def _without_paths(config: SwapConfig) -> ProbeFinding:
    from infinity.plan.planner import require_paths

    try:
        require_paths(config)
    except ConfigError as error:
        return ProbeFinding("missing", str(error))
    return ProbeFinding("ok", "the swap config names no directory, and its states do not use a disk")


def _report(rows: Sequence[ProbeFinding], paths: Sequence[Path], options: argparse.Namespace) -> str:
    if options.json:
        return json.dumps(to_json(rows, __version__), indent=2)
    if options.report:
        return to_issue(rows, paths, __version__, _PLAIN_WIDTH)
    width = shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns if sys.stdout.isatty() else _PLAIN_WIDTH
    return to_text(rows, width)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
