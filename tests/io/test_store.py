"""The store over several paths: every extent comes back, shares follow the rates, and failing leaves nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity
from infinity import _native
from infinity.errors import ConfigError, SwapCorruptionError, SwapIOError
from infinity.io.directory import SWAP_NAME
from infinity.io.disk_profile import DiskProfile, save_profile
from infinity.io.store import STRIPE_BYTES, SwapStore, shares_of
from tests.conftest import states_of, weights_of
from tests.io.extents import ExtentMap
from tests.models import llama, loss_of


@pytest.fixture
def engine() -> _native.IOEngine:
    return _native.IOEngine()


def measured(rate: float, path: Path) -> DiskProfile:
    return DiskProfile(
        read_rate=rate,
        overwrite_rate=rate,
        mixed_rate=rate,
        block_bytes=1 << 20,
        in_flight_bytes=8 << 20,
        engine="io_uring",
        path=str(path),
        measured="2026-11-21",
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_extents_come_back_from_any_number_of_paths(count: int, tmp_path: Path, engine: _native.IOEngine) -> None:
    extents = ExtentMap()
    placed = [extents.add(f"unit{index}", "weight", (3 * index + 1) * 700_000) for index in range(6)]
    paths = [tmp_path / str(index) for index in range(count)]
    store = SwapStore(paths, extents.nbytes, engine)
    data = []
    for index, extent in enumerate(placed):
        memory = _native.Arena(extent.nbytes).view(0, extent.nbytes)
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(index).integers(0, 256, extent.nbytes, np.uint8)
        data.append(memory)
        store.write(extent, memory).result()
    for extent, memory in zip(placed, data, strict=True):
        back = _native.Arena(extent.nbytes).view(0, extent.nbytes)
        store.read(extent, back).result()
        assert back == memory
    held = [(path / SWAP_NAME).stat().st_size for path in paths]
    assert sum(held) >= extents.nbytes
    assert all(held)
    store.close()
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("rates", "shares"),
    [([1.0], [1]), ([2.0, 2.0], [1, 1]), ([6.0, 2.0], [3, 1]), ([100.0, 0.1], [32, 1]), ([1.0, 2.0, 5.0], [1, 2, 5])],
)
def test_shares_are_small_numbers_in_proportion_to_the_rates(rates: list[float], shares: list[int]) -> None:
    assert shares_of(rates) == shares


def test_unmeasured_disks_are_measured_at_the_start(tmp_path: Path, engine: _native.IOEngine) -> None:
    store = SwapStore([tmp_path / "a", tmp_path / "b"], 8 << 20, engine)
    assert len(store.record.shares) == 2
    moved = engine.counters()["write_bytes_weights"]
    assert moved >= 2 * (64 << 20)
    zeros = _native.Arena(1 << 20).view(0, 1 << 20)
    extent = ExtentMap().add("unit", "weight", 1 << 20)
    store.read(extent, zeros).result()  # what the measurement wrote is gone
    assert not np.frombuffer(zeros, np.uint8).any()
    store.close()


def test_a_profile_spares_the_measurement(tmp_path: Path, engine: _native.IOEngine) -> None:
    save_profile(tmp_path, measured(2e9, tmp_path))
    store = SwapStore([tmp_path / "a", tmp_path / "b"], 8 << 20, engine)
    assert store.record.shares == [1, 1]
    assert engine.counters()["operations"] == 0
    store.close()


def test_damage_names_the_unit_and_the_path_it_is_on(tmp_path: Path, engine: _native.IOEngine) -> None:
    save_profile(tmp_path, measured(2e9, tmp_path))
    paths = [tmp_path / "a", tmp_path / "b"]
    store = SwapStore(paths, 4 * STRIPE_BYTES, engine)
    extent = ExtentMap().add("model.layers.3", "exp_avg", 4 * STRIPE_BYTES)
    with (paths[1] / SWAP_NAME).open("r+b") as raw:
        raw.seek(STRIPE_BYTES + 4096)
        raw.write(b"x")
    back = _native.Arena(extent.nbytes).view(0, extent.nbytes)
    with pytest.raises(SwapCorruptionError, match=r"exp_avg of unit 'model.layers.3'.*differ from the data") as caught:
        store.read(extent, back).result()
    assert (caught.value.path, caught.value.offset) == (str(paths[1] / SWAP_NAME), STRIPE_BYTES + 4096)
    store.close()


def test_checksums_can_be_switched_off(tmp_path: Path, engine: _native.IOEngine) -> None:
    store = SwapStore([tmp_path / "a"], 1 << 20, engine, checksums=False)
    (tmp_path / "a" / SWAP_NAME).write_bytes(b"x" * (1 << 20))
    store.read(ExtentMap().add("unit", "weight", 4096), _native.Arena(4096).view(0, 4096)).result()
    store.close()


def test_one_directory_twice_is_refused(tmp_path: Path, engine: _native.IOEngine) -> None:
    with pytest.raises(ConfigError, match="the same directory"):
        SwapStore([tmp_path / "a", tmp_path / "b" / ".." / "a"], 4096, engine)
    assert list(tmp_path.iterdir()) == []


def test_a_second_path_that_cannot_be_used_leaves_nothing_of_the_first(
    tmp_path: Path, engine: _native.IOEngine
) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="cannot use"):
        SwapStore([tmp_path / "a", tmp_path / "file"], 4096, engine)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_paths_on_a_full_disk_count_together(tmp_path: Path, engine: _native.IOEngine) -> None:
    info = os.statvfs(tmp_path)
    nbytes = (info.f_bavail * info.f_frsize * 2 // 3) // 4096 * 4096 * 2
    save_profile(tmp_path, measured(2e9, tmp_path))
    with pytest.raises(SwapIOError, match="are free") as caught:
        SwapStore([tmp_path / "a", tmp_path / "b"], nbytes, engine)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "a").exists()


def test_training_on_two_paths_ends_in_the_bits_of_one(offload: Any, tmp_path: Path) -> None:
    ends = []
    for paths in (["a"], ["b", "c"]):
        torch.manual_seed(0)
        model, batch = llama()
        nvme = {"paths": [str(tmp_path / path) for path in paths]}
        model = offload(model.bfloat16().train(), nvme=nvme, memory={"device": "500KiB", "host": "64MiB"})
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()
        ends.append(weights_of(model) | states_of(model))
    assert all((ends[1][name] == value).all() for name, value in ends[0].items())
