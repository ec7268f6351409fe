"""The same training with plain torch and everything in memory, without a limit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from peers.process import Worker
from peers.workload import Job

from large_models.training import Training

_SET_UP_S = 1800.0


def seconds_in_memory(training: Training, log: Path) -> float:
    """Return the seconds of a step: the mean of three steps after a first one. The weights have the dtype of the run,
    and are not encoded.

    Raises:
        WorkerError: the model does not fit in memory, for example.
    """
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[training.dtype]
    workload = replace(training.workload, dtype=dtype, lora=training.lora)
    worker = Worker("torch", Path(sys.executable), "peers.worker_torch", Job(workload), log, timeout_s=_SET_UP_S)
    worker.start()
    try:
        worker.wait_ready()
        return float(worker.step()["seconds"])
    finally:
        worker.stop()
