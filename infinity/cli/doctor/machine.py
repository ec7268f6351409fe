"""Probes of the container in which this process runs, of the container's limits, and of the NUMA nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from infinity.base import pci
from infinity.base.control_groups import groups, processors_allowed
from infinity.base.small_files import text_of
from infinity.cli.doctor.fixes import container_kind, restarted
from infinity.cli.doctor.probes import ProbeFinding
from infinity.config import SwapConfig
from infinity.sizes import format_bytes

_ROOT = Path("/")
_SHARED_BYTES = 1 << 30
"""Minimum size of /dev/shm. Docker's default for shared memory is 64 MiB, which DataLoader workers and NCCL exhaust."""
_SHM = Path("/dev/shm")


def threads(config: SwapConfig, root: Path = _ROOT) -> ProbeFinding:
    """Return a row that compares the number of the update's threads with the number of available cores.

    The function imports torch.
    """
    from infinity.plan.budgets import update_threads

    wanted, quota = update_threads(config), processors_allowed(root)
    said = f"{wanted} for the update, of {os.cpu_count()} cores"
    if quota is None or wanted <= math.ceil(quota):
        return ProbeFinding("ok", said)
    said += f", but the control group's quota allows only {quota:g} cores"
    return ProbeFinding(
        "slower", f"{said}: threads wait for each other", f"export OMP_NUM_THREADS={max(int(quota), 1)}"
    )


def container(root: Path = _ROOT) -> ProbeFinding:
    return ProbeFinding("ok", container_kind(root) or "none")


def shared(place: Path = _SHM, root: Path = _ROOT) -> ProbeFinding:
    """Return a row about shared memory, which DataLoader workers and several ranks need."""
    try:
        info = os.statvfs(place)
    except OSError as error:
        return ProbeFinding(
            "slower", f"{error.strerror}: DataLoader workers and several ranks on GPUs need shared memory"
        )
    total = info.f_blocks * info.f_frsize
    if total >= _SHARED_BYTES:
        return ProbeFinding("ok", format_bytes(total))
    said = f"{format_bytes(total)}: DataLoader workers and several ranks on GPUs may need more"
    return ProbeFinding("slower", said, restarted("--shm-size 8g", root) or f"sudo mount -o remount,size=8G {place}")


def io_limit(root: Path = _ROOT) -> ProbeFinding:
    """Return a row with the I/O limits of the control groups. The limits of the innermost group come first."""
    limits = dict.fromkeys(text_of(group / "io.max") for group in groups("io", root))
    said = "; ".join(filter(None, limits))
    return ProbeFinding("slower", f"io.max of the control group: {said}") if said else ProbeFinding("ok", "none")


# -- NUMA --------------------------------------------------------------------------------------------------------------


def shared_memory() -> ProbeFinding:
    """Return a row about the memory that several ranks share."""
    from infinity.base.memfd import make_memfd

    try:
        os.close(make_memfd())
    except OSError as error:
        return ProbeFinding(
            "slower",
            f"memfd_create: {error.strerror}; ranks on the CPU send weights over sockets, and several ranks on GPUs "
            "cannot train",
            "allow memfd_create in the container's seccomp profile",
        )
    return ProbeFinding("ok", "several ranks can share one copy of the weights (memfd)")


def numa(paths: Sequence[Path], root: Path = _ROOT) -> ProbeFinding:
    """Return a row about the NUMA nodes.

    Disks and GPUs should be attached to the same NUMA node. This process should be allowed to run on the GPU's NUMA
    node, or on the disks' NUMA node if there is no GPU.

    Args:
        paths: existing directories on the disks of the run.
        root: parent of /sys and /proc, for tests.
    """
    from infinity.io.disks import disk_under

    there = node_processors(root)
    if len(there) < 2:
        return ProbeFinding("ok", "there is only one node")
    disks = {str(path): disk_under(path, root).numa_node for path in paths}
    cards = {f"{gpu.vendor} at {gpu.address}": gpu.numa_node for gpu in pci.gpus(root)}
    nodes = {node for node, cpus in there.items() if os.sched_getaffinity(0) & cpus}
    known = disks | cards
    said = "; ".join(f"{name}: {'unknown' if node is None else f'node {node}'}" for name, node in known.items())
    said += f"; this process: node {', '.join(map(str, sorted(nodes)))}"
    wanted = {*(cards or disks).values()} - {None}
    if len(wanted) == 1 and not wanted <= nodes:
        (node,) = wanted
        return ProbeFinding("slower", said, f"numactl --cpunodebind={node} --membind={node} infinity …")
    if None in known.values():
        return ProbeFinding("unknown", said)
    if len({*known.values()}) > 1:
        return ProbeFinding("slower", f"{said}. Transfers between nodes are slower: use disks at the GPU's node")
    return ProbeFinding("ok", said)


def node_processors(root: Path = _ROOT) -> dict[int, set[int]]:
    """Return the processors of each NUMA node."""

    def numbers(place: Path, name: str) -> dict[int, Path]:
        found = {each.name.removeprefix(name): each for each in place.glob(f"{name}[0-9]*")}
        return {int(number): each for number, each in found.items() if number.isascii() and number.isdigit()}

    nodes = numbers(root / "sys/devices/system/node", "node")
    return {number: {*numbers(node, "cpu")} for number, node in nodes.items()}
