"""What `infinity run` changes of a script's process."""

from __future__ import annotations

import os

import pytest

from infinity.integrations.launcher import _one_device


@pytest.mark.parametrize(
    ("visible", "local_rank", "seen"),
    [
        (None, None, "0"),
        ("2,3", None, "2"),
        ("3", None, "3"),
        ("", None, ""),
        (None, "1", None),  # a script's torch.cuda.set_device(1) would find no such device
        ("2,3", "1", "2,3"),
    ],
)
def test_a_script_sees_one_gpu_unless_it_chooses_among_all_by_its_local_rank(
    visible: str | None, local_rank: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", local_rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    _one_device()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
