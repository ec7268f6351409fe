"""A pending error of the CUDA runtime is taken away in the runtime that is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.base import device_runtime
from infinity.base.accelerator import TorchAccelerator
from infinity.errors import ConfigError
from infinity.io.arena import PinnedArena

GPU = torch.device("cuda", 1)
LINE = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 1234   {path}\n"


class Runtime:
    """The object that torch.cuda.cudart() returns; it refuses as told."""

    def __init__(self, *, register: int = 0, unregister: int = 0) -> None:
        self.register, self.unregister = register, unregister
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return self.register

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unregistered.append(address)
        return self.unregister


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each time an error was forgotten."""
    notes: list[str] = []
    monkeypatch.setattr(device_runtime, "forget_error", lambda device: notes.append(str(device)))
    return notes


def give(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> list[Any]:
    """Have torch give this runtime; returns the devices that were made current."""
    devices: list[Any] = []

    @contextlib.contextmanager
    def device(chosen: Any) -> Any:
        devices.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", device)
    return devices


@pytest.mark.parametrize(
    ("library", "function"),
    [
        ("/site/nvidia/cu13/lib/libcudart.so.13", "cudaGetLastError"),
        ("/site/torch/lib/libcudart-d0da41ae.so.11.0", "cudaGetLastError"),
        ("/opt/rocm/a folder/libamdhip64.so.6", "hipGetLastError"),
    ],
)
def test_the_runtime_that_is_loaded_is_asked(
    library: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, asked = tmp_path / "maps", []
    maps.write_text("".join(LINE.format(path=path) for path in ("/usr/lib/libc.so.6", "", library, library)))

    def load(path: str) -> Any:
        return SimpleNamespace(**{function: lambda: asked.append(path)})

    monkeypatch.setattr(ctypes, "CDLL", load)
    device_runtime.forget_error(GPU, maps)
    assert asked == [library]


def test_every_runtime_that_is_loaded_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, asked = tmp_path / "maps", []
    libraries = ["/site/cupy/libcudart.so.12", "/site/torch/libcudart.so.13"]
    maps.write_text("".join(LINE.format(path=path) for path in libraries))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(cudaGetLastError=lambda: asked.append(path)))
    device_runtime.forget_error(GPU, maps)
    assert asked == libraries


def test_without_a_runtime_of_its_own_a_kernel_takes_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maps").write_text(LINE.format(path="/usr/lib/libc.so.6"))
    launched = []

    def zeros(numel: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    device_runtime.forget_error(GPU, tmp_path / "maps")
    assert launched == [GPU]


def test_a_refused_registration_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch, forgotten: list[str]) -> None:
    devices = give(monkeypatch, Runtime(register=2))
    arena = PinnedArena(1 << 16)
    assert "error 2" in arena.pin(TorchAccelerator(GPU))
    assert not arena.pinned
    assert forgotten == ["cuda:1"]
    assert devices == [GPU], "a runtime call without a current device would open a context on GPU 0"


def test_functions_are_found_by_their_names_in_the_runtime_that_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(LINE.format(path="/site/torch/libcudart.so.13"))
    libc = ctypes.CDLL(None)
    runtime = SimpleNamespace(cudaEventRecord=libc.malloc, cudaSetDevice=libc.free)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: runtime)
    found = device_runtime.addresses(["EventRecord", "SetDevice"], maps)
    assert found == [ctypes.cast(each, ctypes.c_void_p).value for each in (libc.malloc, libc.free)]
    maps.write_text(LINE.format(path="/usr/lib/libc.so.6"))
    assert device_runtime.addresses(["EventRecord"], maps) is None


def test_memory_that_was_registered_is_unregistered_once(monkeypatch: pytest.MonkeyPatch, forgotten: list[str]) -> None:
    runtime = Runtime(unregister=4)
    give(monkeypatch, runtime)
    arena = PinnedArena(1 << 16)
    address = arena.memory.address
    assert arena.pin(TorchAccelerator(GPU)) == ""
    assert arena.pinned
    assert forgotten == []
    del arena
    assert runtime.unregistered == [address]
    assert forgotten == ["cuda:1"]


@pytest.mark.parametrize(
    ("told", "error", "address"), [(b"0000:C1:00.0", 0, "0000:c1:00.0"), (b"", 101, ""), (None, 0, "")]
)
def test_the_place_on_the_bus_is_asked_of_the_runtime(
    told: bytes | None, error: int, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(text: int, nbytes: int, index: int) -> int:
        assert index == 3
        ctypes.memmove(text, (told or b"") + b"\0", min(len(told or b"") + 1, nbytes))
        return error

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(ask)
    found = None if told is None else [ctypes.cast(function, ctypes.c_void_p).value]
    monkeypatch.setattr(device_runtime, "addresses", lambda names: found)
    assert device_runtime.pci_address(3) == address


SOURCE = "int cudaEventRecord(void) { return %d; }"


def build(path: Path, number: int) -> None:
    """Build a library that is loaded as libcudart.so.12."""
    line = ["g++", "-shared", "-fPIC", "-x", "c", "-", "-Wl,-soname,libcudart.so.12", "-o", str(path)]
    subprocess.run(line, input=SOURCE % number, text=True, check=True)


@pytest.mark.parametrize("left", ["nothing", "another release"])
def test_a_runtime_whose_file_was_replaced_is_still_the_one_that_is_loaded(left: str, tmp_path: Path) -> None:
    """An upgrade during a run replaces the file: Linux lists it as '… (deleted)'."""
    path = tmp_path / "libcudart.so.12.4.127"
    build(path, 1)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            loaded = ctypes.CDLL(str(path))
            path.unlink()
            if left == "another release":
                build(path, 2)
            expected = ctypes.cast(loaded.cudaEventRecord, ctypes.c_void_p).value
            os._exit(0 if device_runtime.addresses(["EventRecord"]) == [expected] else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_runtime_that_was_replaced_and_is_not_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, launched = tmp_path / "maps", []
    maps.write_text(LINE.format(path="/site/libcudart.so.13 (deleted)"))
    with pytest.raises(ConfigError, match=r"^/site/libcudart.so.13 was replaced .* Start the process again.$"):
        device_runtime.addresses(["EventRecord"], maps)
    monkeypatch.setattr(torch, "zeros", lambda numel, device: launched.append(device))
    device_runtime.forget_error(GPU, maps)
    assert launched == [GPU]
