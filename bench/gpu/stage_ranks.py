"""Stage 9: two ranks on two GPUs. It is skipped on a machine with one GPU."""

from __future__ import annotations

import torch

from gpu.record import Options, Record, run
from gpu.runner import ROOT
from gpu.stage_tests import measured_tests

_RANKS = 2


def stage(record: Record, options: Options) -> None:
    count = torch.cuda.device_count()
    if count < _RANKS:
        record.skip("two ranks", f"the machine has {count} GPU")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    measured_tests(record, "two ranks", ["-m", "gpu", "tests/gpu/test_ranks.py"], ROOT, options.work)


if __name__ == "__main__":
    run(stage)
