"""Facts about the machine on which infinity's speed depends: the second half of stage 0."""

from __future__ import annotations

import contextlib
import mmap
import platform
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import infinity
from gpu.record import Options, Record, run
from infinity import _native
from infinity.base.machine_facts import processor
from infinity.base.small_files import fields
from infinity.cli.disk_kinds import kind_of
from infinity.io.disks import disk_under
from infinity.plan.machine_resources import available_host_bytes, usable_cores

GIB = 1 << 30
_TOUCH_BYTES = 32 * GIB
_PIECE_BYTES = 1 * GIB
_SMI = (
    "name",
    "driver_version",
    "memory.total",
    "pci.bus_id",
    "pcie.link.gen.max",
    "pcie.link.gen.current",
    "pcie.link.width.max",
    "pcie.link.width.current",
    "clocks.max.sm",
    "power.limit",
)


def stage(record: Record, options: Options) -> None:
    """Run the stage. Settings: `touch_bytes`, the largest number of bytes of RAM to touch."""
    options.work.mkdir(parents=True, exist_ok=True)
    record.measure("versions", "torch 2.6 or newer; infinity of this checkout", _versions)
    record.measure("cores", "16", usable_cores)
    record.measure("machine", "memlock unlimited or CAP_IPC_LOCK; THP madvise or always", _machine)
    record.measure("io engine", "io_uring, and why not where it is not", _engine)
    record.measure(
        "disk", "40 GiB free for the step's stage; direct I/O", lambda: _disk(options.work), good=lambda d: d["direct"]
    )
    record.measure("compiler", "g++ 11 or newer", lambda: _first_line("g++", "--version"))
    if torch.cuda.is_available():
        record.measure("pcie", "Gen5 ×16, where a virtual machine shows it", pcie, good=_is_gen5, speed=True)
        record.measure("gpu", "140 GiB; the node of its PCIe slot", _gpu)
    wanted = int(options.settings.get("touch_bytes", _TOUCH_BYTES))
    record.measure(
        "memory", "32 GiB can be touched; a virtual machine's RAM may grow meanwhile", lambda: touch(wanted), least_s=8
    )


def _versions() -> dict[str, Any]:
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    found |= {"numpy": np.__version__, "infinity": infinity.__version__, "at": infinity.__file__}
    with contextlib.suppress(ImportError):
        import transformers

        found["transformers"] = transformers.__version__
    return found


def _machine() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    nodes = {
        path.name: (path / "cpulist").read_text().strip() for path in Path("/sys/devices/system/node").glob("node*")
    }
    return {
        "kernel": platform.release(),
        "cpu_model": processor().model,
        "capabilities": dict(fields(Path("/proc/self/status").read_text())).get("CapEff", ""),
        "memlock": [soft, hard],
        "huge_pages": {
            path.name: path.read_text().strip()
            for path in sorted(Path("/sys/kernel/mm/transparent_hugepage").glob("*"))
            if path.is_file()
        },
        "nodes": nodes,
    }


def _engine() -> dict[str, str]:
    engine = _native.IOEngine("auto")
    refused = engine.register_memory(_native.Arena(1 << 20).view(0, 1 << 20))
    found = {"engine": engine.name, "reason": engine.reason, "registered buffers": refused or "accepted"}
    engine.close()
    return found


def _disk(directory: Path) -> dict[str, Any]:
    place = directory / "direct-io"
    file = _native.File(str(place), create=True)
    try:
        disk = disk_under(directory)
        facts = {"direct": file.direct, "alignment": file.alignment, "filesystem": disk.filesystem}
        facts |= {"members": [each.name for each in disk.members], "mount_options": disk.mount_options}
        facts |= {"kind": kind_of(disk.filesystem, next(iter(disk.members), None))}
    finally:
        file.close()
        place.unlink()
    return facts | {"free_gib": round(shutil.disk_usage(directory).free / GIB, 1)}


def _first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def pcie() -> dict[str, Any]:
    """Return the facts about the GPU's link that nvidia-smi and /sys report."""
    said: dict[str, Any] = {}
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits", "--id=0"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0:
            said = dict(zip(_SMI, (field.strip() for field in asked.stdout.split(",")), strict=False))
        else:
            said["nvidia-smi"] = (asked.stdout + asked.stderr).strip()[:300]
    bus = said.get("pci.bus_id", "").lower()
    device = Path("/sys/bus/pci/devices") / (bus[-12:] if bus else "none")
    for name in ("max_link_speed", "current_link_speed", "max_link_width", "current_link_width", "numa_node"):
        with contextlib.suppress(OSError):
            said[name] = (device / name).read_text().strip()
    return said


def _is_gen5(found: dict[str, Any]) -> bool:
    return found.get("pcie.link.gen.max") == "5" and found.get("pcie.link.width.current") == "16"


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "free_gib": round(free / GIB, 1),
        "total_gib": round(total / GIB, 1),
    }


def touch(wanted: int) -> dict[str, Any]:
    """Touch memory page by page, up to `wanted` bytes, half of the free memory, or 15 s."""
    found: dict[str, Any] = {"before": _memory()}
    pieces: list[mmap.mmap] = []
    began = time.perf_counter()
    threads = min(usable_cores(), 16)
    with ThreadPoolExecutor(threads) as pool:
        while len(pieces) * _PIECE_BYTES < wanted and time.perf_counter() - began < 15:
            held = len(pieces) * _PIECE_BYTES
            if held + _PIECE_BYTES > (available_host_bytes() + held) / 2:
                found["stopped"] = "half of the free memory is touched"
                break
            piece = mmap.mmap(-1, _PIECE_BYTES)
            pieces.append(piece)
            flat = np.frombuffer(piece, np.uint8)
            list(pool.map(_touch_part, np.array_split(flat, threads)))
            del flat
    seconds = time.perf_counter() - began
    found |= {
        "touched_gib": len(pieces) * _PIECE_BYTES / GIB,
        "gb_per_s": round(len(pieces) * _PIECE_BYTES / 1e9 / seconds, 2),
        "threads": threads,
        "while touched": _memory(),
    }
    for piece in pieces:
        piece.close()
    return found | {"after": _memory()}


def _touch_part(part: np.ndarray) -> None:
    part[::4096] = 1


def _memory() -> dict[str, float]:
    memory = psutil.virtual_memory()
    return {"total_gib": round(memory.total / GIB, 1), "available_gib": round(memory.available / GIB, 1)}


if __name__ == "__main__":
    run(stage)
