"""Other machines, for which `infinity plan --machine` and bench/simulation make predictions.

The table names the source of every rate. Only rates whose source says so were measured by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.state.machine_rates import ADAM_BYTES, CHECKSUMS_PER_CORE, LAND_PER_CORE, MachineRates

GB = 1e9
GIB = 1 << 30
TB = 1_000_000_000_000

_PER_CORE = {"fp32": 1.92 * GB, "bf16": 0.93 * GB, "int8": 1.11 * GB}
_PER_CORE_AVX2 = {"fp32": 1.84 * GB, "bf16": 0.55 * GB, "int8": 0.80 * GB}
_PER_CORE_BASELINE = {"fp32": 0.87 * GB, "bf16": 0.26 * GB, "int8": 0.12 * GB}

_OURS = {
    "adam": "the smaller of DRAM / bytes per parameter and cores × what one core does in memory ("
    "bench/results/README.md: Gparam/s with moments in fp32, bf16 and int8: AVX-512 1.92, 0.93, 1.11, AVX2 "
    "1.84, 0.55, 0.80, baseline 0.87, 0.26, 0.12)",
    "checksums": "cores × 10 GB/s: XXH3 in cache, below its authors' 30 GB/s of one core",
    "land": "cores × 1 Gparam/s: half of what two cores here land, copy and sum of squares (calibration)",
    "flops": "0.45 of the dense bf16 peak (accelerator notes: 8.1e13 FLOP in 0.16 to 0.2 s on an H200)",
    "disk": "data sheets of PCIe 4 drives: 7 GB/s read, 5 GB/s written, sustained",
    "endurance": "data sheets: 600 TB written for each TB of a consumer drive, 1,800 TB of a data center's",
}


SYSTEM_BYTES = 6 << 30
"""Bytes of RAM that infinity cannot use on another machine. The system, torch and a GPU context need this memory."""


def _machine(
    name: str,
    sources: dict[str, str],
    *,
    cores: int,
    dram: float,
    adam: Mapping[str, float],
    disk_tb: int,
    overwrites: int,
    disks: int = 1,
    **more: Any,
) -> MachineRates:
    """Return a machine.

    `adam` has the rates of one core. `disk_tb` is the size of each disk in TB, and `overwrites` is how often a disk can
    be overwritten completely.
    """
    return MachineRates(
        name=name,
        cores=cores,
        dram=dram,
        adam={form: min(cores * rate, dram / ADAM_BYTES[form]) for form, rate in adam.items()},
        checksums=cores * CHECKSUMS_PER_CORE,
        land=cores * LAND_PER_CORE,
        disks=disks,
        disk_read=disks * 7 * GB,
        disk_write=disks * 5 * GB,
        disk_bytes=disks * disk_tb * TB,
        endurance_bytes=disks * disk_tb * overwrites * TB,
        sources=_OURS | sources,
        **more,
    )


_H200: dict[str, Any] = {
    "adam": _PER_CORE,
    "flops": 0.45e15,
    "device_bytes": 139 * GIB,
    "up": 53 * GB,
    "down": 53 * GB,
    "hbm": 4080 * GB,
}
_H200 |= {"disk_tb": 8, "overwrites": 1800}
_H200_SOURCES = {
    "dram": "the middle of 80 to 200 GB/s that 16 cores of such a machine are expected to give",
    "up, down": "PCIe Gen5 ×16: 50 to 56 GB/s each way is expected of registered memory",
    "hbm": "data sheet: 4.8 TB/s, 0.85 of it",
}
_ONE_H200: dict[str, Any] = _H200 | {"cores": 16, "dram": 140 * GB, "host_bytes": 128 * GIB}
_EIGHT_SOURCES = _H200_SOURCES | {
    "dram": "two sockets of 12 channels DDR5-5600 are 1,075 GB/s; three quarters of it",
    "between": "NVLink 4: 450 GB/s each way, two thirds of it",
}
_CONSUMER_SOURCES = {
    "dram": "two channels of DDR5-5600 are 89.6 GB/s; 0.73 of it",
    "up, down": "PCIe 4 ×16: 31.5 GB/s, 0.8 of it",
    "hbm": "data sheet of an RTX 4090: 1.008 TB/s, 0.85 of it",
    "flops": "0.45 of 165 TFLOP/s, dense bf16 with fp32 sums, of an RTX 4090",
}
_GH200_SOURCES = {
    "dram": "LPDDR5X of 480 GB: 384 GB/s, 0.89 of it",
    "up, down": "NVLink-C2C, as given: 450 GB/s up and 300 down",
    "hbm": "data sheet: 4.0 TB/s, 0.85 of it",
    "adam": _OURS["adam"] + "; no kernel for NEON or SVE, so one core does what the baseline does",
}
MACHINES = {
    "h200": _machine("H200-like, 1 NVMe", _H200_SOURCES, **_ONE_H200),
    "h200-4": _machine("H200-like, 4 NVMe", _H200_SOURCES, disks=4, **_ONE_H200),
    "8xh200": _machine("8 H200-like, 8 NVMe", _EIGHT_SOURCES, cores=128, dram=800 * GB, disks=8, gpus=8,
                       host_bytes=2048 * GIB, between=300 * GB, **_H200),
    "consumer": _machine("24 GB consumer-like", _CONSUMER_SOURCES, cores=12, dram=65 * GB, adam=_PER_CORE_AVX2,
                         flops=0.074e15, host_bytes=64 * GIB, device_bytes=24 * GIB, disk_tb=4, overwrites=600,
                         up=25 * GB, down=25 * GB, hbm=857 * GB),
    "gh200": _machine("GH200-like, 4 NVMe", _GH200_SOURCES, cores=72, dram=340 * GB, adam=_PER_CORE_BASELINE,
                      flops=0.45e15, host_bytes=480 * GIB, device_bytes=96 * GIB, disks=4, disk_tb=8, overwrites=1800,
                      up=450 * GB, down=300 * GB, hbm=3400 * GB),
}  # fmt: skip
