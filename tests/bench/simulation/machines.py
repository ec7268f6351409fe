"""A small model, and simulated machines that train this model."""

from __future__ import annotations

from dataclasses import replace

from peers.workload import Workload
from simulation.machine import SimulatedMachine

SMALL = Workload(layers=8, hidden=512, intermediate=1408, heads=8, vocabulary=4096, batch=1, tokens=512, recompute=True)
CPU = SimulatedMachine(
    name="a CPU",
    cores=2,
    dram=60e9,
    disk_read=3e9,
    disk_write=4e9,
    adam={"fp32": 2e9, "int8": 2e9},
    checksums=30e9,
    land=4e9,
    flops=400e9,
    host_bytes=32 << 30,
    device_bytes=32 << 30,
    disk_bytes=1 << 40,
    compute_cores=2,
)
GPU = replace(
    CPU,
    name="a GPU",
    flops=20e12,
    up=20e9,
    down=20e9,
    both=40e9,
    hbm=1e12,
    device_bytes=16 << 30,
    compute_cores=0,
    visit_s=1e-4,
)
