"""Malformed files for --data: random files, mutations of good files, and directories with entries that are not files.

A case depends only on a seed and its number.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "runs", "away", "from", "slow", "red", "hen")
_KEYS = ("text", "messages", "role", "content", "from", "value", "conversations", "prompt", "", "\x00", "a" * 300)
_ODD_TEXT = (
    "", " ", "\n", "\x00", "\x1b[2J", "\u202e", "\u200b" * 50, "e\u0301", "\U0001f600", "\ufeff", "\ud800",
    "\udfff\ud800", "<eos>", "<unk>", "{{ messages }}", "{% raw %}", "\\", '"', "\u2028", "\x85", "\x0b", "\x7f",
    "\ue000", "猫", "ﷺ" * 20,
)  # fmt: skip
_ENCODINGS = (
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "latin-1",
    "cp1252",
    "shift-jis",
    "utf-7",
)
_SUFFIXES = (".txt", ".md", "", ".jsonl", ".JSONL", ".ndjson", ".json", ".csv", ".parquet", ".gz", ".bin", ".TXT")
Draw = random.Random


def make(number: int, seed: int, directory: Path) -> tuple[str, list[Path]]:
    """Make case `number`: return its kind, and the paths to pass."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choices([maker for maker, _ in _KINDS], [weight for _, weight in _KINDS])[0]
    return kind.__name__, kind(draw, directory)


def _text(draw: Draw, count: int = 60) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, count))) + draw.choice(("", "\n", "\r\n", "\r"))


def _odd_text(draw: Draw) -> str:
    return "".join(draw.choice((*_ODD_TEXT, _text(draw, 5))) for _ in range(draw.randint(0, 6)))


def _value(draw: Draw, depth: int = 0) -> Any:
    """Return a JSON value of any shape."""
    kind = draw.randrange(10 if depth < 4 else 7)
    if kind < 3:
        return _odd_text(draw)
    if kind < 7:
        return draw.choice([None, True, 0, -1, 10**30, 1.5, float("nan"), float("inf"), "text", _text(draw)])
    items = [_value(draw, depth + 1) for _ in range(draw.randint(0, 4))]
    return items if kind == 7 else {draw.choice(_KEYS): item for item in items}


def _message(draw: Draw) -> Any:
    message: Any = {"role": draw.choice(("user", "assistant", "system", "human", "\x1b")), "content": _text(draw, 6)}
    if draw.random() < 0.3:
        message[draw.choice(_KEYS)] = _value(draw)
    if draw.random() < 0.1:
        del message[draw.choice(list(message))]
    return message if draw.random() < 0.9 else _value(draw)


def _record(draw: Draw) -> Any:
    kind = draw.randrange(4)
    if kind == 0:
        return {"text": _text(draw)}
    if kind == 1:
        return {"messages": [_message(draw) for _ in range(draw.randint(0, 4))]}
    if kind == 2:
        return {draw.choice(_KEYS): _value(draw) for _ in range(draw.randint(0, 3))}
    return _value(draw)


def _lines(draw: Draw) -> bytes:
    odd = draw.choice((0.0, 0.1, 0.5))
    records = [_record(draw) if draw.random() < odd else {"text": _text(draw)} for _ in range(draw.randint(1, 8))]
    line_end = draw.choice(("\n", "\r\n", "\n\n", "\r"))
    return line_end.join(json.dumps(record, ensure_ascii=draw.random() < 0.5) for record in records).encode(
        errors="surrogatepass"
    )


