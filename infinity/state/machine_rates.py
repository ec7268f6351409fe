"""The rates of a machine for predictions, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MachineRates:
    """Rates of a machine's operations, each of which runs alone. The units are bytes, parameters or FLOPs per second.

    Attributes:
        cores: number of cores, which forward, backward and the update share.
        dram: bytes per second that the memory reads and writes together.
        disk_read, disk_write: bytes per second of all disks together.
        disk_mixed: rate of mixed reads and writes, divided by the rate of the same reads and writes one after the
            other.
        adam: parameters per second that all cores update in memory, by the form of the moments.
        checksums: bytes per second of which all cores compute checksums.
        land: gradients per second that land. A landing gradient is copied, if the model computes on the CPU, and its
            squares are summed.
        flops: FLOPs per second of forward and backward on one device.
        decode: encoded parameters per second on the processor, with all cores; 0: unknown.
        up, down: bytes per second to and from a GPU; 0 if the device is the CPU.
        hbm: bytes per second that a GPU's own memory reads and writes together; 0 if the device is the CPU.
        host_bytes: bytes of RAM of the machine.
        device_bytes: bytes of memory of each device.
        disk_bytes: free bytes on all disks together.
        disks, gpus: number of disks and of devices.
        endurance_bytes: bytes that may be written to all disks together over their life, as their vendor rates them; 0:
            unknown.
        between: bytes per second that a device receives from the other devices; 0 if there are no others.
        sources: source of each rate, by name of the rate. A source that begins neither with "measured" nor with
            "profiled" is an assumption.
    """

    name: str
    cores: float
    dram: float
    disk_read: float
    disk_write: float
    adam: dict[str, float]
    checksums: float
    land: float
    flops: float
    host_bytes: int
    device_bytes: int
    disk_bytes: int
    disks: int = 1
    gpus: int = 1
    decode: float = 0.0
    endurance_bytes: float = 0.0
    between: float = 0.0
    up: float = 0.0
    down: float = 0.0
    hbm: float = 0.0
    disk_mixed: float = 1.0
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_gpu(self) -> bool:
        return self.up > 0


ADAM_BYTES = {"fp32": 26, "bf16": 18, "int8": 14.1}
"""Bytes of DRAM traffic per parameter of an update.

Weight, residual and moments are read and written, and 2 bytes of gradient are read (bench/results/README.md, "The
optimizer's pass in memory").

An int8 moment takes 1.03 bytes, including its scale.
"""

RESIDENT_ADAM_BYTES = 26
"""Bytes of a GPU's memory per parameter of an update there by a kernel (device_update/states.py: update_on_device)."""
RESIDENT_NORM_BYTES = 2
"""Bytes of a GPU's memory per parameter for the sums of squares of gradients there by a kernel
(device_update/sum_squares.py)."""

CHECKSUMS_PER_CORE = 10e9
"""Bytes per second of which one core computes checksums (an assumption)."""
LAND_PER_CORE = 1e9
"""Gradients per second that land with one core (an assumption)."""
