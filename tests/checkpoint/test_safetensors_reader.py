"""Safetensors files that are damaged, or none: each is an error that names the file, and the tensor that was read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from infinity.checkpoint import safetensors_reader
from infinity.checkpoint.safetensors_reader import _DTYPES, is_readable, names_in, rows_in, stored_as, tensor_of
from infinity.errors import ModelError, ResumeError

pytestmark = pytest.mark.cpu_only("no model is offloaded")


def test_what_a_file_has_comes_back(tmp_path: Path) -> None:
    path, value = tmp_path / "a.safetensors", torch.arange(6.0).view(2, 3)
    save_file({"x": value, "y": value.bfloat16()}, path)
    assert sorted(names_in(str(path))) == ["x", "y"]
    assert stored_as(str(path), "y") == ("BF16", (2, 3))
    assert torch.equal(tensor_of(path, "x"), value)
    assert is_readable(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(3)}, path)
    with pytest.raises(ModelError, match=f"{path}: 'z' cannot be read: .* Is the file complete"):
        tensor_of(path, "z")
    path.write_bytes(path.read_bytes()[:-1])
    assert not is_readable(path)
    with pytest.raises(ResumeError, match=f"{path}: 'x' cannot be read: .* Export it"):
        tensor_of(path, "x", failure=ResumeError, then="Export it")
    with pytest.raises(ModelError, match="missing: 'x' cannot be read: No such file"):
        stored_as(str(tmp_path / "missing"), "x")


@pytest.mark.timeout(10)
def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ModelError, match="fifo: cannot be read: is a FIFO"):
        names_in(str(tmp_path / "fifo"))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (5, 3), (4, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [*_DTYPES.values(), torch.uint16, torch.complex64], ids=str)
def test_rows_are_those_that_safetensors_reads(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    data = torch.arange(torch.Size(shape).numel() * dtype.itemsize).to(torch.uint8)
    value = (data % 2 if dtype is torch.bool else data).view(dtype).reshape(shape)
    save_file({"before": torch.zeros(7, dtype=torch.uint8), "x": value, "z": torch.ones(3)}, path)
    with safe_open(path, framework="pt") as file:
        expected = file.get_tensor("x")
    cuts = [(0, None), (1, None), (0, 2), (1, 3), (2, 2), (3, 99)] if shape else [(0, None)]
    for begin, end in cuts:
        found = rows_in(path, "x", begin, end)
        wanted = expected[begin:end] if shape else expected
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        assert torch.equal(bits(found), bits(wanted))


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def test_a_file_that_was_replaced_or_changed_is_read_as_it_is_now(tmp_path: Path) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"x": torch.zeros(3), "y": torch.ones(5)}, path)
    assert torch.equal(tensor_of(path, "y"), torch.ones(5))
    save_file({"y": torch.full((3,), 3.0), "x": torch.ones(5)}, other)
    os.replace(other, path)
    assert torch.equal(tensor_of(path, "y"), torch.full((3,), 3.0))
    save_file({"y": torch.full((2,), 4.0), "x": torch.ones(6)}, path)
    assert torch.equal(tensor_of(path, "y"), torch.full((2,), 4.0))
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ModelError, match="'y' cannot be read"):
        tensor_of(path, "y")


def test_a_header_is_parsed_once_for_all_tensors_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{index}.safetensors" for index in range(10)]
    for path in paths:
        save_file({f"x{index}": torch.full((2,), float(index)) for index in range(20)}, path)
    opened = []
    monkeypatch.setattr(
        safetensors_reader, "safe_open", lambda *args, **kwargs: opened.append(args) or safe_open(*args, **kwargs)
    )
    for path in paths:
        for index in range(20):
            assert torch.equal(tensor_of(path, f"x{index}"), torch.full((2,), float(index)))
    assert len(opened) == len(paths)
    tensor_of(paths[-1], "x0")
    assert len(opened) == len(paths)
    tensor_of(paths[0], "x0")  # not one of the last files any more
    assert len(opened) == len(paths) + 1


@pytest.mark.parametrize("shape", ["[18446744073709551615,0]", "[0,9223372036854775807,2]"])
def test_a_shape_that_no_tensor_can_have_is_an_error(shape: str, tmp_path: Path) -> None:
    header = f'{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}'.encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="'x' cannot be read"):
        tensor_of(path, "x")
