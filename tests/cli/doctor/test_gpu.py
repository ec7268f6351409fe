"""GPUs that torch can use, that it cannot, and that are not there: on a fake torch.cuda and trees of /sys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.base import accelerator, device_runtime, pci
from infinity.base.accelerator import DeviceFacts, TorchAccelerator
from infinity.cli.doctor import gpu
from infinity.cli.doctor.gpu import GpuProbes
from infinity.cli.doctor.probes import ProbeFinding
from infinity.config import SwapConfig
from infinity.plan.copy_rates import CopyMeasurement, measure
from tests.base.test_pci import card, put
from tests.bench.gpu import fake_cuda
from tests.bench.gpu.fake_cuda import Fake
from tests.io.test_disks import write

ADDRESS = "0000:65:00.0"
DEVICE = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A GPU, which is the CPU."""
    fake = fake_cuda.install(monkeypatch)
    facts = DeviceFacts("FAST GPU", 80 << 30, 79 << 30, "compute capability 9.0", ADDRESS)
    monkeypatch.setattr(accelerator, "devices", lambda: [DEVICE])
    monkeypatch.setattr(accelerator, "describe", lambda device: facts)
    monkeypatch.setattr(accelerator, "open_accelerator", TorchAccelerator)
    return fake


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """No GPU, for a torch that was built for one or for none."""
    for name in gpu._HIDING:
        monkeypatch.delenv(name, raising=False)

    def none(*, has_runtime: bool, why: str = "") -> None:
        monkeypatch.setattr(accelerator, "devices", lambda: [])
        monkeypatch.setattr(accelerator, "has_runtime", lambda: has_runtime)
        monkeypatch.setattr(accelerator, "why_no_device", lambda: why)

    return none


def link(root: Path, most: str = "16.0 GT/s PCIe", now: str = "16.0 GT/s PCIe", lanes: str = "16") -> None:
    put(root, ADDRESS, max_link_speed=most, max_link_width="16", current_link_speed=now, current_link_width=lanes)


# ------------------------------------------------------------------------------------------------ none is used


def test_without_a_gpu_the_cpu_computes(none: Any, tmp_path: Path) -> None:
    none(has_runtime=False)
    gpus = GpuProbes(SwapConfig(), tmp_path)
    assert gpus.found() == [ProbeFinding("ok", "none: the model computes on the CPU")]
    assert gpus.build().state == "ok"
    assert gpus.entry_points() == gpus.copies() == [ProbeFinding("ok", "no GPU is used")]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"device": "48MiB"}, ""),
        ({"device": "32MiB", "host": "16MiB"}, ""),
        ({"device": "49MiB"}, "memory.device is 49.00 MiB; without a GPU this memory is RAM"),
        (
            {"device": "32MiB", "host": "20MiB"},
            "memory.device is 32.00 MiB and memory.host 20.00 MiB, together 52.00 MiB; without a GPU",
        ),
    ],
)
def test_without_a_gpu_budgets_that_ram_does_not_have_are_missing(
    memory: dict[str, str], said: str, none: Any, tmp_path: Path
) -> None:
    none(has_runtime=False)
    write(tmp_path, {"sys/fs/cgroup/memory.max": str(64 << 20), "sys/fs/cgroup/memory.current": str(16 << 20)})
    found = GpuProbes(SwapConfig.model_validate({"memory": memory}), tmp_path).found()[1:]
    assert [(row.state, row.what) for row in found] == ([("missing", "memory.device")] if said else [])
    for row in found:
        assert row.finding.startswith(said)
        assert "set memory: {host: 24MiB, device: 12MiB}" in row.finding


@pytest.mark.parametrize(("vendor", "state", "mends"), [("0x10de", "missing", True), ("0x1002", "slower", False)])
def test_a_torch_for_the_cpu_beside_a_gpu_is_the_wrong_one(
    vendor: str, state: str, mends: bool, none: Any, tmp_path: Path
) -> None:
    none(has_runtime=False)
    card(tmp_path, vendor=vendor)
    gpus = GpuProbes(SwapConfig(), tmp_path)
    assert (gpus.build().state, "--force-reinstall 'torch>=2.6'" in gpus.build().mend) == (state, mends)
    assert [row.state for row in gpus.found()] == ["unknown"]


