"""Training on the GPU beside the seam's promises: memory, events, threads, torch's own race detector.

python -m gpu.seam_training sanitizer        three steps; run with TORCH_CUDA_SANITIZER=1
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from gpu.cuda import DEVICE
from gpu.runner import ROOT
from infinity.coordinator import registry

_MIB = 1 << 20
_WIDTH, _WIDE = 512, 4096
_BLOCKS = 12
_BATCH = 8


class Block(nn.Module):
    """Two square matrices: 1 MiB of bf16 weights at a width of 512."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Alike blocks, a unit each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def offloaded(swap: Path, width: int = _WIDTH, **config: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model whose slots hold two of its twelve blocks, its optimizer, and a batch."""
    torch.manual_seed(0)
    with torch.device(DEVICE if width == _WIDE else "cpu"):  # a large one is made faster there
        model = Blocks(width).bfloat16()
    defaults = {
        "weights": "host",
        "optimizer": "host",
        "activations": "keep",
        "memory": {"device": "5MiB", "host": "512MiB"},
        "nvme": {"paths": [str(swap)]},
        "commit_every": 0,
    }
    model = infinity.offload(model, defaults | config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    batch = torch.randn(_BATCH, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    return model, optim, batch


def train(
    model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor, steps: int, *, aside: bool
) -> list[float]:
    """Losses. `aside`: backward is called from another thread."""
    losses = []
    for _ in range(steps):
        loss = model(batch)
        if aside:
            _in_thread(loss.backward)
        else:
            loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def _in_thread(work: Any) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def threads_and_tiers(steps: int = 4) -> dict[str, Any]:
    """Losses of backward in a thread of its own and in ours, weights in RAM and on NVMe: four times the same."""
    found = {}
    for tier in ("host", "nvme"):
        for aside in (False, True):
            with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
                model, optim, batch = offloaded(Path(swap), weights=tier, optimizer=tier)
                found[f"{tier}, {'another' if aside else 'same'} thread"] = train(
                    model, optim, batch, steps, aside=aside
                )
                infinity.close(model)
    return found


def reserved_memory(steps: int = 6) -> dict[str, float]:
    """Bytes that torch reserved at most while training, beside memory.device: slots for four of twelve blocks of
    64 MiB, so that the 20 MiB in which torch takes memory and cuBLAS's workspace are little beside them."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
        model, optim, batch = offloaded(Path(swap), _WIDE, memory={"device": "512MiB", "host": "10GiB"})
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(model, optim, batch, steps, aside=False)
        infinity.synchronize(model)
        torch.cuda.synchronize()
        plan = infinity.statistics(model).plan
        infinity.close(model)
    return {
        "memory_device_mib": plan.budgets.limits.device / _MIB,
        "slots_mib": plan.budgets.slot_bytes / _MIB,
        "reserved_mib": (torch.cuda.max_memory_reserved() - before) / _MIB,
    }


def events_in_evaluation(passes: int = 60) -> dict[str, int]:
    """Uploads that the seam still keeps an event for, after few and after many passes without a step."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as swap:
        model, _, batch = offloaded(Path(swap))
        device: Any = registry.coordinator_of(model).resources.device
        found = {}
        with torch.no_grad():
            for number in range(1, passes + 1):
                model(batch)
                if number in (passes // 6, passes):
                    torch.cuda.synchronize()
                    found[f"after {number}"] = len(device._pending)
        infinity.close(model)
    return found


def sanitized(work: Path, limit_s: float) -> dict[str, Any]:
    """Three steps in a process under torch's race detector; its exit code and what it said."""
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "GPU_WORK": str(work)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu.seam_training", "sanitizer"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    said = done.stdout + done.stderr
    return {"rc": done.returncode, "races": said.count("CSAN detected"), "said": said[-1500:]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_WORK")) as directory:
        offloaded_model, its_optim, its_batch = offloaded(Path(directory))
        print(train(offloaded_model, its_optim, its_batch, 3, aside=False))
        infinity.close(offloaded_model)
