"""Documents: small files of nested values, which are read strictly and without pickle.

[Note: the form of a document]

    {"infinity": KIND, "version": V, "json_bytes": J, "data_bytes": D, "blake2b": DIGEST}\n   one line of JSON
    J bytes of JSON: the value
    D bytes: the data of the tensors, arrays and bytes in the value

DIGEST is the hash of everything after the first line. From version 2 on, V is the personalization of the hash. A reader
parses the numbers in the first line and formats a first line from them; both lines must be equal byte for byte. So all
damage is found, and a damaged file is never mistaken for a file of a newer version. Each kind of document has separate
version numbers. A caller of `read` names the newest version that it knows, and `read` also reads older versions.

A value consists of JSON values and of objects with the key "$". These objects represent tensors, numpy arrays and
scalars, bytes, tuples, dicts with keys that are not strings, Counter, numbers that are not finite, dtypes and devices.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity import files
from infinity.errors import DamagedFileError, ManifestError, NewerVersionError
from infinity.sizes import format_bytes

_HEADER_BYTES_MAX = 512
_HEADER = re.compile(
    rb'{"infinity": "([a-z ]+)", "version": ([1-9][0-9]{0,5}), '
    rb'"json_bytes": ([0-9]{1,18}), "data_bytes": ([0-9]{1,18}), "blake2b": "[0-9a-f]{64}"}\n'
)
_JSON_BYTES_MAX = 256 << 20
_DATA_BYTES_MAX = 4 << 30
_OBJECTS_MAX = 1_000_000
_LISTS_MAX = 4_000_000
"""Maximum number of lists that the JSON of a document may have.

