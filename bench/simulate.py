#!/usr/bin/env python3
"""Training steps in simulated time (bench/simulation), on machines that are not available.

If measured steps are given, the script shows how accurate the simulation is for this machine.

    python bench/simulate.py --out build/simulated                     # every machine and model: JSON, tables, a plot
    python bench/simulate.py --machines h200 --models 8B --moments fp32 --out build/one
    python bench/simulate.py --join build/one/simulated.json build/two/simulated.json --out build/both
                             # the rows of several runs together, and what each policy changes
    python bench/simulate.py --calibrate build/step.json --out build/calibration
                             # a result of bench/step_vs_peers.py with processor, infinity-host and -nvme [-off]
    python bench/simulate.py --calibrate-gpu bench/results/2026-11-26-gpu-h200.json --out build/calibration
                             # rows of stage 8 of bench/gpu_check.py

The script measures nothing, and its output says so. A complete run takes some minutes, most of which are for the model
of 70 B parameters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulation import gpu_rows
from simulation.calibration import predict, rates
from simulation.machine import MACHINES
from simulation.policies import POLICIES, policy
from simulation.report import calibration_table, compared, gpu_table, plot, tables
from simulation.scenario import simulate, summary
from simulation.shapes import SHAPES, task_of

MOMENTS = ("fp32", "int8")


def scenarios(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the scenarios of every machine, model and form of the moments: unclipped, clipped, and with the changed
    policies."""
    for machine_name in args.machines:
        machine = MACHINES[machine_name]
        for model in args.models:
            for moments in args.moments:
                task = task_of(replace(SHAPES[model], batch=args.batch), moments)
                named = {"machine": machine_name, "model": model, "moments": moments, "batch": args.batch}
                serial = simulate(machine, task, clipped=False, moments=moments, overlap="off")
                for clipped in (False, True):
                    for name in args.policies:
                        with policy(name):
                            outcome = simulate(machine, task, clipped=clipped, moments=moments)
                        yield named | {"clipped": clipped, "policy": name} | summary(machine, task, outcome, serial)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/simulated"), help="folder for the results")
    add("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    add("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    add("--policies", nargs="+", choices=POLICIES, default=["as is"])
    add("--batch", type=int, default=4, help="sequences of 2,048 tokens per step")
    add(
        "--join",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="results of this program, whose rows are put together",
    )
    add("--calibrate", nargs="+", type=Path, default=[], metavar="JSON", help="results of bench/step_vs_peers.py")
    add("--calibrate-gpu", type=Path, metavar="JSON", help="results of stages 5 and 8 of bench/gpu_check.py")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.calibrate:
        found = {path.name: _calibrated(path) for path in args.calibrate}
        _write(args.out / "calibration.json", found)
        text = calibration_table(found)
    elif args.calibrate_gpu:
        steps = list(gpu_rows.predict(json.loads(args.calibrate_gpu.read_text())))
        _write(args.out / "calibration.json", {"rows": steps})
        text = gpu_table(steps)
    elif args.join:
        text = _written([row for path in args.join for row in json.loads(path.read_text())["rows"]], args.out)
    else:
        rows = []
        for row in scenarios(args):
            rows.append(row)
            print(_line(row), flush=True)
        text = _written(rows, args.out)
    (args.out / "tables.md").write_text(text)
    print("\n" + text)
    return 0


def _calibrated(path: Path) -> dict[str, Any]:
    measured = json.loads(path.read_text())
    found = predict(measured)
    for each in found.values():
        each["figures"] = each["figures"].__dict__
    return {"workload": measured["workload"], "rates": rates(measured), "contenders": found}


def _line(row: dict[str, Any]) -> str:
    head = f"{row['machine']} {row['model']} {row['moments']} {'clipped' if row['clipped'] else 'unclipped'}"
    head += "" if row["policy"] == "as is" else f" [{row['policy']}]"
    return f"{head}: " + (row.get("refused") or f"{row['seconds']:.2f} s, {row['of_bound']:.2f} of the largest bound")


def _written(rows: Sequence[dict[str, Any]], out: Path) -> str:
    """Write all figures and a plot to `out`; return the tables."""
    machines = {name: machine for name, machine in MACHINES.items() if any(row["machine"] == name for row in rows)}
    written = {name: machine.__dict__ for name, machine in machines.items()}
    _write(out / "simulated.json", {"simulated": True, "machines": written, "rows": rows})
    policies = compared(rows, POLICIES)
    shown = [row for row in rows if row["policy"] == "as is"] if policies else rows
    plot(shown, out / "simulated.png")
    return tables(shown, machines) + policies


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write one row per line, with figures in six digits."""
    lines = [f'"{name}": {_rows(part) if name == "rows" else json.dumps(_short(part))}' for name, part in value.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rows(rows: Sequence[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(_short(row)) for row in rows) + "\n]"


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return [_short(part) for part in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    raise SystemExit(main())
