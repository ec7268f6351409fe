"""A machine as predictions know it: rates, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Machine:
    """Rates of what runs alone. Bytes per second, parameters per second and seconds.

    Attributes:
        cores: that compute and the update share.
        dram: bytes read and written.
        disk_read, disk_write: all disks together. `disk_mixed`: of both at once, as a share of
            what they get by turns.
        adam: parameters per second in memory, by the moments' form, with all cores.
        checksums: bytes per second, with all cores.
        land: parameters per second of gradients that arrive: copied (on a CPU) and their squares summed.
        flops: of forward and backward, of each device.
        decode: encoded parameters per second on the processor, with all cores; 0: not known.
        up, down: a GPU's link; 0 where the device is the CPU.
        host_bytes, device_bytes: memory, of each device. disk_bytes: free on all disks together. gpus: devices.
        endurance_bytes: that may be written to all disks together in their life, as their makers promise; 0: not known.
        between: bytes per second that a device gets from the others; 0: there are none.
        sources: of each rate, by name: "measured ...", "profiled ..." or, with any other beginning, assumed.
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
"""Of DRAM per parameter: weight, residual, moments read and written, 2 bytes of gradient read (bench/results/README.md,
"The optimizer's pass in memory"); int8: 1.03 bytes for a moment."""