Larger documents are neither written nor read, because a parsed value takes many times as much memory as its JSON.
"""
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
_NUMPY_KINDS = "biuf"
_NUMPY_DTYPE = re.compile(r"[<|][biuf](1|2|4|8|16)")
_TORCH_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def write(kind: str, value: Any, version: int = 1) -> list[bytes]:
    """Return the bytes of a document, in parts.

    Args:
        kind: name of the kind of document.
        value: the value to write.
        version: version of the kind.

    Raises:
        TypeError: the value is too large or nested too deeply, or has a part that cannot be stored in a document. The
            message says where in the value this part is.
    """
    encoder = _ValueEncoder()
    text = encoder.dump(value).encode()
    data_bytes = sum(len(blob) for blob in encoder.blobs)
    problem = _too_large(len(text), data_bytes) or _too_many(text, 0, len(text))
    if problem:
        raise TypeError(f"the value is too large to be read again: it {problem}. Keep long lists as tensors or arrays")
    return [
        _header(kind, version, len(text), data_bytes, _digest(version, text, *encoder.blobs)),
        text,
        *encoder.blobs,
    ]


def copy_of(value: Any) -> Any:
    """Return the value that read() would return after write(); the result shares no memory with `value`.

    Raises TypeError like write().
    """
    encoder = _ValueEncoder()
    text = encoder.dump(value)
    return _ValueDecoder(memoryview(b"".join(encoder.blobs))).parse(text)


def read(path: Path, kind: str, version: int = 1, *, follow: bool = False) -> Any:
    """Return the value of a document of this version or an older version.

    Args:
        path: path of the file.
        kind: the kind that the document must have.
        version: newest version that the caller knows.
        follow: whether the target is read if `path` is a symbolic link; False: a link is an error.

    Raises:
        DamagedFileError: the file is missing, damaged, of another kind or not a regular file.
        NewerVersionError: the document has a newer version.
        ManifestError: the file cannot be read, or contains a value of unknown form. Each error names the path.
    """
    return parse(_bytes_of(path, kind, follow=follow), path, kind, version)


def checked_bytes(path: Path, kind: str, version: int = 1) -> bytes:
    """Return all bytes of a document.

    Raises the errors of read(), except errors in the value, because the value is not parsed.
    """
    data = _bytes_of(path, kind)
    _checked(data, path, kind, version)
    return data


def _bytes_of(path: Path, kind: str, *, follow: bool = False) -> bytes:
    """Return all bytes of a file.

    If the file's size differs from the size in the first line, only the first line is read.
    """
    try:
        with files.opened(path, follow=follow) as (descriptor, nbytes):
            end, sizes = _first_line(files.read(descriptor, _HEADER_BYTES_MAX), path, kind)
            if end + sum(sizes[1:]) != nbytes:
                problem = f"is damaged: it has {nbytes} bytes instead of {end + sum(sizes[1:])}"
                raise DamagedFileError(path, problem)
            problem = _too_large(*sizes[1:])
            if problem:
                raise ManifestError(path, f"is too large to be read: it {problem}")
            return files.read(descriptor, nbytes)
    except OSError as error:
        damaged = isinstance(error, FileNotFoundError | NotADirectoryError | files.UnusableFileError)
        raise (DamagedFileError if damaged else ManifestError)(path, f"cannot be read: {error.strerror}") from error


def _too_large(json_bytes: int, data_bytes: int) -> str:
    """Return a description of the part that is too large; "" if the document is not too large."""
    for what, nbytes, most in (("JSON", json_bytes, _JSON_BYTES_MAX), ("data", data_bytes, _DATA_BYTES_MAX)):
        if nbytes > most:
            return f"has {format_bytes(nbytes)} of {what}, but at most {format_bytes(most)} can be read"
    return ""


def _too_many(data: bytes, begin: int, end: int) -> str:
    """Return a description of the excess if the JSON in data[begin:end] has too many objects or too many lists;
    otherwise ""."""
    for what, sign, most in (("objects", b"{", _OBJECTS_MAX), ("lists", b"[", _LISTS_MAX)):
        found = data.count(sign, begin, end)
        if found > most:
            return f"has {found} {what}, but at most {most} can be read"
    return ""


def parse(data: bytes, path: Path, kind: str, version: int = 1) -> Any:
    """Return the value of a document whose bytes are in memory. `path` is the path from which the document was read.

    Raises the errors of read().
    """
    begin, end = _checked(data, path, kind, version)
    return _value(data[begin:end], memoryview(data)[end:], path)


def _checked(data: bytes, path: Path, kind: str, version: int) -> tuple[int, int]:
    """Check that a document is undamaged, and return the begin and the end of its JSON in `data`. Raises the errors of
    read()."""
    end, (written, json_bytes, data_bytes) = _first_line(data, path, kind)
    if data[:end] != _header(kind, written, json_bytes, data_bytes, _digest(written, memoryview(data)[end:])):
        raise DamagedFileError(path, f"is damaged: its {len(data)} bytes do not match its checksum")
    if end + json_bytes + data_bytes != len(data):
        raise DamagedFileError(path, f"has {len(data)} bytes instead of {end + json_bytes + data_bytes}")
    if written > version:
        raise NewerVersionError(
            path,
            f"was written by a newer infinity: it has version {written}, and this infinity reads versions up to "
            f"{version}. Use the newer infinity.",
        )
    problem = _too_many(data, end, end + json_bytes)
    if problem:
        raise ManifestError(path, f"is too large to be read: it {problem}")
    return end, end + json_bytes


def _first_line(data: bytes, path: Path, kind: str) -> tuple[int, tuple[int, int, int]]:
    """Return the length of the first line, and the version, json_bytes and data_bytes in this line.

    Raises DamagedFileError.
    """
    line = _HEADER.match(data)
    if line is None or line[1] != kind.encode():
        raise DamagedFileError(path, f"is not a {kind} of infinity, or its first line is damaged")
    return line.end(), (int(line[2]), int(line[3]), int(line[4]))


def _digest(version: int, *parts: bytes | memoryview) -> str:
    digest = hashlib.blake2b(digest_size=32, person=str(version).encode() if version > 1 else b"")
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _header(kind: str, version: int, json_bytes: int, data_bytes: int, digest: str) -> bytes:
    header = {
        "infinity": kind,
        "version": version,
        "json_bytes": json_bytes,
        "data_bytes": data_bytes,
        "blake2b": digest,
    }
    return json.dumps(header).encode() + b"\n"


def _value(text: bytes, data: memoryview, path: Path) -> Any:
    """Parse the JSON and the data of a document. Raises ManifestError."""
    try:
        return _ValueDecoder(data).parse(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ManifestError(path, f"is not valid JSON: {error}") from error
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
        raise ManifestError(path, f"has a value that cannot be read: {error}") from error


class _ValueEncoder:
    """Conversion of values to JSON, and to the data that are stored after the JSON."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._at = 0

    def dump(self, value: Any) -> str:
        """Return the JSON of a value. Raises TypeError."""
        try:
            return json.dumps(self.encode(value, ""), allow_nan=False, separators=(",", ":"))
        except RecursionError:
            raise TypeError("the value is nested too deeply, or contains itself") from None

    def encode(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if isinstance(value, Counter):
            return {"$": "counter", "items": self._items(value, where)}
        if isinstance(value, Mapping):
            if all(type(key) is str and key != "$" for key in value):
                return {key: self.encode(item, f"{where}.{key}") for key, item in value.items()}
            return {"$": "dict", "items": self._items(value, where)}
        if type(value) is list:
            return [self.encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"$": "tuple", "items": [self.encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        return self._encode_data(value, where)

    def _items(self, value: Mapping[Any, Any], where: str) -> list[list[Any]]:
        return [
            [self.encode(key, f"{where} (a key)"), self.encode(item, f"{where}.{key}")] for key, item in value.items()
        ]

    def _encode_data(self, value: Any, where: str) -> Any:
        if isinstance(value, bytes):
            return {"$": "bytes", **self._blob(value)}
        if isinstance(value, torch.Tensor) and value.dtype in _TORCH_NAMES and value.layout == torch.strided:
            flat = value.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return {
                "$": "tensor",
                "dtype": _TORCH_NAMES[value.dtype],
                "shape": list(value.shape),
                **self._blob(data),
            }
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY_KINDS:
            array = np.asarray(value)
            return {
                "$": "array" if isinstance(value, np.ndarray) else "scalar",
                "dtype": array.dtype.newbyteorder("<").str,
                "shape": list(array.shape),
                **self._blob(array.astype(array.dtype.newbyteorder("<")).tobytes()),
            }
        if isinstance(value, torch.dtype) and value in _TORCH_NAMES:
            return {"$": "dtype", "name": _TORCH_NAMES[value]}
        if isinstance(value, torch.device):
            return {"$": "device", "name": str(value)}
        raise TypeError(
            f"{where.lstrip('.') or 'the value'} is a {type(value).__name__}, which a checkpoint cannot store: use "
            "numbers, strings, lists, tuples, dicts, bytes, tensors and numpy arrays"
        )

    def _blob(self, data: bytes) -> dict[str, int]:
        self.blobs.append(data)
        self._at += len(data)
        return {"at": self._at - len(data), "nbytes": len(data)}


class _ValueDecoder:
    """Conversion of JSON and data to values in one pass.

    Objects inside an object are converted before the object itself.

    Every size is checked before memory of this size is allocated.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        blob, array = ("at", "nbytes"), ("at", "nbytes", "dtype", "shape")
        self._forms: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Any]]] = {
            "float": (("value",), self._float),
            "counter": (("items",), lambda tagged: Counter(self._items(tagged))),
            "dict": (("items",), self._items),
            "tuple": (("items",), lambda tagged: tuple(self._list(tagged, "items"))),
            "bytes": (blob, lambda tagged: bytes(self._blob(tagged))),
            "tensor": (array, self._tensor),
            "array": (array, self._array),
            "scalar": (array, lambda tagged: self._array(tagged)[()]),
            "dtype": (("name",), lambda tagged: _TORCH_DTYPES[tagged["name"]]),
            "device": (("name",), lambda tagged: torch.device(str(tagged["name"]))),
        }
        """Table of the forms of objects: the keys of each form, without "$", and the function that makes the value."""

    def parse(self, text: str | bytes) -> Any:
        return json.loads(text, object_pairs_hook=self._decode, parse_constant=self._refuse)

    def _decode(self, pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key twice")
        if "$" not in value:
            return value
        kind = value["$"]
        if not isinstance(kind, str) or kind not in self._forms:
            raise ValueError(f"unknown form {kind!r}")
        keys, made = self._forms[kind]
        if value.keys() != {"$", *keys}:
            raise ValueError(f"{kind} with {sorted(value)}")
        return made(value)

    @staticmethod
    def _refuse(constant: str) -> Any:
        raise ValueError(f"the number {constant}")

    @staticmethod
    def _list(tagged: dict[str, Any], key: str) -> list[Any]:
        if not isinstance(tagged.get(key), list):
            raise ValueError(f"{key} is not a list")
        result: list[Any] = tagged[key]
        return result

    def _items(self, tagged: dict[str, Any]) -> dict[Any, Any]:
        items = [(key, item) for key, item in self._list(tagged, "items")]
        if len(dict(items)) != len(items):
            raise ValueError("a key twice")
        return dict(items)

    @staticmethod
    def _float(tagged: dict[str, Any]) -> float:
        if tagged["value"] not in ("inf", "-inf", "nan"):
            raise ValueError(f"{tagged['value']!r} is no number")
        return float(tagged["value"])

    def _blob(self, tagged: dict[str, Any]) -> memoryview:
        at, nbytes = tagged["at"], tagged["nbytes"]
        if type(at) is not int or type(nbytes) is not int or at < 0 or nbytes < 0 or at + nbytes > len(self._data):
            raise ValueError("data outside the file")
        return self._data[at : at + nbytes]

    def _shape(self, tagged: dict[str, Any], itemsize: int, nbytes: int) -> list[int]:
        shape = self._list(tagged, "shape")
        if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * itemsize != nbytes:
            raise ValueError(f"{nbytes} bytes for shape {shape}")
        return shape

    def _tensor(self, tagged: dict[str, Any]) -> torch.Tensor:
        dtype, data = _TORCH_DTYPES[tagged["dtype"]], self._blob(tagged)
        shape = self._shape(tagged, dtype.itemsize, len(data))
        if not len(data):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def _array(self, tagged: dict[str, Any]) -> Any:
        name, data = str(tagged["dtype"]), self._blob(tagged)
        if not _NUMPY_DTYPE.fullmatch(name):
            raise ValueError(f"an array of {name}")
        dtype = np.dtype(name)
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(self._shape(tagged, dtype.itemsize, len(data)))
