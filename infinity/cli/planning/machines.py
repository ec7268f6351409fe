"""Machines that are not here, for `infinity plan --machine` and bench/simulation. Every rate has its source beside it;
none was measured by us but where it says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from infinity.cli.planning.rates import ADAM_BYTES, Machine

GB = 1e9
GIB = 1 << 30
TB = 1_000_000_000_000

_PER_CORE = {"fp32": 1.92 * GB, "bf16": 0.93 * GB, "int8": 1.11 * GB}
_PER_CORE_AVX2 = {"fp32": 1.84 * GB, "bf16": 0.55 * GB, "int8": 0.80 * GB}
_PER_CORE_BASELINE = {"fp32": 0.87 * GB, "bf16": 0.26 * GB, "int8": 0.12 * GB}
_CHECKSUMS_PER_CORE = 10 * GB
_LAND_PER_CORE = 1.0 * GB

_OURS = {
    "adam": "the smaller of DRAM / bytes per parameter and cores × what one core does in memory ("
    "bench/results/README.md: Gparam/s with moments in fp32, bf16 and int8: AVX-512 1.92, 0.93, 1.11, AVX2 "
    "1.84, 0.55, 0.80, baseline 0.87, 0.26, 0.12)",
    "checksums": "cores × 10 GB/s: XXH3 in cache, below its authors' 30 GB/s of one core",
    "land": "cores × 1 Gparam/s: half of what two cores here land, copy and sum of squares (calibration)",
    "disk_mixed": "1: reads and writes take turns, as on the disk here (fio: 3.78 GB/s of both, 3.73 by turns)",
    "disk_core_s_per_byte": "measured here: io_uring 0.014 s per GB (2026-11-21-vs-fio.json)",
    "disk_latency_s": "0.1 ms: a data sheet's read latency, which a queue of 32 MiB hides",
    "visit_s": "0.5 ms: our Python 0.15 to 1.1 ms per layer and step (2026-11-22-overhead.json), and launches",
    "flops": "0.45 of the dense bf16 peak (accelerator notes: 8.1e13 FLOP in 0.16 to 0.2 s on an H200)",
    "both": "up + down: full duplex",
    "disks": "data sheets of PCIe 4 drives: 7 GB/s read, 5 GB/s written, sustained",
    "endurance": "data sheets: 600 TB written for each TB of a consumer drive, 1,800 TB of a data center's",
}


def _adam(cores: int, dram: float, per_core: Mapping[str, float]) -> dict[str, float]:
    return {form: min(cores * rate, dram / ADAM_BYTES[form]) for form, rate in per_core.items()}


_H200 = Machine(
    name="H200-like, 1 NVMe",
    cores=16,
    dram=140 * GB,
    disk_read=7 * GB,
    disk_write=5 * GB,
    adam=_adam(16, 140 * GB, _PER_CORE),
    checksums=16 * _CHECKSUMS_PER_CORE,
    land=16 * _LAND_PER_CORE,
    flops=0.45e15,
    host_bytes=128 * GIB,
    device_bytes=139 * GIB,
    disk_bytes=8 * TB,
    endurance_bytes=8 * 1800 * TB,
    up=53 * GB,
    down=53 * GB,
    both=106 * GB,
    sources=_OURS
    | {
        "dram": "the middle of 80 to 200 GB/s that 16 cores of such a machine are expected to give",
        "up, down": "PCIe Gen5 ×16: 50 to 56 GB/s each way is expected of registered memory",
    },
)
_CONSUMER = Machine(
    name="24 GB consumer-like",
    cores=12,
    dram=65 * GB,
    disk_read=7 * GB,
    disk_write=5 * GB,
    adam=_adam(12, 65 * GB, _PER_CORE_AVX2),
    checksums=12 * _CHECKSUMS_PER_CORE,
    land=12 * _LAND_PER_CORE,
    flops=0.074e15,
    host_bytes=64 * GIB,
    device_bytes=24 * GIB,
    disk_bytes=4 * TB,
    endurance_bytes=4 * 600 * TB,
    up=25 * GB,
    down=25 * GB,
    both=50 * GB,
    sources=_OURS
    | {
        "dram": "two channels of DDR5-5600 are 89.6 GB/s; 0.73 of it",
        "up, down": "PCIe 4 ×16: 31.5 GB/s, 0.8 of it",
        "flops": "0.45 of 165 TFLOP/s, dense bf16 with fp32 sums, of an RTX 4090",
    },
)
_GH200 = Machine(
    name="GH200-like, 4 NVMe",
    cores=72,
    dram=340 * GB,
    disk_read=28 * GB,
    disk_write=20 * GB,
    adam=_adam(72, 340 * GB, _PER_CORE_BASELINE),
    checksums=72 * _CHECKSUMS_PER_CORE,
    land=72 * _LAND_PER_CORE,
    flops=0.45e15,
    host_bytes=480 * GIB,
    device_bytes=96 * GIB,
    disk_bytes=32 * TB,
    disks=4,
    endurance_bytes=32 * 1800 * TB,
    up=450 * GB,
    down=300 * GB,
    both=750 * GB,
    sources=_OURS
    | {
        "dram": "LPDDR5X of 480 GB: 384 GB/s, 0.89 of it",
        "up, down": "NVLink-C2C, as given: 450 GB/s up and 300 down",
        "adam": _OURS["adam"] + "; no kernel for NEON or SVE, so one core does what the baseline does",
    },
)
_EIGHT_H200 = replace(
    _H200,
    name="8 H200-like, 8 NVMe",
    cores=128,
    dram=800 * GB,
    disk_read=56 * GB,
    disk_write=40 * GB,
    disks=8,
    disk_bytes=64 * TB,
    endurance_bytes=64 * 1800 * TB,
    adam=_adam(128, 800 * GB, _PER_CORE),
    checksums=128 * _CHECKSUMS_PER_CORE,
    land=128 * _LAND_PER_CORE,
    host_bytes=2048 * GIB,
    gpus=8,
    between=300 * GB,
    sources=_H200.sources
    | {
        "dram": "two sockets of 12 channels DDR5-5600 are 1,075 GB/s; three quarters of it",
        "between": "NVLink 4: 450 GB/s each way, two thirds of it",
    },
)
SYSTEM_BYTES = 6 << 30
"""Of the RAM of a machine that is not here: the system, and a process with torch and a GPU's context."""
MACHINES = {
    "h200": _H200,
    "h200-4": replace(
        _H200,
        name="H200-like, 4 NVMe",
        disk_read=28 * GB,
        disk_write=20 * GB,
        disks=4,
        disk_bytes=32 * TB,
        endurance_bytes=32 * 1800 * TB,
    ),
    "8xh200": _EIGHT_H200,
    "consumer": _CONSUMER,
    "gh200": _GH200,
}
