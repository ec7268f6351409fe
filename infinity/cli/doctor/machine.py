"""Cores, NUMA nodes, and the container that this process is in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from infinity.base import pci
from infinity.base.control_groups import processors_allowed
from infinity.base.small_files import fields, text_of
from infinity.cli.doctor.memory import memory
from infinity.cli.doctor.mends import container_kind, restarted
from infinity.cli.doctor.rows import Found, Probe, Probes
from infinity.config import SwapConfig
from infinity.sizes import format_bytes

_ROOT = Path("/")
_LIMIT_S = 20
_SHARED_BYTES = 1 << 30
"""Docker gives 64 MiB, which DataLoader workers and NCCL use up."""
_SHM = Path("/dev/shm")


def machine(config: SwapConfig, root: Path = _ROOT) -> Probes:
    rows = {
        "container": lambda: container(root),
        "/dev/shm": lambda: shared(_SHM, root),
        "I/O limit": lambda: io_limit(root),
    }
    inside = [Probe("cores", "cores", lambda: cores(root)), *Probes.of("container", rows).probes]
    return Probes([*memory(config, root).probes, *inside], _LIMIT_S)


def numa(paths: Sequence[Path], root: Path = _ROOT) -> Probes:
    """Args: paths: directories that are there, on the disks of the run."""
    rows = {"nodes": lambda: nodes(root), "disks and GPUs": lambda: places(paths, root)}
    return Probes.of("NUMA", rows | {"binding": lambda: binding(paths, root)})


def cores(root: Path = _ROOT) -> Found:
    from infinity.base.machine import usable_cores

    usable, there = usable_cores(), os.cpu_count() or 0
    said = f"{usable} of {there} can be used"
    quota = processors_allowed(root)
    return Found("ok", said if quota is None else f"{said}; the control group's quota is worth {quota:g} of them")


def container(root: Path = _ROOT) -> Found:
    return Found("ok", container_kind(root) or "none")


def shared(place: Path = _SHM, root: Path = _ROOT) -> Found:
    """Shared memory, which DataLoader workers and several ranks need."""
    try:
        info = os.statvfs(place)
    except OSError as error:
        return Found("slower", f"{error.strerror}: DataLoader workers and several ranks on GPUs need it")
    total = info.f_blocks * info.f_frsize
    if total >= _SHARED_BYTES:
        return Found("ok", format_bytes(total))
    said = f"{format_bytes(total)}: DataLoader workers and several ranks on GPUs may need more"
    return Found("slower", said, restarted("--shm-size 8g", root) or f"sudo mount -o remount,size=8G {place}")


def io_limit(root: Path = _ROOT) -> Found:
    """How far the control groups hold the disks back."""
    from infinity.cli.machine_facts import describe_machine

    limits = describe_machine(root).cgroup_io_max
    return Found("slower", f"io.max of the control group: {limits}") if limits else Found("ok", "none")


# -- NUMA --------------------------------------------------------------------------------------------------------------


def nodes(root: Path = _ROOT) -> Found:
    there = _processor_lists(root)
    if len(there) < 2:
        return Found("ok", "one")
    return Found("ok", ", ".join(f"{node} (processors {cpus})" for node, cpus in there.items()))


def places(paths: Sequence[Path], root: Path = _ROOT) -> Found:
    """Whether disks and GPUs are at one node."""
    if len(node_processors(root)) < 2:
        return Found("ok", "one node has all")
    disks = {str(path): node for path, node in _nodes_of(paths, root)}
    cards = {f"{gpu.vendor} at {gpu.address}": gpu.numa_node for gpu in pci.gpus(root)}
    there = disks | cards
    said = "; ".join(f"{name}: {'not told' if node is None else f'node {node}'}" for name, node in there.items())
    if None in there.values():
        return Found("unknown", said)
    if len({*there.values()}) > 1:
        return Found("slower", f"{said}. What goes between nodes is slower: use disks at the GPU's node")
    return Found("ok", said)


def binding(paths: Sequence[Path], root: Path = _ROOT) -> Found:
    """Whether this process may run at, and take memory from, the node of the GPU, or of the disks without one."""
    there = node_processors(root)
    if len(there) < 2:
        return Found("ok", "one node has all")
    mine = os.sched_getaffinity(0)
    runs_at = {node for node, cpus in there.items() if mine & cpus}
    status = dict(fields(text_of(root / "proc/self/status")))
    allowed = parse_list(status.get("Mems_allowed_list", "")) & there.keys() or set(there)
    said = f"processors of {_names(runs_at)}, memory of {_names(allowed)}"
    cards = {gpu.numa_node for gpu in pci.gpus(root) if gpu.numa_node is not None}
    disks = {node for _, node in _nodes_of(paths, root) if node is not None}
    wanted, whose = (cards, "the GPU is") if cards else (disks, "the disks are")
    if len(wanted) == 1 and not (wanted <= runs_at and wanted <= allowed):
        (node,) = wanted
        mend = f"numactl --cpunodebind={node} --membind={node} infinity …"
        return Found("slower", f"{said}; {whose} at node {node}", mend)
    if len(runs_at) == len(allowed) == len(there):
        return Found("ok", f"not bound: infinity takes memory and threads where {whose} itself")
    return Found("ok", said)


def node_processors(root: Path = _ROOT) -> dict[int, set[int]]:
    """The processors of each node."""
    return {node: parse_list(cpus) for node, cpus in _processor_lists(root).items()}


def _processor_lists(root: Path) -> dict[int, str]:
    places = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = {place.name.removeprefix("node"): text_of(place / "cpulist") for place in places}
    return {int(name): cpus for name, cpus in sorted(found.items()) if name.isascii() and name.isdigit()}


def parse_list(text: str) -> set[int]:
    """'0-3,8' → {0, 1, 2, 3, 8}. Raises ValueError for another text."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end < 1 << 16:
            raise ValueError(f"{part!r} is no range of processors or nodes")
        found |= set(range(begin, end + 1))
    return found


def _nodes_of(paths: Sequence[Path], root: Path) -> list[tuple[Path, int | None]]:
    from infinity.io.disks import disk_under

    return [(path, disk_under(path, root).numa_node) for path in paths]


def _names(nodes: Iterable[int]) -> str:
    return f"node {', '.join(map(str, sorted(nodes)))}" if nodes else "no node"
