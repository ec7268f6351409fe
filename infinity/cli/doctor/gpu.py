"""Probes of the GPUs: whether torch can use them, the PCIe links, and the rates of copies to and from the GPUs."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from infinity import _native
from infinity.base import accelerator, pci
from infinity.base.accelerator import Accelerator
from infinity.base.host_limits import available_host_bytes, budgets_in_ram
from infinity.cli.doctor.fixes import pip_install, restarted
from infinity.cli.doctor.probes import ProbeFinding
from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.plan.copy_rates import measure
from infinity.sizes import format_bytes

_ROOT = Path("/")
_POOR = 0.5
"""A copy is reported as slow if its rate is below this fraction of the link's maximum rate.

Large copies over a good link reach 0.75 of the maximum rate, or more.
"""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NO_GPU = ProbeFinding("ok", "no GPU is used")


class GpuProbes:
    """Probes of the GPUs.

    Args:
        config: the swap config; its memory.device must fit on the GPU.
        root: parent of /sys and /proc, for tests.
    """

    def __init__(self, config: SwapConfig, root: Path = _ROOT) -> None:
        self._config, self._root = config, root

    def build(self) -> ProbeFinding:
        """Return a row about whether torch was built for this machine's GPUs."""
        said = f"torch {torch.__version__}, built {accelerator.torch_build()}"
        vendors = {gpu.vendor for gpu in self._on_bus}
        if self._devices or not vendors or accelerator.has_runtime():
            return ProbeFinding("ok", said)
        if "NVIDIA" in vendors:
            mend = pip_install("torch>=2.6", how="--force-reinstall")
            return ProbeFinding(
                "missing", f"{said}, but the machine has an NVIDIA GPU. The build on PyPI is for CUDA", mend
            )
        return ProbeFinding(
            "slower", f"{said}, but the machine has an AMD GPU. pytorch.org has the command for a build for ROCm"
        )

    def found(self) -> list[ProbeFinding]:
        """Return rows with the GPUs and their memory."""
        return self._each(self._memory, "") if self._devices else [self._none(), *self._in_ram()]

    def _in_ram(self) -> list[ProbeFinding]:
        """Return a row if the model computes on the CPU and memory.device + memory.host exceed the available RAM.

        Without a GPU both budgets are in RAM.
        """
        memory, left = self._config.memory, available_host_bytes(self._root)
        host, device = memory.host or 0, memory.device or 0
        if not device or host + device <= left:
            return []
        fitting = budgets_in_ram(left)
        budgets = f"memory.device is {format_bytes(device)}"
        budgets += f" and memory.host {format_bytes(host)}, together {format_bytes(host + device)}" if host else ""
        said = (
            f"{budgets}; without a GPU this memory is RAM, and {format_bytes(left)} of RAM is available now: set "
            f"memory: {{host: {fitting['host']}, device: {fitting['device']}}}, or leave `memory` out to use the "
            "available memory"
        )
        return [ProbeFinding("missing", said, what="memory.device")]

    def entry_points(self) -> list[ProbeFinding]:
        """Return rows about whether native code finds the runtime's functions."""
        return self._each(self._entry_points, " runtime")

    def copies(self) -> list[ProbeFinding]:
        return self._each(self._rates, " copies")

    def _each(self, look: Callable[[torch.device], ProbeFinding], what: str) -> list[ProbeFinding]:
        return [look(device)._replace(what=f"{device}{what}") for device in self._devices] or [_NO_GPU]

    # -- facts read once -----------------------------------------------------------------------------------------------

    @cached_property
    def _on_bus(self) -> list[pci.PciGpu]:
        return pci.gpus(self._root)

    @cached_property
    def _devices(self) -> list[torch.device]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # if there is no device, why_no_device reports the reason
            return accelerator.devices()

    def _open(self, device: torch.device) -> Accelerator:
        opened = accelerator.open_accelerator(device)
        if opened is None:
            raise AssertionError("the CPU is no GPU")
        return opened

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _none(self) -> ProbeFinding:
        """Return a row that says why torch finds no device."""
        there = ", ".join(f"{gpu.vendor} at {gpu.address}" for gpu in self._on_bus)
        if not there:
            return ProbeFinding("ok", "none: the model computes on the CPU")
        if not accelerator.has_runtime():
            return ProbeFinding("unknown", f"{there}: this torch cannot query the GPU")
        hidden = next((name for name in _HIDING if os.environ.get(name, "all") in ("", "-1")), "")
        if hidden:
            return ProbeFinding(
                "slower", f"{there}, hidden by {hidden}: the model computes on the CPU", f"unset {hidden}"
            )
        why = accelerator.why_no_device() or "torch does not find it"
        return ProbeFinding("missing", f"{there}: {why}", self._driver())

    def _driver(self) -> str:
        if any(gpu.vendor != "NVIDIA" for gpu in self._on_bus):
            return ""
        inside = restarted("--gpus all", self._root)
        if inside:
            return inside
        if (self._root / "proc/driver/nvidia/version").exists():
            return "nvidia-smi"
        ubuntu = shutil.which("ubuntu-drivers") is not None
        return "sudo ubuntu-drivers install" if ubuntu else "sudo apt-get install nvidia-driver"

    def _memory(self, device: torch.device) -> ProbeFinding:
        facts, wanted = accelerator.describe(device), self._config.memory.device
        said = f"{facts.name}, {facts.architecture}, {format_bytes(facts.total_bytes)}, of which "
        said += f"{format_bytes(facts.free_bytes)} are free"
        if wanted is not None and wanted > facts.free_bytes:
            said += (
                f"; memory.device is {format_bytes(wanted)}: lower memory.device, or free memory that other processes "
                "use on the GPU"
            )
            return ProbeFinding("missing", said)
        return ProbeFinding("ok", said)

    def _entry_points(self, device: torch.device) -> ProbeFinding:
        try:
            table = self._open(device).gate()
            gate = {"copy": table.copy, "record": table.record, "wait": table.wait}
            index = device.index or 0
            _native.DeviceGate(index, enter=table.enter, synchronize=table.synchronize, keep=table.keep, **gate)
        except ConfigError as error:
            return ProbeFinding("missing", str(error), pip_install("torch>=2.6", how="--force-reinstall"))
        return ProbeFinding("ok", "copies and events run without Python")

    def _rates(self, device: torch.device) -> ProbeFinding:
        address = accelerator.describe(device).address
        copied, most = measure(self._open(device), address, self._root), pci.link(address, "max", self._root)
        said = f"{copied.up_rate / 1e9:.1f} GB/s up, {copied.down_rate / 1e9:.1f} GB/s down"
        if copied.refused:
            mend = restarted("--ulimit memlock=-1", self._root)
            return ProbeFinding(
                "slower",
                f"{said}, and copies do not overlap with computing, because memory cannot be pinned: {copied.refused}",
                mend,
            )
        if most is None or copied.link is None:
            return ProbeFinding("ok", f"{said}; the system does not report its link, as in many virtual machines")
        if copied.link.rate < most.rate:
            advice = "try another slot, or the slot's settings in the BIOS"
            return ProbeFinding("slower", f"{said}: its link is {copied.link} while copying, {most} at most: {advice}")
        if min(copied.up_rate, copied.down_rate) < _POOR * most.rate:
            return ProbeFinding("slower", f"{said}; its link ({most}) has {most.rate / 1e9:.1f} GB/s each way")
        return ProbeFinding("ok", f"{said}; its link is {most}, its maximum")
