"""Facts about processors, read from trees made for the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.base.machine_facts import ProcessorFacts, last_cache_bytes, processor
from tests.io.test_disks import write


def test_a_processor_has_a_name_and_features(tmp_path: Path) -> None:
    assert processor(tmp_path) == ProcessorFacts("", frozenset())
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t: avx2 fma\n"})
    assert processor(tmp_path) == ProcessorFacts("Some CPU", frozenset({"avx2", "fma"}))


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})


def cache(root: Path, cpu: int, index: int, level: int, shared: str, size: str) -> None:
    directory = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    directory.mkdir(parents=True)
    for name, text in (("level", f"{level}"), ("shared_cpu_list", shared), ("size", size)):
        (directory / name).write_text(f"{text}\n")


def test_caches_of_the_last_level_count_once_each(two_cores: None, tmp_path: Path) -> None:
    for cpu in (0, 1, 3):
        cache(tmp_path, cpu, 2, 2, f"{cpu}", "2048K")
        cache(tmp_path, cpu, 3, 3, "0-1" if cpu < 2 else "2-3", "32768K")
    assert last_cache_bytes(tmp_path) == 64 << 20


def test_a_system_that_does_not_tell_has_none(two_cores: None, tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path) == 0
    cache(tmp_path, 0, 3, 3, "0-3", "")
    assert last_cache_bytes(tmp_path) == 0
