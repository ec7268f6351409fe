"""Comparison of the simulation with this machine. The rates are taken from the same run as the steps.

[Note: where each rate comes from]
In each round, `bench/step_vs_peers.py` measures steps of *processor* (all states in memory, no overlap) and of infinity
with the states on NVMe, and after each step the replay, which moves the step's bytes without computing.

| rate            | from                                                                                           |
|-----------------|------------------------------------------------------------------------------------------------|
| flops           | processor: a step less its update and its landing                                              |
| adam, land      | processor: its `adam_s` and `gradient_s`                                                       |
| checksums       | `adam_s` of a contender with overlap off, less processor's: the same update, from the store    |
| disk            | all replays of the run: bytes per second; reads to writes as fio had it on this disk           |
| threads of      | processor: its share of the two cores in this run, divided by its share on a quiet machine.    |
| other programs  | The processor's rates are divided by this quotient, and these threads are added.               |

Each round is predicted with the rates that were measured in this round. The result is the median over rounds of
predicted / measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from peers.contenders import setting_of
from peers.workload import Workload

from simulation.machine import SimulatedMachine
from simulation.scenario import simulate
from simulation.shapes import Task, task_of

CONTENDERS = ("infinity-host", "infinity-host-off", "infinity-nvme", "infinity-nvme-off")
WITHIN = 0.15

_QUIET_SHARE = {False: 1.6, True: 1.9}
"""Cores that `processor` keeps busy on a quiet machine, without and with recomputation of 2,048 tokens.

They are cpu_seconds / seconds of 2026-11-21-step-overlap-256-clipped.json and -2048-clipped.json.
"""
_READ_TO_WRITE = 3.23 / 4.40
"""Ratio of read to write rates that fio had on this disk: 2026-11-21-vs-fio.json."""
_DRAM = 60e9
"""Memory bandwidth by bench/adam_forms.py on this machine, two cores: a loop that reads and writes in place."""
_CHECKSUMS = 26.5e9
"""Bytes per second, for results in which no run had overlap off, so that `_checksums` cannot compute the rate.

The rate is from 2026-11-21-step-overlap-256-unclipped.json.
"""
_VISIT_S = 2.2e-4
"""Seconds of Python per visit of a unit. Per step, a layer with its states on NVMe takes 0.59 ms more than a layer of
torch, and a layer in RAM takes 0.15 ms more; a step visits a layer twice (2026-11-22-overhead.json). The cost in RAM is
part of the measured compute.
"""


def machine_of(measured: Mapping[str, Any], task: Task, number: int) -> SimulatedMachine:
    """Return this machine with the rates of one round."""
    work, cores = measured["workload"], measured["machine"]["cores"]
    alone = _of_round(measured["steps"]["processor"], number)
    counters = alone["counters"]
    compute_s = alone["seconds"] - counters["update_s"] - counters["gradient_s"]
    share = min(alone["cpu_seconds"] / alone["seconds"] / _QUIET_SHARE[bool(work["recompute"])], 1.0)
    adam = task.numel / counters["adam_s"] / share
    return SimulatedMachine(
        name="this machine",
        cores=cores,
        dram=max(_DRAM, adam * 26),
        disk_read=_disk(measured) * (1 + _READ_TO_WRITE) / 2,
        disk_write=_disk(measured) * (1 + 1 / _READ_TO_WRITE) / 2,
        adam={"fp32": adam},
        checksums=_checksums(measured, task) / share,
        land=task.numel / counters["gradient_s"] / share,
        flops=task.flops / compute_s / share,
        host_bytes=measured["machine"]["memory_bytes"],
        device_bytes=measured["machine"]["memory_bytes"],
        disk_bytes=50 << 30,
        compute_cores=cores,
        busy_cores=cores / share - cores,
        visit_s=_VISIT_S,
    )


def _disk(measured: Mapping[str, Any]) -> float:
    """Return the bytes per second of all replays."""
    replays = [step["replay"] for steps in measured["steps"].values() for step in steps if "replay" in step]
    return float(statistics.median((each["read_bytes"] + each["written_bytes"]) / each["io_s"] for each in replays))


def _checksums(measured: Mapping[str, Any], task: Task) -> float:
    """Return a rate in bytes per second, computed from the additional time that an update from the store takes over an
    update in memory."""
    rates = []
    for step in measured["steps"].get("infinity-host-off", ()):
        alone = _of_round(measured["steps"]["processor"], step["round"])
        more = step["counters"]["adam_s"] - alone["counters"]["adam_s"]
        rates.append(20 * task.numel / max(more, 1e-3))
    return statistics.median(rates) if rates else _CHECKSUMS


def _of_round(steps: Sequence[Mapping[str, Any]], number: int) -> Mapping[str, Any]:
    return next(step for step in steps if step["round"] == number)


def predict(measured: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each contender the predicted and measured seconds of each round, and the resulting figures."""
    work = Workload(**measured["workload"])
    task = task_of(work, "fp32")
    clipped = work.max_grad_norm is not None and work.max_grad_norm < 100
    found: dict[str, dict[str, Any]] = {}
    for name in CONTENDERS:
        setting = setting_of(name)
        if setting is None or name not in measured["steps"]:
            continue
        options = setting.options(work, None)
        memory = options.pop("memory")
        pairs = []
        for step in measured["steps"][name]:
            machine = machine_of(measured, task, step["round"])
            outcome = simulate(
                machine,
                task,
                clipped=clipped,
                gradients="host",
                activations="keep",
                device=memory.get("device"),
                **options,
            )
            if outcome.figures is None:
                raise ValueError(f"{name}: {outcome.refused}")
            pairs.append((outcome.figures.seconds, step["seconds"]))
        ratio = statistics.median(predicted / seconds for predicted, seconds in pairs)
        found[name] = {
            "predicted": statistics.median(predicted for predicted, _ in pairs),
            "measured": statistics.median(seconds for _, seconds in pairs),
            "ratio": ratio,
            "of_medians": statistics.median(p for p, _ in pairs) / statistics.median(s for _, s in pairs),
            "within": abs(ratio - 1) <= WITHIN,
            "rounds": pairs,
            "figures": outcome.figures,
        }
    return found


def rates(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates with which a run was predicted, as medians over its rounds."""
    task = task_of(Workload(**measured["workload"]), "fp32")
    machines = [machine_of(measured, task, step["round"]) for step in measured["steps"]["processor"]]
    names = ("disk_read", "disk_write", "checksums", "land", "flops", "busy_cores", "dram")
    found = {name: statistics.median(getattr(each, name) for each in machines) for name in names}
    return found | {"adam": statistics.median(each.adam["fp32"] for each in machines)}
