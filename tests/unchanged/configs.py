"""Swap configs of launched runs. The device memory has room for a part of the model only, and states are on NVMe, or in
the tier that a recipe names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infinity.strict_parsers import parse_yaml

DEVICE_MEMORY = {"float32": "4MiB", "bfloat16": "2MiB"}
"""Device memory. Half of this memory is for weights, and the model has weights of 5.6 MB in fp32, or 2.8 MB in bf16."""
_WITH_REFERENCE = {"float32": "8MiB", "bfloat16": "4MiB"}
"""Device memory if a script also has a reference model of the same size as the trained model. The reference model gets
half of the memory.
"""


_HOST_TO_DEVICE = 6
"""RAM as a multiple of device memory. With this RAM, `auto` keeps all weights and half of the units' states in RAM."""


def evicting(swap: Path, device_memory: str) -> dict[str, Any]:
    return {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": device_memory, "host": "512MiB"},
        "nvme": {"paths": [str(swap)]},
        "update": {"threads": 1},
        "commit_every": 1,
    }


def of_recipe(recipe: Path, directory: Path, *, reference: bool, ranks: int) -> Path:
    """Write the swap config of a recipe to a file, with the sizes and the directories of the test."""
    config = parse_yaml(recipe.read_text())
    mebibytes = ranks * int((_WITH_REFERENCE if reference else DEVICE_MEMORY)["float32"].removesuffix("MiB"))
    config["memory"] = {"device": f"{mebibytes}MiB", "host": f"{_HOST_TO_DEVICE * mebibytes}MiB"}
    config["nvme"]["paths"] = [str(directory / f"swap{number}") for number in range(len(config["nvme"]["paths"]))]
    path = directory / recipe.name
    path.write_text(json.dumps(config))
    return path


def write(directory: Path, dtype: str, *, reference: bool, ranks: int = 1) -> Path:
    """Write the config to a file. The config names a swap directory beside this file. The ranks share the memory."""
    path = directory / "swap.yaml"
    memory = (_WITH_REFERENCE if reference else DEVICE_MEMORY)[dtype]
    mebibytes = ranks * int(memory.removesuffix("MiB"))
    path.write_text(json.dumps(evicting(directory / "swap", f"{mebibytes}MiB")))
    return path
