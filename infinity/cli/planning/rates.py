"""The rates of a machine for predictions, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """Rates of operations that run alone, in bytes per second, parameters per second or FLOPs per second.

    Attributes:
        cores: number of cores, which forward, backward and the update share.
        dram: bytes per second, read and written.
        disk_read, disk_write: rates of all disks together.
        disk_mixed: rate of mixed reads and writes, relative to the rate of reads and writes one after the other.
        adam: parameters per second in memory, by the moments' form, with all cores.
        checksums: bytes per second, with all cores.
        land: parameters per second of gradients that land: they are copied (on a CPU) and their squares are summed.
        flops: FLOPs per second of forward and backward, for each device.
        decode: encoded parameters per second on the processor, with all cores; 0: unknown.
        up, down: rates of a GPU's link; 0 if the device is the CPU.
        host_bytes: RAM of the machine.
        device_bytes: memory of each device.
        disk_bytes: free space on all disks together.
        disks, gpus: number of disks and of devices.
        endurance_bytes: rated bytes written to all disks together over their life; 0: unknown.
        between: bytes per second that a device gets from the other devices; 0: there are none.
        sources: source of each rate, by name: "measured ...", "profiled ..." or, with any other beginning, assumed.
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
    disk_mixed: float = 1.0
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_gpu(self) -> bool:
        return self.up > 0


ADAM_BYTES = {"fp32": 26, "bf16": 18, "int8": 14.1}
"""Bytes of DRAM traffic per parameter: reads and writes of weight, residual and moments, and a read of 2 bytes of
gradient (bench/results/README.md, "The optimizer's pass in memory").

An int8 moment takes 1.03 bytes, including its scale.
"""
