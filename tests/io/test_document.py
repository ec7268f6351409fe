"""Documents come back as they were written; anything else is a ManifestError, never another exception or value."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import DamagedFileError, ManifestError, NewerVersionError
from infinity.io import document
from tests.sampling import number

PATH = Path("/some/where")
VALUES: list[Any] = [
    None,
    True,
    -(2**70),
    1e-310,
    float("inf"),
    "\u00e9\n\u2028",
    b"\x00\xff",
    [1, [2.5, "x"], {}],
    (1, (2, [3])),
    {"$": 1, "a": 2},
    {1: "one", (2, 3): None},
    Counter({"a": 2, 7: 1}),
    torch.float16,
    torch.device("cpu"),
]


def again(value: Any) -> Any:
    return document.parse(b"".join(document.write("test", value)), PATH, "test")


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value: Any) -> None:
    assert again({"value": value}) == {"value": value}
    assert type(again(value)) is type(value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = again([tensor, tensor.clone()])[0]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "value", [np.arange(6, dtype=">i4").reshape(2, 3), np.float64(0.1), np.uint32(7), np.array(3.0)]
)
def test_arrays_and_scalars_come_back(value: Any) -> None:
    back = again(value)
    assert np.array_equal(back, value)
    assert isinstance(back, np.ndarray) == isinstance(value, np.ndarray)


nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=number(50, 200), deadline=None)
@given(nested)
def test_any_nesting_comes_back(value: Any) -> None:
    assert again(value) == value


class Thing:
    pass


@pytest.mark.parametrize("value", [Thing(), {1, 2}, np.array(["x"]), torch.empty(2, dtype=torch.complex64), lambda: 0])
def test_what_has_no_form_is_named_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a\.b\[1\] is a \w+, which a checkpoint cannot store"):
        document.write("test", {"a": {"b": [0, value]}})


def test_every_byte_counts() -> None:
    """One wrong byte anywhere, a cut anywhere, an addition: an error that names the path."""
    whole = b"".join(document.write("test", {"a": [1, 2.5], "t": torch.arange(5)}))
    rng = random.Random(0)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        with pytest.raises(DamagedFileError, match=str(PATH)):
            document.parse(bytes(changed), PATH, "test")
        with pytest.raises(DamagedFileError, match=str(PATH)):
            document.parse(whole[:at], PATH, "test")
    with pytest.raises(ManifestError):
        document.parse(whole + b"x", PATH, "test")


def forged(text: bytes, data: bytes = b"") -> bytes:
    """Return a document whose checksum is right and whose content is wrong."""
    import hashlib

    digest = hashlib.blake2b(text + data, digest_size=32).hexdigest()
    return document._header("test", 1, len(text), len(data), digest) + text + data


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b"[NaN]",
        b"{",
        b'{"$": "pickle", "at": 0}',
        b'{"$": "bytes", "at": 0, "nbytes": 99}',
        b'{"$": "bytes", "at": -1, "nbytes": 1}',
        b'{"$": "tensor", "dtype": "float32", "shape": [1000000000000], "at": 0, "nbytes": 4}',
        b'{"$": "tensor", "dtype": "object", "shape": [], "at": 0, "nbytes": 0}',
        b'{"$": "array", "dtype": "O", "shape": [1], "at": 0, "nbytes": 4}',
        b'{"$": "tuple", "items": 3}',
        b'{"$": "dict", "items": [[[1], 2]]}',
        b'{"$": "float", "value": "1"}',
        b"[" * 100_000,
    ],
)
def test_forged_content_is_refused(text: bytes) -> None:
    with pytest.raises(ManifestError):
        document.parse(forged(text, b"1234"), PATH, "test")


def test_kind_and_version_are_checked() -> None:
    whole = b"".join(document.write("other", 1))
    with pytest.raises(ManifestError, match="is not a test of infinity"):
        document.parse(whole, PATH, "test")
    newer = b"".join(document.write("test", 1, 3))
    assert document.parse(newer, PATH, "test", 3) == document.parse(newer, PATH, "test", 4) == 1
    with pytest.raises(NewerVersionError, match="a newer infinity: it has version 3, and this infinity reads.* to 2"):
        document.parse(newer, PATH, "test", 2)


@pytest.mark.parametrize("version", [1, 2, 12])
def test_damage_is_never_taken_for_another_version(version: int) -> None:
    whole = b"".join(document.write("test", [1], version))
    right = f'"version": {version},'.encode()
    for wrong in (*range(20), 1_000_000, 10**30, '"2"', "true", "1.0", "null"):
        if wrong != version:
            changed = whole.replace(right, f'"version": {wrong},'.encode())
            with pytest.raises(DamagedFileError):
                document.parse(changed, PATH, "test", 100)


def test_a_missing_file_is_damage_and_one_that_cannot_be_read_is_not(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="No such file"):
        document.read(tmp_path / "missing", "test")
    with pytest.raises(ManifestError, match="Is a directory") as caught:
        document.read(tmp_path, "test")
    assert not isinstance(caught.value, DamagedFileError)
