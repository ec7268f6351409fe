"""Limits of the system: little locked memory, no io_uring, a full disk, a read-only one, one that is gone. Each has its
documented fallback or error."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from tests.conftest import weights_of
from tests.loop_device import mounted, remount_read_only
from tests.models import llama, loss_of
from tests.native.children import REFUSE
from tests.processes import run_script

TRAIN = """
import sys, logging, torch
sys.path.insert(0, {repository!r})
import infinity
from infinity.coordinator import registry
from tests.models import llama, loss_of
import tests.conftest
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
logging.getLogger("infinity").setLevel(logging.INFO)

def train(directory, layers=4, **nvme):
    torch.manual_seed(0)
    model, batch = llama(layers)
    config = dict(weights="nvme", optimizer="nvme", activations="keep", memory=dict(device="64MiB", host="512MiB"))
    config |= dict(commit_every=0, nvme=dict(paths=[directory], **nvme))
    model = infinity.offload(model.bfloat16().train(), config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = loss_of(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
    print("engine", registry.coordinator_of(model).resources.engine.name, "loss", loss.item())
    infinity.close(model)
"""


def run(script: str, *arguments: str) -> tuple[str, str]:
    """Run a script in a process of its own, and return the text that it printed and the text that it logged."""
    repository = str(Path(infinity.__file__).parent.parent)
    code = TRAIN.format(repository=repository) + textwrap.dedent(script)
    child = run_script(code, *arguments)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout, child.stderr


def losses(out: str) -> set[str]:
    return {line.split("loss ")[1] for line in out.splitlines() if "loss " in line}


@pytest.fixture
def anyones() -> Iterator[Path]:
    """A directory for every user. pytest's own are closed to others, again by each run that starts."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(
    ("kib", "layers"), [(64, 4), (2 << 10, 30), pytest.param(8 << 10, 120, marks=pytest.mark.long)]
)
def test_little_locked_memory_costs_one_warning_and_no_bit(kib: int, layers: int, anyones: Path) -> None:
    out, log = run(
        f"""
        import os, resource
        train(sys.argv[1] + "/root", {layers})
        resource.setrlimit(resource.RLIMIT_MEMLOCK, ({kib} << 10, {kib} << 10))
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        train(sys.argv[1] + "/nobody", {layers})
        """,
        str(anyones),
    )
    assert out.count("engine io_uring") == 2, out
    assert len(losses(out)) == 1
    warnings = [line for line in log.splitlines() if line.startswith("WARNING") and "io_uring" in line]
    assert len(warnings) == 1, log
    assert "raise the memlock limit" in warnings[0]
    assert "results are the same" in warnings[0]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call's number is x86-64's")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_without_io_uring_threads_do_the_same_and_the_log_says_why(error: int, tmp_path: Path) -> None:
    out, log = run(
        REFUSE
        + textwrap.dedent(
            f"""
            train(sys.argv[1])
            refuse(425, {error})
            train(sys.argv[1])
            try:
                train(sys.argv[1], engine="io_uring")
            except infinity.ConfigError as refusal:
                print("refused", refusal)
            """
        ),
        str(tmp_path / "swap"),
    )
    assert "engine io_uring" in out
    assert "engine threads" in out
    assert len(losses(out)) == 1
    assert "io_uring is not usable" in log
    assert "Set nvme.engine: auto or threads" in out


def test_a_disk_too_small_is_an_error_before_anything_is_moved(tmp_path: Path, swap_config: Any) -> None:
    with mounted(tmp_path, 64 << 20) as disk:
        before = os.statvfs(disk).f_bfree
        model, _ = llama(layers=160)
        weight = next(model.parameters()).clone()
        with pytest.raises(infinity.SwapIOError, match="reserving .* are free.*No space left.*nvme.paths") as caught:
            infinity.offload(model, swap_config(nvme={"paths": [str(disk / "swap")]}))
        assert caught.value.errno == errno.ENOSPC
        assert os.statvfs(disk).f_bfree >= before - 2  # all of it was given back
        assert not (disk / "swap").exists()
        assert (next(model.parameters()) == weight).all()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * (1 << 20))


def test_a_disk_that_others_fill_up_does_not_stop_a_run(tmp_path: Path, swap_config: Any) -> None:
    """Everything a run needs was reserved at the start."""
    with mounted(tmp_path, 64 << 20) as disk:
        model, batch = llama()
        model = infinity.offload(model.train(), swap_config(nvme={"paths": [str(disk / "swap")]}))
        with pytest.raises(OSError, match="No space left"):
            fill(disk / "others")
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()
        assert weights_of(model)
        infinity.close(model)


def test_a_read_only_file_system_is_named(tmp_path: Path, swap_config: Any) -> None:
    with mounted(tmp_path, 64 << 20) as disk:
        remount_read_only(disk)
        model, _ = llama()
        with pytest.raises(infinity.ConfigError, match=r"cannot use .*swap: Read-only file system"):
            infinity.offload(model, swap_config(nvme={"paths": [str(disk / "swap")]}))


def test_a_directory_that_is_removed_does_not_stop_a_run(tmp_path: Path, offload: Any) -> None:
    """The open file stays: the run ends well, and closing finds nothing left to remove."""
    model, batch = llama()
    model = offload(model.train(), nvme={"paths": [str(tmp_path / "swap")]})
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, batch).backward()
    shutil.rmtree(tmp_path / "swap")
    optim.step()
    assert weights_of(model)
    infinity.close(model)
    assert not (tmp_path / "swap").exists()
