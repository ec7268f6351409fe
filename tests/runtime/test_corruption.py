"""Whatever is changed in a swap directory is found and named, and with keep: 2 the run goes on from the generation
before, or, where only the header is damaged, from the newest one.

INFINITY_CORRUPTIONS is how many cases are made (make crash-test: 1,000); a failure prints its seed.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.checkpoint.generation import open_stores
from infinity.errors import ResumeError
from infinity.io.directory import HEADER_NAME, SWAP_NAME, generations_in
from infinity.io.generation_scan import extents_of
from infinity.io.manifest import ExtentRecord, Manifest, read_manifest
from tests import sampling
from tests.conftest import weights_of

CASES = sampling.number(22, 1000, "INFINITY_CORRUPTIONS")  # at least two of each kind
STEPS = 5
WIDTH = 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net().bfloat16()


def train(net: nn.Module, optim: Any, first: int, end: int) -> None:
    for step in range(first, end):
        net(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()).backward()
        optim.step()
        optim.zero_grad()


@dataclass
class Store:
    """A swap directory with the generations 4 and 5, and the swap file as it was after each step."""

    directory: Path
    config: dict[str, Any]
    history: list[bytes]
    newest: Manifest
    weights: dict[int, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    directory = tmp_path_factory.mktemp("corruption") / "swap"
    config: dict[str, Any] = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "1MiB", "host": "64MiB"},
        "nvme": {"paths": [str(directory)], "engine": "threads"},
        "update": {"tile": "16KiB", "threads": 1},
        "commit_every": 1,
        "keep": 2,
    }
    history, weights = [], {}
    net = infinity.offload(build(), config)
    optim = infinity.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        train(net, optim, step, step + 1)
        infinity.commit(net)
        history.append((directory / SWAP_NAME).read_bytes())
        weights[step + 1] = weights_of(net)
    infinity.close(net)
    newest = read_manifest(generations_in(directory)[STEPS])
    return Store(directory, config, history, newest, weights)


def _written(manifest: Manifest, rng: random.Random, swap: bytes) -> ExtentRecord:
    """Return an extent of the newest generation that contains data."""
    return rng.choice([e for e in manifest.extents if any(swap[e.offset : e.offset + e.nbytes])])


def _flip_bit(data: bytearray, begin: int, end: int, rng: random.Random) -> None:
    data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)


def _overwrite(length: int) -> Callable[[bytearray, int, int, random.Random], None]:
    def change(data: bytearray, begin: int, end: int, rng: random.Random) -> None:
        size = min(length, end - begin)
        at = begin + rng.randrange(0, end - begin - size + 1)
        data[at : at + size] = rng.randbytes(size)

    return change


BLOCKS = {"1 bit": _flip_bit, "512 B": _overwrite(512), "4 KiB": _overwrite(4096)}
KINDS = [*(f"{kind} in data" for kind in BLOCKS), "stale extent", "swapped extents"] + [
    f"{kind} in {place}" for place in ("manifest", "header") for kind in (*BLOCKS, "cut")
]


def damage(store: Store, directory: Path, kind: str, rng: random.Random) -> list[ExtentRecord]:
    """Change a copy of the store; returns the extents that are not as written."""
    swap = bytearray(store.history[-1])
    touched: list[ExtentRecord] = []
    if kind == "stale extent":
        old = store.history[-4]  # what was in the same copy three steps, its turn, before
        stale = [e for e in store.newest.extents if old[e.offset : e.offset + e.nbytes] != _of(swap, e)]
        touched = [rng.choice(stale)]
        swap[touched[0].offset : touched[0].offset + touched[0].nbytes] = _of(old, touched[0])
    elif kind == "swapped extents":
        one = _written(store.newest, rng, bytes(swap))
        same = [e for e in store.newest.extents if e.nbytes == one.nbytes and _of(swap, e) != _of(swap, one)]
        other = rng.choice(same)
        mine, others = _of(swap, one), _of(swap, other)
        swap[one.offset : one.offset + one.nbytes] = others
        swap[other.offset : other.offset + other.nbytes] = mine
        touched = [one, other]
    elif kind.endswith("in data"):
        touched = [_written(store.newest, rng, bytes(swap))]
        extent, before = touched[0], bytes(swap)
        while bytes(swap) == before:
            BLOCKS[kind.removesuffix(" in data")](swap, extent.offset, extent.offset + extent.nbytes, rng)
    else:
        path = directory / HEADER_NAME if kind.endswith("header") else generations_in(directory)[STEPS]
        data = bytearray(path.read_bytes())
        if kind.startswith("cut"):
            del data[rng.randrange(len(data)) :]
        else:
            BLOCKS[kind.rsplit(" in ", 1)[0]](data, 0, len(data), rng)
        path.write_bytes(data)
    (directory / SWAP_NAME).write_bytes(swap)
    return touched


def _of(swap: bytes | bytearray, extent: ExtentRecord) -> bytes:
    return bytes(swap[extent.offset : extent.offset + extent.nbytes])


def test_every_corruption_is_found_and_named_and_the_generation_before_is_taken(
    store: Store, tmp_path: Path, caplog: Any
) -> None:
    from infinity import _native
    from infinity.io.generation_scan import verify

    memory = _native.Arena(1 << 20).view(0, 1 << 20)
    found: Counter[str] = Counter()
    for seed in range(sampling.SEED, sampling.SEED + CASES):
        rng = random.Random(seed)
        kind, directory = KINDS[seed % len(KINDS)], tmp_path / "copy"
        shutil.copytree(store.directory, directory)
        where = f"seed {seed}: {kind}"
        touched = damage(store, directory, kind, rng)
        config = store.config | {"nvme": store.config["nvme"] | {"paths": [str(directory)]}}
        if kind.endswith("header"):
            _same_header(store, config, where, caplog)
            found[kind] += 1
            shutil.rmtree(directory)
            continue
        if touched:
            with open_stores([directory]) as (files,):
                named = list(verify(files, extents_of(store.newest), store.newest, memory))
            assert {(d.extent.unit, d.extent.group, d.extent.state) for d in named} == {
                (e.unit, e.group, e.state) for e in touched
            }, where
            for each in named:
                damaged = each.extent.unit, each.extent.group, each.extent.state
                extent = next(e for e in touched if (e.unit, e.group, e.state) == damaged)
                assert extent.offset <= each.offset < extent.offset + extent.nbytes, where
                assert each.path == str(directory / SWAP_NAME), where
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="infinity"):
            _fallback(store, config, where)
        said = caplog.text
        assert f"generation {STEPS} cannot be used" in said, where
        assert all(f"{e.state} of unit '{e.unit}'" in said for e in touched), where
        found[kind] += 1
        shutil.rmtree(directory)
    print(
        f"\n  {sum(found.values())} corruptions, all found and named: "
        + ", ".join(f"{n} {k}" for k, n in found.items())
    )


def _same_header(store: Store, config: dict[str, Any], where: str, caplog: Any) -> None:
    """Check that the run continues from its newest generation, and that the header is restored."""
    header = Path(config["nvme"]["paths"][0]) / HEADER_NAME
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="infinity"):
        net = infinity.resume(build(), config)
    infinity.AdamW(net.parameters(), lr=1e-2)
    assert infinity.track(model=net) == STEPS, where
    assert all(torch.equal(value, store.weights[STEPS][name]) for name, value in weights_of(net).items()), where
    infinity.close(net)
    assert header.read_bytes() == (store.directory / HEADER_NAME).read_bytes(), where
    said = [line for line in caplog.messages if HEADER_NAME in line]
    assert len(said) == 1, where
    assert said[0].endswith(f"rebuilt from generation {STEPS}"), where


def _fallback(store: Store, config: dict[str, Any], where: str) -> None:
    """Check that the run continues from the previous generation, with its weights."""
    net = infinity.resume(build(), config)
    optim = infinity.AdamW(net.parameters(), lr=1e-2)
    assert infinity.track(model=net) == STEPS - 1, where
    assert all(torch.equal(value, store.weights[STEPS - 1][name]) for name, value in weights_of(net).items()), where
    train(net, optim, STEPS - 1, STEPS)
    assert all(torch.equal(value, store.weights[STEPS][name]) for name, value in weights_of(net).items()), where
    infinity.close(net)


def test_without_an_older_generation_the_damage_is_what_the_error_says(store: Store, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(store.directory, directory)
    generations_in(directory)[STEPS - 1].unlink()
    touched = damage(store, directory, "1 bit in data", random.Random(0))
    config = store.config | {"nvme": store.config["nvme"] | {"paths": [str(directory)]}}
    with pytest.raises(ResumeError, match=f"{touched[0].state} of unit '{touched[0].unit}'.*checksum"):
        infinity.resume(build(), config)
    assert sorted(os.listdir(directory)) == sorted({*os.listdir(directory), SWAP_NAME, HEADER_NAME}), "nothing is lost"


def test_a_swap_file_that_was_cut_is_named(store: Store, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(store.directory, directory)
    os.truncate(directory / SWAP_NAME, 8192)
    config = store.config | {"nvme": store.config["nvme"] | {"paths": [str(directory)]}}
    with pytest.raises(ResumeError, match="was truncated: it has 8192 of"):
        infinity.resume(build(), config)