def _mutated(draw: Draw, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at, count = draw.randrange(len(changed) + 1), draw.choice((1, 1, 2, 8, 100))
        match draw.randrange(5):
            case 0:
                del changed[at : at + count]
            case 1:
                changed[at:at] = draw.randbytes(count)
            case 2:
                changed[at:at] = changed[draw.randrange(len(changed) + 1) :][:count]
            case 3 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case _:
                changed[at : at + 1] = draw.choice((b"\x00", b"\xff", b'"', b"{", b"}", b"\\", b"\n", b"\xed\xa0\x80"))
    return bytes(changed)


def _file(draw: Draw, directory: Path, data: bytes, suffix: str) -> list[Path]:
    path = directory / f"data{suffix}"
    path.write_bytes(data)
    return [path]


def mutated_text(draw: Draw, directory: Path) -> list[Path]:
    data = "\n".join(_text(draw) for _ in range(draw.randint(1, 30))).encode()
    return _file(draw, directory, _mutated(draw, data), draw.choice((".txt", ".md", "", *_SUFFIXES)))


def mutated_lines(draw: Draw, directory: Path) -> list[Path]:
    return _file(draw, directory, _mutated(draw, _lines(draw)), ".jsonl")


def lines_of_any_shape(draw: Draw, directory: Path) -> list[Path]:
    return _file(draw, directory, _lines(draw), draw.choice((".jsonl", ".ndjson")))


def odd_text(draw: Draw, directory: Path) -> list[Path]:
    text = "".join(_odd_text(draw) for _ in range(draw.randint(0, 40)))
    return _file(draw, directory, text.encode(errors="surrogatepass"), draw.choice((".txt", "", ".md")))


def other_encodings(draw: Draw, directory: Path) -> list[Path]:
    text = _lines(draw).decode(errors="ignore") if draw.random() < 0.5 else _text(draw) + "café"
    data = text.encode(draw.choice(_ENCODINGS), errors="replace")
    return _file(draw, directory, data, draw.choice(_SUFFIXES))


def noise(draw: Draw, directory: Path) -> list[Path]:
    data = draw.randbytes(draw.choice((0, 1, 3, 100, 5000, 300_000)))
    return _file(draw, directory, data, draw.choice(_SUFFIXES))


def packed(draw: Draw, directory: Path) -> list[Path]:
    return _file(draw, directory, gzip.compress(_lines(draw)), draw.choice((".jsonl.gz", ".gz", ".txt", ".jsonl", "")))


def one_thing_many_times(draw: Draw, directory: Path) -> list[Path]:
    """Write up to 2 MB in which one element is repeated, alone or inside otherwise valid data."""
    thing = draw.choice(
        (b" ", b"\n", b"a", b"[", b"{", b'{"a":', b"\x00", b"\xff", b"\r", b"[[],", b'"', b"\\u0000", b"1")
    )
    many = thing * draw.choice((1000, 70_000, 2_000_000 // len(thing)))
    whole = draw.choice(
        (many, b'{"text": "' + many + b'"}', b'{"text": ' + many, b'{"messages": [' + many, b"the fox\n" + many)
    )
    return _file(draw, directory, whole, draw.choice((".txt", ".jsonl")))


def a_line_without_end(draw: Draw, directory: Path) -> list[Path]:
    """Write a sparse file of a gigabyte, or a line of the largest allowed length that is full of small values."""
    path = directory / draw.choice(("data.jsonl", "data.txt"))
    if draw.random() < 0.7:
        path.write_bytes(b'{"text": "the fox')
        os.truncate(path, 1 << 30)
    else:
        path.write_bytes(b'{"messages": [' + b"{}," * 5_000_000 + b"{}]}")
    return [path]


def a_directory(draw: Draw, directory: Path) -> list[Path]:
    top = directory / "top"
    top.mkdir()
    places = [top]
    for index in range(draw.randint(0, 8)):
        draw.choice(_ENTRIES)(draw, draw.choice(places), index)
        places += [place for place in top.rglob(f"{index}*") if place.is_dir() and not place.is_symlink()]
    return [top] * draw.randint(1, 2)


def no_regular_file(draw: Draw, directory: Path) -> list[Path]:
    draw.choice(_ENTRIES)(draw, directory, 0)
    return [*directory.iterdir(), *draw.choices([directory / "nowhere", directory / ("x" * 300)], k=draw.randint(0, 1))]


def _put_file(draw: Draw, at: Path, index: int) -> None:
    names = (str(index), ".hidden", f"{index} \x1b[2J\n", os.fsdecode(b"%d\xff" % index), "é" * 60)
    data = _text(draw).encode() if draw.random() < 0.6 else _mutated(draw, _lines(draw))
    (at / (draw.choice(names) + draw.choice((".txt", ".md", "", *_SUFFIXES)))).write_bytes(data)


def _put_directory(draw: Draw, at: Path, index: int) -> None:
    (at / (f"{index}" + draw.choice(("", ".jsonl", ".txt", "/" + "/".join("a" * 60))))).mkdir(parents=True)


def _put_link(draw: Draw, at: Path, index: int) -> None:
    targets = ("/dev/zero", "/dev/null", "nowhere", ".", "..", f"{index}", "/dev/stdin", "/proc/self/mem", "/proc/kmsg")
    (at / f"{index}").symlink_to(draw.choice(targets))


def _put_fifo(draw: Draw, at: Path, index: int) -> None:
    os.mkfifo(at / f"{index}{draw.choice(_SUFFIXES)}")


def _put_socket(draw: Draw, at: Path, index: int) -> None:
    here = os.open(at, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{index}")
    os.close(here)


_ENTRIES: list[Callable[[Draw, Path, int], None]] = [
    _put_file,
    _put_file,
    _put_directory,
    _put_link,
    _put_fifo,
    _put_socket,
]
_KINDS: list[tuple[Callable[[Draw, Path], list[Path]], int]] = [
    (mutated_text, 25), (mutated_lines, 25), (lines_of_any_shape, 40), (odd_text, 15), (other_encodings, 15),
    (noise, 8), (packed, 5), (one_thing_many_times, 12), (a_line_without_end, 1), (a_directory, 30),
    (no_regular_file, 10),
]  # fmt: skip
