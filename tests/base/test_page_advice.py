"""Read-ahead of a mapped file is advice, which changes nothing and never fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity.base import page_advice


def test_a_file_that_is_mapped_has_its_values_whatever_is_preloaded(tmp_path: Path) -> None:
    values = {str(index): torch.randn(1 << 18) for index in range(4)}
    save_file(values, tmp_path / "file.safetensors")
    for name, value in load_file(tmp_path / "file.safetensors").items():
        page_advice.preload_pages(value)
        assert torch.equal(value, values[name])


def test_memory_of_no_file_and_the_end_of_the_address_space_are_no_error() -> None:
    value = torch.ones(1 << 18)
    page_advice.preload_pages(value)
    assert (value == 1).all()


@pytest.mark.parametrize(("numel", "asked"), [(1 << 10, 0), (1 << 20, 1)])
def test_only_tensors_of_some_size_are_worth_a_call(numel: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Library:
        def madvise(self, *arguments: object) -> int:
            calls.append(arguments)
            return 0

    monkeypatch.setattr(page_advice, "_libc", Library())
    page_advice.preload_pages(torch.empty(numel))
    assert len(calls) == asked
