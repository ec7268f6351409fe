"""Comparison of the simulation with the steps that were measured on a GPU (stage 8 of bench/gpu_check.py).

[Note: where each rate comes from]

| rate           | from                                                                                            |
|----------------|-------------------------------------------------------------------------------------------------|
| adam           | the same run: the update alone, with all cores (stage 5)                                        |
| dram           | the same run: a loop that reads and writes in place (stage 5)                                   |
| flops          | the same run: torch's row, the model in device memory                                           |
| up, down, both | the same day, a third machine of this kind: copies between pinned memory and the device         |
| land           | that machine: 100 M parameters of a unit in 3.3 ms, from copied to landed, where nothing waits  |
| busy_cores     | assumed: Python's thread and autograd's                                                         |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpu.stage_rows import MODELS, Model

from simulation.machine import MACHINES, SimulatedMachine
from simulation.scenario import simulate
from simulation.shapes import task_of

WITHIN = 0.15
_UP, _DOWN, _BOTH = 55.4e9, 55.2e9, 100.1e9
_LAND = 30e9
_BUSY_CORES = 2.0
_TORCH = "3.2 B, torch"


def machine_of(run: Mapping[str, Any], flops: float) -> SimulatedMachine:
    """Return the machine of one run."""
    adam = run["host"]["measured"]["adam"]
    rates = {name: row["gparam_per_s"] * 1e9 for name, row in adam["rows"].items()}
    return replace(
        MACHINES["h200"],
        name="the H200 of this run",
        cores=adam["threads"],
        dram=max(adam["bound_gb_per_s"].values()) * 1e9,
        adam={
            kind: next(rate for name, rate in rates.items() if said in name)
            for kind, said in (("fp32", "split16, fp32 moments"), ("int8", "split16, int8 moments"))
        },
        flops=flops,
        land=_LAND,
        up=_UP,
        down=_DOWN,
        both=_BOTH,
        busy_cores=_BUSY_CORES,
    )


def predict(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield predicted and measured seconds of each row that infinity trained with all weights and states in memory.

    Args:
        found: measured result, in the format of the files in bench/results.
    """
    rates = [rate for run in found["runs"] if (rate := _torch_rate(run)) is not None]
    for number, run in enumerate(found["runs"]):
        measured = run["rows"]["measured"]
        machine = machine_of(run, _torch_rate(run) or rates[0])
        for model in MODELS:
            for row in model.rows if model.contender == "infinity" and not model.work.lora else ():
                seconds = measured.get(f"{model.name}, {row['name']}", {}).get("seconds")
                if seconds is not None:
                    predicted = _predicted(machine, model, row)
                    ratio = predicted / seconds
                    yield {
                        "run": number + 1,
                        "row": f"{model.name}, {row['name']}",
                        "predicted": predicted,
                        "measured": seconds,
                        "ratio": ratio,
                        "within": abs(ratio - 1) <= WITHIN,
                    }


def _torch_rate(run: Mapping[str, Any]) -> float | None:
    """Return the rate in FLOPs per second, as the simulation counts FLOPs."""
    (model,) = (each for each in MODELS if each.name == _TORCH)
    seconds = run["rows"]["measured"].get(f"{_TORCH}, {model.rows[0]['name']}", {}).get("seconds")
    return None if seconds is None else task_of(model.work, "fp32").flops / seconds


def _predicted(machine: SimulatedMachine, model: Model, row: Mapping[str, Any]) -> float:
    config = {name: value for name, value in (model.config or {}).items() if name not in ("commit_every", "vertical")}
    moments = config.pop("moments", "fp32")
    outcome = simulate(
        machine,
        task_of(model.work, moments),
        # The rows with one micro-batch did not reach a threshold of 1 (bench/results/README.md).
        clipped=row["micro_batches"] > 1,
        micro_batches=row["micro_batches"],
        vertical=True,
        moments=moments,
        overlap=row.get("overlap", "auto"),
        **config,
    )
    if outcome.figures is None:
        raise ValueError(f"{model.name}: {outcome.refused}")
    return outcome.figures.seconds
