"""The probes that import torch: one process for all of them, because the import takes seconds. Where it cannot be
imported, the first probe says why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.cli.doctor.mends import pip_install, restarted
from infinity.cli.doctor.rows import Found, Probe, Probes
from infinity.config import SwapConfig
from infinity.sizes import format_bytes

if TYPE_CHECKING:
    from infinity.cli.doctor.gpu import Gpus

_ROOT = Path("/")
_LIMIT_S = 90
"""Torch takes long to read from a cold disk, and drivers take long to open many GPUs."""
_LIMITS_FILE = "/etc/security/limits.d/90-infinity.conf"


def with_torch(config: SwapConfig, root: Path = _ROOT) -> Probes:
    looks = WithTorch(config, root)
    probes = [
        Probe("GPU", "torch", looks.torch),
        Probe("memory", "locked memory", looks.locked),
        Probe("cores", "threads", looks.threads),
        Probe("GPU", "CPU", looks.processor),
        Probe("GPU", "GPU", looks.of_gpus("found")),
        Probe("GPU", "runtime", looks.of_gpus("entry_points")),
        Probe("GPU", "pinned memory", looks.of_gpus("pinned")),
        Probe("GPU", "copies", looks.of_gpus("copies")),
        Probe("GPU", "PCIe", looks.of_gpus("links")),
    ]
    return Probes(probes, _LIMIT_S)


class WithTorch:
    """Args:
    root: of /sys and /proc, for tests.
    """

    def __init__(self, config: SwapConfig, root: Path = _ROOT) -> None:
        self._config, self._root = config, root

    def torch(self) -> Found:
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            return Found("missing", f"cannot be imported: {error}", pip_install("torch>=2.6", how="--force-reinstall"))
        return self._gpus.build()

    def of_gpus(self, what: str) -> Callable[[], Sequence[Found]]:
        """A method of Gpus, which is there once torch is."""
        return lambda: getattr(self._gpus, what)()

    def processor(self) -> Found:
        """The processor and, where it computes, the default of --dtype. A default of fp32 is a warning: it is slow."""
        from infinity.base.accelerator import current_device
        from infinity.cli.default_dtype import default_dtype
        from infinity.cli.machine_facts import processor

        model = processor(self._root).model or "a processor without a name"
        device = current_device().type
        if device != "cpu":
            return Found("ok", model)
        name, why = default_dtype(device, self._root)
        if name == "fp32":
            twice = "takes twice the memory of 16 bits for weights and gradients"
            return Found("slower", f"{model}; {why}, so --dtype is fp32 by default, which {twice}")
        return Found("ok", f"{model}; {why}, so --dtype is {name} by default")

    def locked(self) -> Found:
        """The limit of locked memory beside what a run registers with io_uring."""
        from infinity.cli.machine_facts import describe_machine
        from infinity.plan.machine import available_host_bytes
        from infinity.plan.planner import HOST_SHARE

        machine = describe_machine(self._root)
        wanted = self._config.memory.host or int(available_host_bytes(self._root) * HOST_SHARE)
        soft, hard = machine.memlock_soft_bytes, machine.memlock_hard_bytes
        said = f"a run registers up to {format_bytes(wanted)} (memory.host)"
        if soft is None:
            return Found("ok", f"no limit; {said}")
        limit = f"limit {format_bytes(soft)}"
        if machine.can_lock_any:
            return Found("ok", f"{limit}, which this process may exceed; {said}")
        if soft >= wanted:
            return Found("ok", f"{limit}; {said}")
        return Found(
            "slower", f"{limit}; {said}. Beyond it transfers take more processor time", self._raise(hard, wanted)
        )

    def _raise(self, hard: int | None, wanted: int) -> str:
        if hard is None or hard >= wanted:
            return f"ulimit -l {'unlimited' if hard is None else hard >> 10}"
        inside = restarted("--ulimit memlock=-1", self._root)
        return inside or f'echo "$USER - memlock unlimited" | sudo tee {_LIMITS_FILE}  # then log in again'

    def threads(self) -> Found:
        """The threads of the update beside the cores that they get."""
        from infinity.base.control_groups import processors_allowed
        from infinity.plan.budgets import update_threads

        threads, quota = update_threads(self._config), processors_allowed(self._root)
        said = f"{threads} for the update"
        if quota is None or threads <= math.ceil(quota):
            return Found("ok", said)
        said += f", and the control group's quota is worth {quota:g} processors"
        return Found("slower", f"{said}: threads wait for each other", f"export OMP_NUM_THREADS={max(int(quota), 1)}")

    @cached_property
    def _gpus(self) -> Gpus:
        from infinity.cli.doctor.gpu import Gpus

        return Gpus(self._config, self._root)
