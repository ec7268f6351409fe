"""Process for many runs, one after the other: `python -m tests.stress.worker FIRST COUNT STRIDE`.

The process prints one line of JSON for each run. If a run takes too long, the process prints the stacks of all threads
and ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import sys
import traceback

import torch

from tests.stress.interrupts import CtrlC
from tests.stress.runs import run

RUN_S = 60


def main(first: int, count: int, stride: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("infinity").setLevel(logging.CRITICAL)
    interrupts = CtrlC()
    gc.freeze()  # garbage collection in a run visits only the run's objects, not torch's
    for seed in range(first, first + count * stride, stride):
        faulthandler.dump_traceback_later(RUN_S, exit=True)
        print(json.dumps({"seed": seed}), flush=True)
        try:
            result = {"seed": seed, "counts": dict(run(seed, interrupts))}
        except BaseException:
            result = {"seed": seed, "error": traceback.format_exc()}
        print(json.dumps(result), flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
