"""Which device is meant, which there is, and what is asked of torch for it: over a fake torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from infinity.base import accelerator as accelerator_module
from infinity.base import device_runtime
from infinity.base.accelerator import DeviceFacts, TorchAccelerator, open_accelerator, resolve
from infinity.errors import ConfigError
from tests.bench.gpu import fake_cuda
from tests.bench.gpu.fake_cuda import Fake


def test_cuda_without_an_index_is_the_gpu_that_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert resolve("cuda") == torch.device("cuda", 3)
    assert resolve(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert resolve(None) == torch.device("cuda", 3)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "mps"):
        with pytest.raises(ConfigError, match=f"device {device}: .* Leave device= out"):
            resolve(device)
    assert resolve("cpu:0") == resolve(None) == torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def accelerator(fake: Fake) -> TorchAccelerator:
    return TorchAccelerator(torch.device("cpu"))


def test_models_on_the_cpu_need_no_accelerator(fake: Fake) -> None:
    assert open_accelerator(torch.device("cpu")) is None
    opened = open_accelerator(torch.device("cuda", 1))
    assert opened is not None
    assert opened.device == torch.device("cuda", 1)


def test_the_host_sleeps_while_it_waits_and_only_timed_events_tell_the_time(accelerator: TorchAccelerator) -> None:
    stream = accelerator.stream()
    event = accelerator.record(stream)
    assert (event.blocking, event.enable_timing) == (True, False)
    accelerator.wait(accelerator.current(), event)
    accelerator.synchronize(event)
    assert accelerator.reached(event)
    began, ended = (accelerator.record(stream, timed=True) for _ in range(2))
    assert accelerator.seconds(began, ended) == pytest.approx(1e-3)


def test_a_slab_is_aligned_to_pages(accelerator: TorchAccelerator) -> None:
    for nbytes in (1, 4096, 12345):
        slab = accelerator.slab(nbytes)
        assert (slab.dtype, slab.numel(), slab.data_ptr() % 4096) == (torch.uint8, nbytes, 0)


def test_a_copy_is_queued_on_its_stream_behind_its_events(
    accelerator: TorchAccelerator, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    stream, after = accelerator.stream(), accelerator.record(accelerator.current())
    monkeypatch.setattr(stream, "wait_event", lambda event: done.append(("waits", event)))
    copy = torch.Tensor.copy_

    def copied(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        done.append(("copies", fake.streams[-1], non_blocking))
        return copy(into, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    into = accelerator.slab(64)
    ready = accelerator.copy(into, torch.full((64,), 7, dtype=torch.uint8), on=stream, after=[after])
    assert done == [("waits", after), ("copies", stream, True)]
    assert ready.at > after.at
    assert (into == 7).all()
    assert accelerator.current() is not stream


def test_native_code_gets_the_runtimes_own_handles_and_functions(accelerator: TorchAccelerator, fake: Fake) -> None:
    stream, event = accelerator.stream(), accelerator.event()
    assert accelerator.handle(stream) == stream.cuda_stream
    assert accelerator.handle(event) == event.cuda_event
    assert event.at is not None  # torch makes an event when it is recorded first
    table = accelerator.gate()
    names = ["SetDevice", "MemcpyAsync", "EventRecord", "StreamWaitEvent", "EventSynchronize"]
    found = [table.enter, table.copy, table.record, table.wait, table.synchronize]
    assert found == fake.library.addresses(names)


def test_a_runtime_that_is_linked_into_torch_is_an_error_with_the_fix(
    accelerator: TorchAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_runtime, "addresses", lambda names: None)
    with pytest.raises(ConfigError, match="linked into torch's own libraries.*Install torch with pip"):
        accelerator.gate()


def test_pinning_that_is_refused_says_why_and_leaves_no_error(accelerator: TorchAccelerator, fake: Fake) -> None:
    assert accelerator.pin(0x1000, 4096) == ""
    assert "cudaHostRegister refused 4.00 KiB (error 712)" in accelerator.pin(0x1000, 4096)
    assert fake.forgotten == [accelerator.device]
    accelerator.unpin(0x1000)
    assert len(fake.forgotten) == 1
    accelerator.unpin(0x1000)
    assert len(fake.forgotten) == 2


@pytest.mark.parametrize(("hip", "architecture"), [(None, "compute capability 9.0"), ("6.4", "gfx942")])
def test_a_device_is_described_by_its_runtime(
    hip: str | None, architecture: str, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(name="FAST GPU", major=9, minor=0, gcnArchName="gfx942")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 4))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(device_runtime, "pci_address", lambda index: f"0000:0{index}:00.0")
    described = accelerator_module.describe(torch.device("cuda", 1))
    assert described == DeviceFacts("FAST GPU", 4, 3, architecture, "0000:01:00.0")


@pytest.mark.parametrize(
    ("cuda", "hip", "build", "has"),
    [
        (None, None, "for the CPU only", False),
        ("12.8", None, "for CUDA 12.8", True),
        (None, "6.4", "for ROCm 6.4", True),
    ],
)
def test_what_torch_was_built_for(
    cuda: str | None, hip: str | None, build: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (accelerator_module.torch_build(), accelerator_module.has_runtime()) == (build, has)


def test_why_there_is_no_device_is_the_runtimes_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(accelerator_module, "has_runtime", lambda: True)
    assert accelerator_module.why_no_device() == "Found no NVIDIA driver"
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert accelerator_module.why_no_device() == ""
    monkeypatch.setattr(accelerator_module, "has_runtime", lambda: False)
    assert accelerator_module.why_no_device() == ""


def test_all_devices_are_listed_but_the_cpu(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(accelerator_module, "current_device", lambda: torch.device("cuda", 0))
    assert accelerator_module.devices() == [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(accelerator_module, "current_device", lambda: torch.device("cpu"))
    assert accelerator_module.devices() == []
