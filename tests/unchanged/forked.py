"""Scripts in processes that are forked from a process that has imported the libraries (tests/processes.py).

The scripts run as with `python script`, `python -m infinity.run` or torchrun, but without the seconds for importing
torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from tests.processes import server


class ForkedScript:
    """Counterpart of subprocess.Popen for a command that runs in one process, or on several ranks.

    Attributes:
        returncode: None while a process runs. Otherwise the exit code of the first process that failed; 0 if no process
            failed.
    """

    def __init__(self, command: list[str], environment: dict[str, str], cwd: Path, log: Path, ranks: int) -> None:
        self.returncode: int | None = None
        self._store = None
        if ranks > 1:  # torchrun's agent hosts the store
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment = environment | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
        self._processes = []
        for rank in range(ranks):
            mine = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            process = server().Process(target=_call, args=(command, mine, str(cwd), str(log)), daemon=True)
            process.start()
            self._processes.append(process)

    @property
    def victim(self) -> int:
        """The process to kill: with several ranks, the process of the last rank."""
        pid = self._processes[-1].pid
        assert pid is not None
        return pid

    def poll(self) -> int | None:
        codes = [each.exitcode for each in self._processes]
        failed = [code for code in codes if code]
        if failed:
            self._end_others()
            self.returncode = failed[0]
        elif None not in codes:
            self.returncode = 0
        return self.returncode

    def _end_others(self) -> None:
        """End the other processes, like torchrun."""
        for each in self._processes:
            if each.is_alive():
                each.terminate()
                each.join(30)
                each.kill()

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 0)
        while self.poll() is None:
            left = None if timeout is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a forked script", timeout or 0)
            wait([each.sentinel for each in self._processes if each.exitcode is None], left)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        for each in self._processes:
            each.kill()
            each.join()
        self.poll()


def _call(command: list[str], environment: dict[str, str], cwd: str, log: str) -> None:
    """Run a command in the new process. `command` has the arguments of `python`."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    tempfile.tempdir = None
    logging.getLogger("infinity").setLevel(logging.NOTSET)  # the server has imported tests/conftest.py
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _cache_in(Path(environment["HF_HOME"]))
    if command[:2] == ["-m", "infinity.run"]:
        from infinity.cli.main import main

        sys.exit(main(["run", *command[2:]]))
    sys.argv = command
    with contextlib.suppress(ValueError):
        sys.path.remove("")
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _cache_in(home: Path) -> None:
    """Set the cache directory and offline mode of the libraries, which HF_HOME and HF_HUB_OFFLINE would set if the
    libraries were not imported yet.
    """
    import datasets
    import huggingface_hub.constants

    datasets.config.HF_DATASETS_CACHE = home / "datasets"
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
