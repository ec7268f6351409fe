"""Runner of fuzz cases, one after the other: `python -m tests.fuzz SEED [COUNT [STRIDE]]`. It describes failures."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import sys
import time
import traceback
import warnings

import torch

from tests.fuzz.compare import judge, make

CASE_S = 60


def attempt(seed: int) -> str:
    """Run a case. Return '' if the case passes; otherwise a description of the case and its problems."""
    case = make(seed)
    try:
        verdict = judge(case)
    except BaseException:
        return f"seed {seed}: python -m tests.fuzz {seed}\n{case.describe()}\n{traceback.format_exc()}"
    if not verdict.problems:
        return ""
    made = "\n".join([*map(str, verdict.configs), *verdict.problems])
    return f"seed {seed}: python -m tests.fuzz {seed}\n{case.describe()}\n{made}"


def main(first: int, count: int = 1, stride: int = 1) -> int:
    """Print one line of JSON for each case. A case that takes too long ends the process, with all threads' stacks."""
    torch.set_num_threads(1)
    logging.getLogger("infinity").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    gc.freeze()
    failed = 0
    for seed in range(first, first + count * stride, stride):
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        began = time.monotonic()
        problem = attempt(seed)
        failed += bool(problem)
        print(json.dumps({"seed": seed, "problem": problem, "seconds": time.monotonic() - began}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:])), 1))
