"""Settings of the calling shell that a build of the wheel does not take over."""

from __future__ import annotations

import pytest

from release.build import environment


@pytest.mark.parametrize("name", ["CXXFLAGS", "CFLAGS", "LDFLAGS", "CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"])
def test_flags_of_the_shell_do_not_make_a_wheel_for_one_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "-march=native")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    assert "-march=native" not in environment().values()
    assert environment()["HTTPS_PROXY"] == "http://proxy:1"


def test_the_build_has_the_pinned_versions() -> None:
    assert environment()["PIP_CONSTRAINT"].endswith("/constraints.txt")
