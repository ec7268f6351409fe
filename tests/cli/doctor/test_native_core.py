"""Instruction sets that are chosen or refused, and kernels that have io_uring or not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from infinity import _native
from infinity.cli.doctor.native_core import engine, instruction_set
from infinity.cli.doctor.probes import ProbeFinding
from tests.io.test_disks import write

SECCOMP = "io_uring is not usable: the kernel refuses io_uring: Docker's default seccomp profile blocks it"


class Engine:
    """An engine that the kernel gave, or the threads in its place."""

    def __init__(self, name: str, reason: str, refused: str = "") -> None:
        self.name, self.reason, self._refused = name, reason, refused

    def register_memory(self, memory: Any) -> str:
        return self._refused


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have this engine opened, or this error raised."""

    def give(found: Engine | OSError) -> None:
        def make(wanted: str) -> Engine:
            if isinstance(found, OSError):
                raise found
            return found

        monkeypatch.setattr(_native, "IOEngine", make)

    return give


@pytest.mark.parametrize(
    ("supported", "asked", "state", "mend"),
    [
        (["baseline", "avx2"], "", "ok", ""),
        (["baseline", "avx2"], "baseline", "slower", "unset INFINITY_ISA"),
        (["baseline"], "", "slower", ""),
    ],
)
def test_the_best_instruction_set_is_good(
    supported: list[str], asked: str, state: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "supported_isas", lambda: supported)
    monkeypatch.setattr(_native, "select_isa", lambda: asked or supported[-1])
    monkeypatch.setenv("INFINITY_ISA", asked)
    found = instruction_set()
    assert (found.state, found.mend) == (state, mend)


def test_an_instruction_set_that_is_not_there_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_ISA", "avx1024")
    found = instruction_set()
    assert (found.state, found.mend) == ("missing", "unset INFINITY_ISA")


def test_a_core_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import infinity

    monkeypatch.delattr(infinity, "_native")
    monkeypatch.setitem(__import__("sys").modules, "infinity._native", None)
    found = instruction_set()
    assert found.state == "missing"
    assert "pip install" in found.mend


def test_io_uring_with_registered_buffers_is_good(opened: Any) -> None:
    opened(Engine("io_uring", "the kernel supports it"))
    assert engine("auto") == ProbeFinding("ok", "io_uring: the kernel supports it")


@pytest.mark.parametrize(
    ("files", "reason", "mend"),
    [
        ({"proc/sys/kernel/io_uring_disabled": "2"}, SECCOMP, "echo 0 | sudo tee /proc/sys/kernel/io_uring_disabled"),
        ({".dockerenv": ""}, SECCOMP, "docker run --security-opt seccomp=unconfined …"),
        ({}, SECCOMP, ""),
        ({}, "io_uring is not usable: this kernel has no io_uring", ""),
    ],
)
def test_threads_are_slower_and_the_mend_is_that_of_the_cause(
    files: dict[str, str], reason: str, mend: str, opened: Any, tmp_path: Path
) -> None:
    write(tmp_path, files)
    opened(Engine("threads", reason))
    found = engine("auto", tmp_path)
    assert (found.state, found.mend) == ("slower", mend)
    assert reason in found.finding


def test_a_core_that_was_built_without_liburing_is_built_again(opened: Any, tmp_path: Path) -> None:
    opened(Engine("threads", "io_uring is not usable: built without liburing (install liburing-dev and build again)"))
    assert engine("auto", tmp_path).mend.startswith("sudo apt-get install liburing-dev && ")


def test_threads_that_were_asked_for_are_good(opened: Any) -> None:
    opened(Engine("threads", "asked for"))
    assert engine("threads").state == "ok"


@pytest.mark.parametrize("odd", ["²", "9" * 5000, "-3", "", "0x10", "\0"])
def test_an_odd_file_of_the_system_tells_nothing_and_is_no_error(odd: str, opened: Any, tmp_path: Path) -> None:
    write(tmp_path, {"proc/sys/kernel/io_uring_disabled": odd})
    opened(Engine("threads", SECCOMP))
    assert engine("auto", tmp_path).mend == ""


def test_io_uring_that_is_asked_for_and_refused_is_missing(opened: Any, tmp_path: Path) -> None:
    opened(OSError(errno.EPERM, SECCOMP))
    assert engine("io_uring", tmp_path).state == "missing"


def test_buffers_that_are_not_registered_are_slower(opened: Any) -> None:
    opened(Engine("io_uring", "the kernel supports it", "raise the memlock limit (ulimit -l)"))
    found = engine("auto")
    assert found.state == "slower"
    assert "memlock" in found.finding
