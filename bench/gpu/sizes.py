"""Choice of the model's size for the step stage: a pure function of the disk, the memory and the available seconds."""

from __future__ import annotations

from typing import Any

LAYERS = 16
_EMBEDDING = 128 * 1024 * 2048
_PER_LAYER = 2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192
_STORE_BYTES = 14
"""Stored bytes per parameter with weights on NVMe: weight, residual and two fp32 moments.

The spare copy for speculative updates is not counted, because it is used only if there is room.
"""
_STEP_BYTES = {"host-nvme": 20, "nvme-nvme": 28}
"""Bytes moved per parameter and step; 28 with weights on NVMe, because the update reads the weights once more."""
_HOST_BYTES = 22
"""Bytes of RAM per parameter with all states in RAM: weights, residual, moments, and gradients in fp32 at most."""
_START_S = 12.0
"""Seconds for a contender's imports, model, arena and first step."""
_FREE_SHARE = 0.85


def numel(layers: int) -> int:
    """Return the parameters of gpu_step's Llama with this many layers, without the norms."""
    return _EMBEDDING + layers * _PER_LAYER


def choose(disk_bytes_per_s: float, free_disk: int, free_ram: int, seconds: float) -> dict[str, Any]:
    """Choose the numbers of layers and steps with which all contenders fit the time: first reduce steps, then layers.

    Args:
        disk_bytes_per_s: rate of mixed reads and writes.
        free_disk: free bytes on the disk.
        free_ram: free bytes of RAM.
        seconds: time limit of the complete stage.

    Returns:
        layers, warmups, steps, and the contenders that are left out, with the reasons.
    """
    for layers in (LAYERS, 8, 4, 2, 1):
        parameters = numel(layers)
        if parameters * _HOST_BYTES > free_ram * _FREE_SHARE or parameters * _STORE_BYTES > free_disk * _FREE_SHARE:
            continue
        for warmups, steps in ((2, 4), (1, 3), (1, 2)):
            needed = 3 * (_START_S + (warmups + steps) * 0.8 * layers / LAYERS)
            for each in _STEP_BYTES.values():
                stored = parameters * (_STORE_BYTES + each * (warmups + steps + 1))
                needed += _START_S + stored / disk_bytes_per_s
            if needed <= seconds:
                return {
                    "layers": layers,
                    "warmups": warmups,
                    "steps": steps,
                    "left_out": {},
                    "planned_s": round(needed),
                }
    slow = f"{disk_bytes_per_s / 1e9:.2f} GB/s of disk, {free_disk >> 30} GiB of it, {free_ram >> 30} GiB of RAM"
    layers = next((each for each in (LAYERS, 8, 4, 2, 1) if numel(each) * _HOST_BYTES < free_ram * _FREE_SHARE), 1)
    left_out = dict.fromkeys(_STEP_BYTES, f"does not fit the time: {slow}")
    return {"layers": layers, "warmups": 2, "steps": 4, "left_out": left_out, "planned_s": round(3 * _START_S)}
