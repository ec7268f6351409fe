"""The swap configs of the launched runs: everything on NVMe, and device memory for less than half of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEVICE_MEMORY = {"float32": "4MiB", "bfloat16": "2MiB"}
"""Half of it is for weights: of 5.6 MB in fp32, of 2.8 MB in bf16."""


def evicting(swap: Path, dtype: str) -> dict[str, Any]:
    return {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": DEVICE_MEMORY[dtype], "host": "512MiB"},
        "nvme": {"paths": [str(swap)]},
        "update": {"threads": 1},
        "commit_every": 1,
    }


def write(directory: Path, dtype: str) -> Path:
    """Write the config to a file, with the swap directory beside it."""
    path = directory / "swap.yaml"
    path.write_text(json.dumps(evicting(directory / "swap", dtype)))
    return path
