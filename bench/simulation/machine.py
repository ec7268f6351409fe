"""Simulated machines: the rates that `infinity plan` uses, and rates of single transfers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from infinity.cli.planning import machines
from infinity.state.machine_rates import MachineRates

_SOURCES = {
    "disk_mixed": "1: reads and writes take turns, as on the disk here (fio: 3.78 GB/s of both, 3.73 by turns)",
    "disk_core_s_per_byte": "measured here: io_uring 0.014 s per GB (2026-11-21-vs-fio.json)",
    "disk_latency_s": "0.1 ms: a data sheet's read latency, which a queue of 32 MiB hides",
    "visit_s": "0.5 ms: our Python 0.15 to 1.1 ms per layer and step (2026-11-22-overhead.json), and launches",
    "both": "up + down: full duplex",
}


@dataclass(frozen=True)
class SimulatedMachine(MachineRates):
    """Rates of a machine, in addition to the rates that a plan uses.

    Attributes:
        busy_cores: threads of other programs that always use the cores.
        disk_latency_s: time from the end of a transfer until its waiter continues.
        disk_core_s_per_byte: CPU time of a transfer.
        compute_cores: threads that compute; 0 on a GPU.
        both: bytes per second of a GPU's link in both directions at once, summed.
        visit_s: seconds of Python and kernel launches per visit of a unit.
    """

    both: float = 0.0
    compute_cores: float = 0.0
    busy_cores: float = 0.0
    disk_latency_s: float = 1e-4
    disk_core_s_per_byte: float = 1.4e-11
    visit_s: float = 5e-4

    @classmethod
    def of(cls, machine: MachineRates) -> SimulatedMachine:
        """Return a machine of `infinity plan` with a full-duplex link."""
        known = {each.name: getattr(machine, each.name) for each in fields(machine)}
        return cls(**known | {"sources": _SOURCES | machine.sources}, both=machine.up + machine.down)

    def capacity(self) -> dict[str, float]:
        """Return the capacity per second of each resource."""
        own = {"cores": self.cores, "dram": self.dram, "disk": 1.0}
        return own | ({"device": 1.0, "up": self.up, "down": self.down, "link": self.both} if self.is_gpu else {})


MACHINES = {name: SimulatedMachine.of(machine) for name, machine in machines.MACHINES.items()}
