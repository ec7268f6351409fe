"""Stage 9: two ranks on two GPUs. It is skipped on a machine with one GPU."""

from __future__ import annotations

import torch

from gpu.record import Options, Record, run
from gpu.runner import ROOT
from gpu.stage_tests import run_tests

_RANKS = 2


def stage(record: Record, options: Options) -> None:
    count = torch.cuda.device_count()
    if count < _RANKS:
        record.skip("two ranks", f"the machine has {count} GPU")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    found = run_tests(["-m", "gpu", "tests/gpu/test_ranks.py"], ROOT, options.work, record.left_s - 2)
    counts = {outcome: len(found.named(outcome)) for outcome in ("passed", "failed", "skipped")}
    record.measure(
        "two ranks",
        "all pass, none is skipped",
        lambda: counts | {"rc": found.rc, "tail": "" if found.rc == 0 else found.tail[-1500:]},
        good=lambda _: found.rc == 0 and counts["passed"] > 0 and not counts["skipped"],
    )


if __name__ == "__main__":
    run(stage)
