"""Mutations of small files. Some value in a document is changed, but every checksum is valid."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.io import document

NUMBERS: list[Any] = [
    0, -1, 1, 2, 255, 4096, 4095, 1 << 31, 1 << 48, 1 << 60, 1 << 63, 1 << 64, 10**400, 0.5, -0.0, 1e-320, 1e308,
    float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
TEXTS: list[Any] = [
    "", "x", "1", "nan", "a/b", "../x", "..", "/", "/dev/zero", "\0", "\x1b[2J\x1b]0;title\x07", "\u202eabc", "\ud800",
    "x" * 10_000, "__metadata__", "weight", "exp_avg", "float32", "bfloat16", "split16", "int8", "{}", "[" * 10_000,
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, b"", bytes(4096), [], {}, (), [[]], [None] * 1000, (1, 2), {1: 2}, {"$": 1}, {"": None},
    torch.zeros(3), torch.zeros(0, 1 << 40), torch.zeros(2, 2, dtype=torch.int8), torch.float16,
    torch.device("cuda:99"), np.arange(4), np.float64("nan"), np.uint32(7), np.zeros((0, 3)),
]  # fmt: skip
JSON_VALUES = [*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], [None] * 1000, {"": None}]
MANY = 1_000_000


def mutated(value: Any, draw: random.Random, values: list[Any] | None = None) -> Any:
    """Return `value` with one to three changes; the original is modified."""
    holder = [value]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _change(holder, draw, values or [*NUMBERS, *TEXTS, *OTHERS])
    return holder[0]


def _change(holder: Any, draw: random.Random, values: list[Any]) -> None:
    """Walk down to a random place of the document, and change the value at this place."""
    at: Any = 0
    while True:
        below = holder[at]
        if not isinstance(below, dict | list) or not below or draw.random() < 0.08:
            break
        holder, at = below, draw.choice(list(below) if isinstance(below, dict) else range(len(below)))
    old = holder[at]
    acts = [lambda: _set(holder, at, deepcopy(draw.choice(values)))] * 3  # a copy, because it may be changed later
    if isinstance(old, bool) or old is None:
        acts.append(lambda: _set(holder, at, not old))
    elif isinstance(old, int | float):
        acts += [lambda: _set(holder, at, draw.choice([old + 1, old - 1, -old, old * 2, str(old), [old]]))] * 3
    elif isinstance(old, str):
        acts += [lambda: _set(holder, at, draw.choice([old + "\x1b[2J", old[:-1], old.upper(), [old], {old: old}]))]
        if old.startswith("{"):
            acts += [lambda: _set(holder, at, _of_json(old, draw))] * 8
    elif isinstance(old, list) and old:
        many = MANY // len(old) if draw.random() < 0.1 else 3
        acts += [lambda: _set(holder, at, draw.choice([old[:-1], old[1:], old[::-1], old + old[-1:], old * many]))] * 2
    elif isinstance(old, dict) and old:
        acts += [lambda: old.pop(draw.choice(list(old))), lambda: _rename(old, draw)]
    elif isinstance(old, torch.Tensor) and old.numel():
        acts += [lambda: _set(holder, at, draw.choice([old.double(), old.flatten()[:-1], old.unsqueeze(0)]))]
    elif isinstance(old, bytes) and old:
        acts += [lambda: _set(holder, at, draw.choice([old[:-1], old + b"\0", old[::-1], bytes(len(old))]))]
    elif isinstance(old, tuple) and old:
        acts += [
            lambda: _set(
                holder, at, draw.choice([old[:-1], list(old), old * 2, (deepcopy(draw.choice(values)), *old[1:])])
            )
        ]
    if isinstance(holder, dict) and draw.random() < 0.1:
        acts = [lambda: holder.pop(at)]
    draw.choice(acts)()


def _set(holder: Any, at: Any, value: Any) -> None:
    holder[at] = value


def _rename(value: dict[Any, Any], draw: random.Random) -> None:
    value[draw.choice(["", "x", "\x1b[2J", "lr", "weight"])] = value.pop(draw.choice(list(value)))


def _of_json(text: str, draw: random.Random) -> str:
    try:
        return json.dumps(mutated(json.loads(text), draw, JSON_VALUES))
    except (ValueError, RecursionError):
        return text


def forged(kind: str, version: int, value: Any, draw: random.Random) -> bytes:
    """Return the document, sometimes with another change in its text; the checksum is valid."""
    encoder = document._ValueEncoder()
    text = bytearray(encoder.dump(value).encode())
    if draw.random() < 0.15:
        _spoil(text, draw)
    data = b"".join(encoder.blobs)
    if draw.random() < 0.03:
        data = data[:-1]
    digest = document._digest(version, bytes(text), data)
    return document._header(kind, version, len(text), len(data), digest) + bytes(text) + data


def _spoil(text: bytearray, draw: random.Random) -> None:
    numbers = [at for at in range(len(text)) if text[at : at + 1].isdigit()]
    at = draw.choice(numbers) if numbers and draw.random() < 0.8 else draw.randrange(len(text))
    new = [b"1e999", b"9" * 5000, b"NaN", b"-1", b"{", b"[" * 50_000, b"\xff", b'"\\ud800"', b"1.0", b"null", b"", b"7"]
    text[at : at + 1] = draw.choice(new)


def mutate_document(path: Path, kind: str, version: int, draw: random.Random) -> None:
    value = document.read(path, kind, version)
    path.write_bytes(forged(kind, version, mutated(value, draw), draw))


def mutate_json(path: Path, draw: random.Random) -> None:
    text = json.dumps(mutated(json.loads(path.read_bytes()), draw, JSON_VALUES))
    if draw.random() < 0.15:
        data = bytearray(text.encode())
        _spoil(data, draw)
        path.write_bytes(data)
    else:
        path.write_text(text)


def mutate_tensors(path: Path, draw: random.Random) -> None:
    """Mutate the header of a safetensors file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(mutated(json.loads(data[8:end]), draw, JSON_VALUES)).encode()
    length = draw.choice([len(text)] * 8 + [0, len(text) + 1, 1 << 40, (1 << 64) - 1])
    path.write_bytes(length.to_bytes(8, "little") + text + data[end:])
