"""Swap configs, mutated and made up: each is a plan for a model, or an error in a few words."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import SwapConfig, _known_keys
from infinity.errors import InfinityError, SwapTimeoutError
from tests.hostile.limits import failures
from tests.sampling import number, seed

CASES = number(24, 1000, "INFINITY_HOSTILE")
_PARTS = 4

LARGE_MEMORY = b"keep: 2\nactivations: nvme\nmoments: bf16\nnvme: {paths: swap}\nupdate: {threads: 1000}"
"""Config with the default memory.host, of which activations: nvme takes up to 2 GiB."""
WHOLE = """\
weights: nvme
optimizer: nvme
gradients: host
activations: recompute
memory: {device: 64MiB, host: 512MiB}
nvme:
  paths: [swap]
  engine: auto
  block: 1MiB
  in_flight: 32MiB
  queue_depth: 32
  deadline_s: 300
  checksums: true
update: {tile: 1MiB, threads: 2}
overlap: auto
commit_every: 1
keep: 1
master: split16
moments: fp32
"""
KEYS = _known_keys(SwapConfig)
WORDS = ["device", "host", "nvme", "auto", "keep", "recompute", "during_backward", "before_forward", "off"]
WORDS += ["split16", "fp32", "bf16", "int8", "none"]
VALUES = [
    *WORDS, "on", "yes", "~", "", "''", "0", "-1", "1", "2", "010", "0x10", "0o17", "1_000", "12:30:00", "1e3", "1e400",
    ".inf", "-.inf", ".nan", "nan", "true", "False", "2026-11-22", "9" * 20, "9" * 400, "9" * 5000, "1.5", "4096",
    "4095", "1B", "0.1B", "1KiB", "1MiB", "7MiB", "1GiB", "100GiB", "1000000TiB", "9" * 400 + "GiB", "-1MiB", "1 MiB",
    "1mib", "٣MiB", "[]", "{}", "[[[[]]]]", "[1, 2]", "{a: b}", "{device: 1}", "[swap, swap]", "[swap, swap2]",
    "/dev/zero", "/dev/null", "/proc/self", "file", "file/x", "../" * 50 + "tmp/infinity-hostile", "n" * 300,
    "~nobody.here/x",
    '"\\0"', '"\\ud800"', '"\\e[2J"', "!!python/object/apply:os.system [true]", "!!binary aGk=", "&a 1", "*a", "? x",
    "|\n  x", "%TAG", "x" * 3000, "null",
]  # fmt: skip
LINES = [
    "weights: host", "? [a]\n: b", "<<: {weights: host}", "a: &a [x, x]\nb: *a", "zzz: 1", "nvme: {queue_dept: 3}",
    "- a", "---", "...", "%YAML 1.1", "%YAML 9.9", "\t- x", "{", "}", "[" * 3000, "{a: " * 3000, "- " * 3000,
    "? " * 3000, "'", '"', "#" * 3000, "\ufeff", "\x85", "\u2028", "\x1b[31m", "a: b: c", "!!map", "1: 2", "null: null",
    "true: false",
]  # fmt: skip


TIERS = ["device", "host", "nvme", "auto"]
SIZES = ["1", "4095", "4KiB", "40KiB", "100kB", "1MiB", "7MiB", "16MiB", "64MiB", "1GiB", "100GiB", "1TiB", "1024TiB"]
NUMBERS = ["0", "1", "2", "3", "7", "64", "65", "1000", "1024", "1025", "999999999999"]
EDGES = {key: SIZES for key in KEYS if key.rpartition(".")[2] in ("device", "host", "block", "in_flight", "tile")}
EDGES |= {key: NUMBERS for key in KEYS if key.rpartition(".")[2] in ("threads", "queue_depth", "commit_every", "keep")}
EDGES |= {
    "weights": TIERS,
    "optimizer": TIERS,
    "gradients": TIERS,
    "activations": ["auto", "keep", "recompute", "host", "nvme"],
    "nvme.paths": ["swap", "[swap]", "[swap, swap2]", "swap/below", "[swap, swap/below]", "."],
    "nvme.engine": ["auto", "io_uring", "threads"],
    "nvme.deadline_s": ["0.001", "1e-9", "1", "86400", "1e4"],
    "nvme.checksums": ["true", "off"],
    "overlap": ["auto", "during_backward", "before_forward", "off"],
    "master": ["split16", "fp32", "none"],
    "moments": ["fp32", "bf16", "int8"],
}
"""Values that can be meant, near where they stop to be."""


def likely(draw: random.Random) -> bytes:
    """Return a config that names its disks, and some keys with plausible values."""
    chosen = {"nvme.paths": "swap"} | {
        key: draw.choice(EDGES[key]) for key in draw.sample(list(EDGES), draw.randrange(7))
    }
    sections: dict[str, dict[str, str]] = {}
    for key, value in chosen.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    lines = [f"{key}: {value}" for key, value in sections.pop("", {}).items()]
    lines += [f"{name}: {{{', '.join(f'{k}: {v}' for k, v in keys.items())}}}" for name, keys in sections.items()]
    return "\n".join(lines).encode()


def made(draw: random.Random) -> tuple[str, bytes]:
    """(suffix, contents) of a file."""
    kind = draw.choice(["likely", "likely", "likely", "values", "values", "lines", "bytes", "json", "tree", "noise"])
    if kind == "likely":
        return ".yaml", likely(draw)
    if kind == "json":
        return ".json", made_json(draw)
    if kind == "noise":
        text = draw.choice([WHOLE, WHOLE * 100]).encode(draw.choice(["utf-16", "utf-32", "utf-8-sig", "cp500"]))
        return ".yaml", draw.choice([text, draw.randbytes(draw.choice([1, 100, 60_000, 100_000]))])
    if kind == "tree":
        chosen = draw.sample(KEYS, draw.randrange(1, 6))
        return ".yaml", "\n".join(
            f"{key.replace('.', ': {')}: {draw.choice(VALUES)}" + "}" * key.count(".") for key in chosen
        ).encode()
    lines = WHOLE.splitlines()
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(lines))
        if kind == "lines":
            lines.insert(at, draw.choice([*LINES, lines[at]]))
        elif ": " in lines[at]:
            lines[at] = lines[at].rpartition(": ")[0] + ": " + draw.choice(VALUES)
    data = "\n".join(lines).encode()
    if kind == "bytes":
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 6)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        begin = draw.randrange(len(changed))
        data = bytes(draw.choice([changed, changed[:begin], changed[begin:], changed + changed]))
    return ".yaml", data


def made_json(draw: random.Random) -> bytes:
    values = [1, -1, 0, 1.5, True, None, "x" * 3000, 10**30, [], {}, [[[[[]]]]], "1MiB", "swap", "\ud800", "\0", *WORDS]
    tree: dict[str, Any] = {}
    for key in draw.sample(KEYS, draw.randrange(1, 8)):
        section, _, name = key.rpartition(".")
        into = tree.setdefault(section, {}) if section else tree
        if isinstance(into, dict):
            into[name] = draw.choice(values)
    text = json.dumps(tree)
    spoilt = [
        text,
        text,
        text,
        text[:-1],
        text + text,
        text.replace("1", "1" * 400),
        text.replace("1", "NaN"),
        "[" * 60_000,
    ]
    return draw.choice(spoilt).encode()


def check(case: tuple[str, int]) -> None:
    """Read it, and do with it what a run does first and last."""
    directory, number_of = Path(case[0]), case[1]
    os.chdir(directory)
    (directory / "file").touch()
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} {number_of}")
    suffix, data = made(draw) if number_of else (".yaml", LARGE_MEMORY)
    path = directory / f"swap{suffix}"
    path.write_bytes(data)
    model = None
    try:
        config = infinity.load_config(path)
        torch.manual_seed(0)
        model = infinity.offload(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)), config)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        first = train(model, optim)
        assert train(model, optim) != first  # something was learned
    except InfinityError as error:
        said = str(error)
        assert type(error) is not InfinityError or timed_out(error)
        assert 10 < len(said) < 3000, said[:3000]
        assert said.isprintable(), ascii(said)
    finally:
        if model is not None:
            close(model)


def timed_out(error: BaseException | None) -> bool:
    """Whether a device was given up, as configs with a deadline of microseconds ask for; later calls name that."""
    while error is not None and not isinstance(error, SwapTimeoutError):
        error = error.__cause__ or error.__context__
    return error is not None


def close(model: torch.nn.Module) -> None:
    try:
        infinity.close(model)
    except InfinityError as error:
        if not timed_out(error):
            raise


def train(model: torch.nn.Module, optim: Any) -> float:
    loss = model(torch.ones(4, 64)).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return float(loss)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_config_is_a_plan_or_an_error_in_a_few_words(part: int, tmp_path: Path) -> None:
    numbers = range(part, CASES, _PARTS)
    directories = [tmp_path / str(each) for each in numbers]
    for directory in directories:
        directory.mkdir()
    cases = [(str(directory), each) for directory, each in zip(directories, numbers, strict=True)]
    assert failures(check, cases, tmp_path) == []
