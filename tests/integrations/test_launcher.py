"""The changes that `infinity run` makes in a script's process."""

from __future__ import annotations

import os
import re
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from infinity.errors import ConfigError
from infinity.integrations.launcher import _one_device, _require_transformers_5


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


def of_version(version: str) -> ModuleType:
    module = ModuleType("transformers")
    module.__version__ = version  # type: ignore[attr-defined]
    return module


def test_what_pip_is_told_to_install_is_a_version_that_works() -> None:
    with pytest.raises(ConfigError, match="needs transformers 5, and 4.57.6 is installed") as raised:
        _require_transformers_5(of_version("4.57.6"))
    named = re.search("pip install --upgrade '(.*)'", str(raised.value))
    assert named is not None
    wanted = Requirement(named[1])
    assert wanted.name == "transformers"
    assert not wanted.specifier.contains("4.57.6")
    assert wanted.specifier.contains("5.0.0")
    _require_transformers_5(of_version("5.0.0"))
