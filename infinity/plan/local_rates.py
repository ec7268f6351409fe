"""The rates of this machine.

Rates are measured, or read from infinity-bench's profiles of the disks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

from infinity import _native
from infinity.base.accelerator import TorchAccelerator, free_bytes
from infinity.base.machine_facts import last_cache_bytes
from infinity.config import SwapConfig
from infinity.plan import adam_rate as adam
from infinity.plan.copy_rates import measure
from infinity.plan.disk import profiles_of, room_bytes
from infinity.plan.machine_resources import available_host_bytes, usable_cores
from infinity.state.codec import Codec, encode, encoded_bytes
from infinity.state.frozen_codecs import FrozenName
from infinity.state.machine_rates import CHECKSUMS_PER_CORE, LAND_PER_CORE, MachineRates
from infinity.state.model_shape import widths

_DISK_READ, _DISK_WRITE = 2.0e9, 1.5e9
_UPDATE_NUMEL, _UPDATE_NUMEL_MAX = 4 << 20, 64 << 20
_PROBED_BYTES = 24
"""Bytes of memory per parameter that the measurement needs. All forms of the states are in memory at the same time."""
_UPDATE_BYTES = 14
"""Bytes of memory per parameter for weight, residual, fp32 moments and gradient."""
_MOMENTS: tuple[_native.MomentsName, ...] = ("fp32", "bf16", "int8")
_WIDTH_MAX, _INNER_MAX, _TOKENS_MAX = 2048, 5632, 512
_HEAD_WIDTH = 64
_HBM_PROBE_BYTES = 256 << 20
_LOOK_S, _BUSY_PERCENT = 0.1, 25


def _busy() -> str:
    """Return a note for measured rates if other processes compute now.

    This process must not compute during the call.
    """
    busy = psutil.cpu_percent(interval=_LOOK_S)
    return (
        f", while other work used {busy:.0f} % of the processors: the rates may be too low"
        if busy > _BUSY_PERCENT
        else ""
    )


def rates_for(model: nn.Module, config: SwapConfig, device: torch.device, tokens: int) -> MachineRates:
    """Return the rates of this machine for steps of a model. A process measures them once.

    `infinity plan` and the runs use this function, so that both come to the same plan. The measurement took 5 s of
    processor time on two cores with AVX2. It draws no random numbers of the run.

    Args:
        model: the model; the sizes and the dtype of its weights count.
        config: the swap config.
        device: device on which the model computes.
        tokens: tokens of a micro-batch.
    """
    width, inner = widths(model)
    dtype = max(model.parameters(), key=torch.Tensor.numel).dtype
    return _measured_once(tuple(config.nvme.paths), device, dtype, width, inner, tokens, config.frozen)


@lru_cache
def _measured_once(
    paths: tuple[Path, ...],
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    inner: int,
    tokens: int,
    frozen: FrozenName,
) -> MachineRates:
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        return local_machine(paths, device, dtype=dtype, width=width, inner=inner, tokens=tokens, frozen=frozen)


def local_machine(
    paths: Sequence[Path],
    device: torch.device,
    *,
    dtype: torch.dtype,
    width: int,
    inner: int,
    tokens: int,
    frozen: FrozenName,
) -> MachineRates:
    """Measure the rates that a plan uses.

    Args:
        paths: the swap directories.
        device: device on which the model computes.
        dtype: dtype of the measured layer.
        width: width of the measured layer. Larger widths are reduced to a limit.
        inner: inner width of the measured layer. Larger widths are reduced to a limit.
        tokens: tokens of the measured forward and backward. Larger numbers are reduced to a limit.
        frozen: the form of frozen weights whose decoding is measured.
    """
    cores = usable_cores()
    busy = _busy()
    sources: dict[str, str] = {}
    read, write, mixed = _disks(paths, sources)
    updates, dram = _adam(cores)
    how = f"measured now: {_update_numel() >> 20} Mi parameters in memory, {cores} threads{busy}"
    sources |= {"adam": how, "dram": how}
    flops = _flops(device, dtype, min(width, _WIDTH_MAX), min(inner, _INNER_MAX), min(tokens, _TOKENS_MAX))
    sources["flops"] = f"measured now: forward and backward of a block{busy if device.type == 'cpu' else ''}"
    up = down = hbm = 0.0
    if device.type != "cpu":
        copied = measure(TorchAccelerator(device), "")
        up, down, hbm = copied.up_rate, copied.down_rate, _memory_rate(device)
        sources["hbm"] = f"measured now: {_HBM_PROBE_BYTES >> 20} MiB doubled in place"
        sources["up, down"] = f"measured now{f', without pinned memory: {copied.refused}' if copied.refused else ''}"
    decode = 0.0
    if device.type == "cpu":
        decode = _decode("int8" if frozen == "int8" else "nf4", cores)
        sources["decode"] = f"measured now: {cores} threads{busy}"
    sources |= dict.fromkeys(("land", "checksums"), "assumed: 1 Gparam/s and 10 GB/s for each core")
    return MachineRates(
        name="this machine",
        cores=cores,
        dram=dram,
        disk_read=read,
        disk_write=write,
        disk_mixed=mixed,
        adam=updates,
        checksums=cores * CHECKSUMS_PER_CORE,
        land=cores * LAND_PER_CORE,
        flops=flops,
        host_bytes=available_host_bytes(),
        device_bytes=available_host_bytes() if device.type == "cpu" else free_bytes(device),
        disk_bytes=room_bytes(paths),
        disks=len(paths),
        up=up,
        down=down,
        hbm=hbm,
        decode=decode,
        sources=sources,
    )


def _disks(paths: Sequence[Path], sources: dict[str, str]) -> tuple[float, float, float]:
    """Return the rates of all disks together: bytes per second read, bytes per second written, and a factor.

    The factor is for mixed reads and writes. It is their rate, divided by the rate of the same reads and writes one
    after the other.
    """
    profiles = profiles_of(paths)
    if profiles:
        sources["disk"] = f"profiled by infinity-bench, {', '.join(profile.measured[:10] for profile in profiles)}"
        mixed = sum(profile.mixed_rate for profile in profiles)
        read, write = (sum(getattr(each, key) for each in profiles) for key in ("read_rate", "overwrite_rate"))
        return read, write, mixed / (2 / (1 / read + 1 / write))
    count = max(len(paths), 1)
    drives = f"{count} NVMe drives" if paths[1:] else "1 NVMe drive"
    sources["disk"] = f"assumed: {drives}; `infinity-bench --path DIRECTORY` measures them"
    return count * _DISK_READ, count * _DISK_WRITE, 1.0


def _adam(cores: int) -> tuple[dict[str, float], float]:
    """Return the rate of an update in memory for each form of the moments, and the rate of the memory.

    The rates of the update are in parameters per second, the rate of the memory in bytes per second.
    """
    memory, isa, pool = adam.AdamBuffers(_update_numel()), _native.select_isa(), _native.ThreadPool(cores)
    forms = {moments: adam.StateFormat("bf16", "split16", moments, "bf16") for moments in _MOMENTS}
    found = {str(name): adam.measure(memory, form, isa, pool, 3) for name, form in forms.items()}
    bound = statistics.median(each.bound for each in found.values())
    return {name: each.parameters_per_s for name, each in found.items()}, bound


def _update_numel() -> int:
    """Return a number of parameters whose states are four times as large as the processor's caches.

    The number is limited, so that the states take at most an eighth of the available RAM.
    """
    wanted = min(4 * last_cache_bytes() // _UPDATE_BYTES, _UPDATE_NUMEL_MAX)
    return max(min(wanted, available_host_bytes() // 8 // _PROBED_BYTES) >> 20 << 20, _UPDATE_NUMEL)


def _median_s(call: Callable[[], object], budget_s: float = 0.25) -> float:
    """Return the median duration of some calls of a function in seconds, after one warm-up call.

    The function is called at most five times, and not again after the time budget is used up.
    """
    call()
    taken: list[float] = []
    while len(taken) < 5 and (not taken or sum(taken) < budget_s):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


class _DecoderBlock(nn.Module):
    """A decoder block like the blocks of most models.

    The measured time of the block includes operations other than matrix products.
    """

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.heads = heads

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(self.norms[0](given)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        given = given + self.out(seen.transpose(1, 2).flatten(2))
        inside = self.norms[1](given)
        added: torch.Tensor = given + self.down(functional.silu(self.gate(inside)) * self.up(inside))
        return added


def _flops(device: torch.device, dtype: torch.dtype, width: int, inner: int, tokens: int) -> float:
    """Return the FLOPs per second of a block's forward and backward.

    The FLOPs are counted as in cli/planning/model.py.
    """
    heads = max(width // _HEAD_WIDTH, 1)
    width = heads * (width // heads)
    layer = _DecoderBlock(width, inner, heads).to(device, dtype)
    given = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=True)

    accelerator = None if device.type == "cpu" else TorchAccelerator(device)

    def once() -> None:
        layer(given).sum().backward()
        if accelerator is not None:
            accelerator.synchronize(accelerator.record(accelerator.current()))

    products = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
    with torch.enable_grad():
        return 3 * (2 * products + 2 * tokens * width) * tokens / _median_s(once)


def _memory_rate(device: torch.device) -> float:
    """Return the bytes per second that a device's own memory reads and writes together."""
    values = torch.ones(_HBM_PROBE_BYTES // 4, device=device)
    accelerator = TorchAccelerator(device)

    def once() -> None:
        values.mul_(2.0)
        accelerator.synchronize(accelerator.record(accelerator.current()))

    return 2 * _HBM_PROBE_BYTES / _median_s(once)


def _decode(codec: Codec, cores: int) -> float:
    """Return the number of encoded parameters that are decoded per second."""
    shape, pool = torch.Size([256, 16384]), _native.ThreadPool(cores)
    data: Any = torch.zeros(encoded_bytes(codec, shape), dtype=torch.uint8).numpy()
    encode("", torch.randn(shape.numel()), codec, memoryview(data), pool)
    into: Any = torch.empty(shape.numel(), dtype=torch.int16).numpy()

    def once() -> None:
        _native.decode_weights(data, codec, shape.numel(), shape[-1], into, "bf16", pool)

    return shape.numel() / _median_s(once)