@pytest.mark.parametrize(
    ("files", "mend"),
    [
        ({"proc/driver/nvidia/version": "NVRM"}, "nvidia-smi"),
        ({".dockerenv": ""}, "docker run --gpus all …"),
        ({}, "sudo apt-get install nvidia-driver"),
    ],
)
def test_a_gpu_that_torch_does_not_find_is_missing_and_the_driver_is_the_cause(
    files: dict[str, str], mend: str, none: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    none(has_runtime=True, why="Found no NVIDIA driver on your system")
    card(tmp_path)
    write(tmp_path, files)
    (found,) = GpuProbes(SwapConfig(), tmp_path).found()
    assert (found.state, found.mend) == ("missing", mend)
    assert found.finding == f"NVIDIA at {ADDRESS}: Found no NVIDIA driver on your system"


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_gpu_that_is_hidden_makes_it_slower(
    value: str, none: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none(has_runtime=True)
    card(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    (found,) = GpuProbes(SwapConfig(), tmp_path).found()
    assert (found.state, found.mend) == ("slower", "unset CUDA_VISIBLE_DEVICES")


# ------------------------------------------------------------------------------------------------ one is used


def test_a_gpu_is_described_pinned_copied_to_and_called(fake: Fake, tmp_path: Path) -> None:
    card(tmp_path)
    link(tmp_path)
    gpus = GpuProbes(SwapConfig(), tmp_path)
    assert gpus.found() == [
        ProbeFinding("ok", "FAST GPU, compute capability 9.0, 80.00 GiB, of which 79.00 GiB are free", what="cpu")
    ]
    assert gpus.build().state == "ok"
    rows = [*gpus.entry_points(), *gpus.copies()]
    assert [row.what for row in rows] == ["cpu runtime", "cpu copies"]
    assert rows[0].state == "ok"
    assert "GB/s down; its link" in rows[1].finding


def test_a_budget_of_the_device_that_is_not_free_is_missing(fake: Fake, tmp_path: Path) -> None:
    config = SwapConfig.model_validate({"memory": {"device": "80GiB"}})
    (found,) = GpuProbes(config, tmp_path).found()
    assert found.state == "missing"
    assert "memory.device is 80.00 GiB" in found.finding


def test_a_runtime_that_native_code_cannot_call_is_missing(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_runtime, "addresses", lambda names: None)
    (found,) = GpuProbes(SwapConfig(), tmp_path).entry_points()
    assert found.state == "missing"
    assert "linked into torch's own libraries" in found.finding
    assert "pip install" in found.mend


def test_memory_that_cannot_be_pinned_is_slower(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {".dockerenv": ""})
    monkeypatch.setattr(fake.cudart, "cudaHostRegister", lambda *_: 2)
    (copies,) = GpuProbes(SwapConfig(), tmp_path).copies()
    assert (copies.state, copies.mend) == ("slower", "docker run --ulimit memlock=-1 …")
    assert "because memory cannot be pinned: " in copies.finding
    assert "refused 64.00 MiB" in copies.finding


@pytest.mark.parametrize(
    ("most", "now", "lanes", "state", "said"),
    [
        ("16.0 GT/s PCIe", "16.0 GT/s PCIe", "16", "ok", "its link is Gen4 ×16, its maximum"),
        ("16.0 GT/s PCIe", "16.0 GT/s PCIe", "4", "slower", "Gen4 ×4 while copying, Gen4 ×16 at most"),
        ("32.0 GT/s PCIe", "8.0 GT/s PCIe", "16", "slower", "Gen3 ×16 while copying, Gen5 ×16 at most"),
        ("Unknown", "16.0 GT/s PCIe", "16", "ok", "does not report"),
    ],
)
def test_a_link_that_could_be_faster_is_slower(
    most: str, now: str, lanes: str, state: str, said: str, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(tmp_path, most, now, lanes)
    copied = CopyMeasurement("", 50e9, 50e9, pci.link(ADDRESS, "current", tmp_path))
    monkeypatch.setattr(gpu, "measure", lambda *_: copied)
    (found,) = GpuProbes(SwapConfig(), tmp_path).copies()
    assert found.state == state
    assert said in found.finding


@pytest.mark.parametrize(("rate", "state"), [(25e9, "ok"), (10e9, "slower")])
def test_copies_at_less_than_half_of_the_link_are_slow(
    rate: float, state: str, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(tmp_path)
    monkeypatch.setattr(
        gpu, "measure", lambda *_: CopyMeasurement("", 25e9, rate, pci.link(ADDRESS, "current", tmp_path))
    )
    (found,) = GpuProbes(SwapConfig(), tmp_path).copies()
    assert found.state == state
    assert found.finding.startswith(f"25.0 GB/s up, {rate / 1e9:.1f} GB/s down")


def test_measuring_copies_both_ways_and_gives_the_memory_back(fake: Fake, tmp_path: Path) -> None:
    link(tmp_path, now="8.0 GT/s PCIe")
    copied = measure(TorchAccelerator(DEVICE), ADDRESS, tmp_path)
    assert copied.refused == ""
    assert copied.up_rate > 0
    assert copied.down_rate > 0
    assert str(copied.link) == "Gen3 ×16"
    assert fake.cudart.registered == set()


def test_a_gpu_whose_place_torch_does_not_tell_has_a_link_that_is_not_told(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "describe", lambda device: DeviceFacts("GPU", 1, 1, "x", ""))
    link(tmp_path)
    (found,) = GpuProbes(SwapConfig(), tmp_path).copies()
    assert (found.state, "does not report" in found.finding) == ("ok", True)
