"""A bundle that would not do on the machine it is for is refused before it travels."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu import bundle
from gpu.bundle import BundleError, check

_ANY = "py3-none-any"
_BINARY = "cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64"
_WHEELS = {
    "scikit_build_core-1.1.2": _ANY,
    "pybind11-3.1.0": _ANY,
    "cmake-4.4.4": "py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64",
    "ninja-1.13.2": "py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64",
    "numpy-2.4.6": _BINARY,
    "pydantic-2.14.3": _ANY,
    "pydantic_core-2.50.4": _BINARY,
    "pyyaml-6.0.3": _BINARY,
    "psutil-7.2.2": "cp36-abi3-manylinux2010_x86_64.manylinux_2_12_x86_64",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle for Python 3.12 of small files with the right names."""
    for name in bundle.NATIVE_FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"0" * 100)
    (tmp_path / "wheels").mkdir()
    for name, tags in _WHEELS.items():
        (tmp_path / "wheels" / f"{name}-{tags}.whl").write_bytes(b"0" * 10)
    return tmp_path


def test_a_whole_bundle_is_measured(folder: Path) -> None:
    assert check(folder, "3.12") == 100 * len(bundle.NATIVE_FILES) + 10 * len(_WHEELS)


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_wheels_for_another_python_are_named(folder: Path, python: str) -> None:
    with pytest.raises(BundleError) as raised:
        check(folder, python)
    for name in ("numpy", "pydantic_core", "pyyaml"):
        assert f"{name}-{dict(item.split('-') for item in _WHEELS)[name]}-{_BINARY}.whl does not fit" in str(
            raised.value
        )
    assert "psutil" not in str(raised.value)


@pytest.mark.parametrize("tags", ["cp312-cp312-manylinux_2_39_x86_64", "cp312-cp312-manylinux_2_28_aarch64"])
def test_a_wheel_for_another_machine_is_named(folder: Path, tags: str) -> None:
    (folder / "wheels" / f"extra-1.0-{tags}.whl").write_bytes(b"")
    with pytest.raises(BundleError, match=f"extra-1.0-{tags}.whl does not fit CPython 3.12 on x86-64 Linux"):
        check(folder, "3.12")


@pytest.mark.parametrize("name", bundle.NATIVE_FILES)
def test_a_header_or_library_that_is_missing_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        check(folder, "3.12")


def test_a_distribution_without_a_wheel_or_with_two_is_named(folder: Path) -> None:
    (folder / "wheels" / f"numpy-2.4.6-{_BINARY}.whl").rename(folder / "wheels" / f"ninja-1.0-{_ANY}.whl")
    with pytest.raises(BundleError, match="no wheel of numpy; two wheels of ninja"):
        check(folder, "3.12")


def test_what_is_no_wheel_is_named(folder: Path) -> None:
    (folder / "wheels" / "numpy-2.4.6.tar.gz").write_bytes(b"")
    with pytest.raises(BundleError, match=r"numpy-2\.4\.6\.tar\.gz is no wheel"):
        check(folder, "3.12")


def test_the_limit_is_of_all_that_travels(folder: Path) -> None:
    nbytes = check(folder, "3.12")
    assert check(folder, "3.12", beside_bytes=bundle.LIMIT_BYTES - nbytes) == nbytes
    with pytest.raises(BundleError, match=r"64\.0 MiB of working tree are more than 64\.0 MiB"):
        check(folder, "3.12", beside_bytes=bundle.LIMIT_BYTES - nbytes + 1)
