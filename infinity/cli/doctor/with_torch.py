"""The probes that import torch. They run in one process, because importing torch takes seconds.

If torch cannot be imported, the row of the first probe says why.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.cli.doctor.fixes import pip_install
from infinity.cli.doctor.machine import threads
from infinity.cli.doctor.memory import locked
from infinity.cli.doctor.probes import Probe, ProbeFinding, ProbeGroup
from infinity.config import SwapConfig

if TYPE_CHECKING:
    from infinity.cli.doctor.gpu import GpuProbes

_ROOT = Path("/")
_LIMIT_S = 90
"""Time limit in seconds. Reading torch from a slow disk, and opening many GPUs, may take this long."""


def with_torch(config: SwapConfig, root: Path = _ROOT) -> ProbeGroup:
    @functools.cache
    def gpus() -> GpuProbes:
        from infinity.cli.doctor.gpu import GpuProbes

        return GpuProbes(config, root)

    def build() -> ProbeFinding:
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            return ProbeFinding(
                "missing", f"cannot be imported: {error}", pip_install("torch>=2.6", how="--force-reinstall")
            )
        return gpus().build()

    probes = [
        Probe("GPU", "torch", build),
        Probe("memory", "locked memory", lambda: locked(config, root)),
        Probe("container", "threads", lambda: threads(config, root)),
        Probe("GPU", "CPU", lambda: processor(root)),
        Probe("GPU", "GPU", lambda: gpus().found()),
        Probe("GPU", "runtime", lambda: gpus().entry_points()),
        Probe("GPU", "copies", lambda: gpus().copies()),
    ]
    return ProbeGroup(probes, _LIMIT_S)


def processor(root: Path = _ROOT) -> ProbeFinding:
    """Return a row about the processor.

    If the model computes on the processor, the row also names the default of --dtype.

    If the default is fp32, the row is a warning, because training in fp32 is slow.
    """
    from infinity.base import machine_facts
    from infinity.base.accelerator import current_device
    from infinity.cli.default_dtype import default_dtype

    model = machine_facts.processor(root).model or "a processor without a name"
    device = current_device().type
    if device != "cpu":
        return ProbeFinding("ok", model)
    name, why = default_dtype(device, root)
    if name == "fp32":
        twice = "needs twice the memory of 16 bits for weights and gradients"
        return ProbeFinding("slower", f"{model}; {why}, so --dtype is fp32 by default, which {twice}")
    return ProbeFinding("ok", f"{model}; {why}, so --dtype is {name} by default")
