"""Safetensors files that are damaged, or none: each is an error that names the file, and the tensor that was read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infinity.checkpoint.safetensors_reader import is_readable, names_in, stored_as, tensor_of
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
