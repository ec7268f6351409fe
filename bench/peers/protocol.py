"""The worker's part of the protocol between the driver and the contenders.

A worker sets itself up and prints {"ready": true, ...facts}. For each line "step" on stdin the worker takes a turn and
prints one JSON line of measurements. For "replay" it moves a step's bytes without computing, and prints the
measurements. On "quit", or when the driver has ended, the worker removes its swap files and exits.

[Note: a turn is four steps]
A contender may return from a step while its update still runs, and finish the update during the next step. A turn
therefore makes one lead-in step and three measured steps, and then waits, unmeasured, for all pending work. The
measurement is from the return of the lead-in step to the return of the last step. As much pending work is carried into
the measured steps as out of them, and no pending work disturbs the turns of other contenders. The reported figures are
the mean of the three steps.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from peers.workload import Job

_MEASURED = 3


@dataclass
class Contender:
    """A contender: one system that is ready to train.

    Attributes:
        step: makes one step and returns the loss.
        settle: waits for the pending work of a step.
        replay: moves the bytes of a step with nothing else; None when the contender moves none.
        facts: printed once, with the ready line.
        counters: returns the system's own cumulative counters, which are printed after each step.
        close: removes the system's resources; the worker removes the swap directory itself afterwards.
    """

    step: Callable[[], float]
    settle: Callable[[], None] = lambda: None
    replay: Callable[[], dict[str, Any]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    counters: Callable[[], dict[str, Any]] = dict
    close: Callable[[], None] = lambda: None


def _memory() -> dict[str, int]:
    """Return the resident bytes of this process, their peak, and their proportional set size (PSS)."""
    with open("/proc/self/status") as status:
        kib = {
            key: value.split()[0] for key, _, value in (line.partition(":") for line in status) if key.startswith("Vm")
        }
    with open("/proc/self/smaps_rollup") as rollup:
        pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return {
        "rss_bytes": int(kib["VmRSS"]) * 1024,
        "peak_rss_bytes": int(kib["VmHWM"]) * 1024,
        "pss_bytes": pss * 1024,
    }


def _forget_peak() -> bool:
    """Reset the peak resident size, so that each step has a separate peak.

    Returns False if the kernel refuses.
    """
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _io() -> dict[str, int]:
    """Return the bytes that this process read from and wrote to storage, including O_DIRECT and asynchronous I/O."""
    with open("/proc/self/io") as file:
        counts = {key: int(value) for key, _, value in (line.partition(":") for line in file)}
    return {"read_bytes": counts["read_bytes"], "written_bytes": counts["write_bytes"]}


def _turn(contender: Contender) -> dict[str, Any]:
    contender.step()
    peak_is_of_step = _forget_peak()
    io_before = _io()
    counters_before = contender.counters()
    started, cpu_before = time.perf_counter(), time.process_time()
    for _ in range(_MEASURED):
        loss = contender.step()
    seconds = (time.perf_counter() - started) / _MEASURED
    cpu_seconds = (time.process_time() - cpu_before) / _MEASURED
    io = {key: (value - io_before[key]) / _MEASURED for key, value in _io().items()}
    own = {
        key: (value - counters_before[key]) / _MEASURED
        if key.endswith(("read_bytes", "written_bytes", "_s"))
        else value
        for key, value in contender.counters().items()
    }
    measured = {"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss, **_memory(), **io, "counters": own}
    contender.settle()
    return measured | {"peak_is_of_step": peak_is_of_step}


def _claim_stdout() -> TextIO:
    """Keep stdout for the protocol; redirect libraries' output to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(setup: Callable[[Job], Contender], turn: Callable[[Contender], dict[str, Any]] = _turn) -> None:
    """Run a worker: set up the contender that argv[1] describes, and answer the driver's orders until it sends quit.

    Args:
        setup: function that makes the contender from the job.
        turn: function that runs the contender at "step", and returns the line to print.
    """
    channel = _claim_stdout()
    job = Job.from_json(sys.argv[1])
    contender: Contender | None = None
    try:
        contender = setup(job)
        memory = {f"setup_{key}": value for key, value in _memory().items()}
        facts = {**contender.facts, **memory, "replays": contender.replay is not None}
        print(json.dumps({"ready": True, **facts}), file=channel)
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            if line.strip() == "step":
                print(json.dumps(turn(contender)), file=channel)
            if line.strip() == "replay" and contender.replay is not None:
                print(json.dumps(contender.replay()), file=channel)
    except Exception as error:
        traceback.print_exc()
        print(
            json.dumps({"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}), file=channel
        )
    finally:
        try:
            if contender is not None:
                contender.close()
        finally:
            if job.swap_dir:
                shutil.rmtree(job.swap_dir, ignore_errors=True)
    channel.flush()
    # Extension modules that have threads may hang or abort during the interpreter's shutdown. All files have been
    # removed at this point.
    sys.stderr.flush()
    os._exit(0)
