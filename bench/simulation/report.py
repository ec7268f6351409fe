"""Simulation results as Markdown tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulation.machine import SimulatedMachine

Row = Mapping[str, Any]
_LEAD = 1.5
WANTED = {True: 1.10, False: 1.20}
"""Target for the ratio of the step to its largest bound.

The key is whether the largest bound is at least 1.5 times the second largest.
"""


def meets(row: Row) -> bool:
    return bool(row["of_bound"] <= WANTED[row["lead"] >= _LEAD])


def tables(rows: Sequence[Row], machines: Mapping[str, SimulatedMachine]) -> str:
    """Return one table per machine, and the machine's rates with their sources."""
    parts = ["**Simulated: nothing here was measured on such a machine.**\n"]
    for name, machine in machines.items():
        of_machine = [row for row in rows if row["machine"] == name]
        parts.append(f"## {machine.name}\n\n{_rates(machine)}\n\n{_table(of_machine)}")
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| model, moments | clipped | policy | s/step | bounds, s | step / largest | wanted | update hidden "
        "| B per parameter, disk | in RAM: weights, states, gradients |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_refused(row) if "refused" in row else _line(row) for row in rows]
    return "\n".join(lines) + "\n"


def compared(rows: Sequence[Row], policies: Sequence[str]) -> str:
    """Return a table of the seconds of steps that never clip, with a column for each policy; '' if only one policy was
    simulated."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not row["clipped"]:
            found.setdefault(f"{row['machine']} {_model(row)}", {})[row["policy"]] = row
    lines = [
        f"| {name} | " + " | ".join(_cell(of.get(each)) for each in policies) + " |"
        for name, of in found.items()
        if len(of) > 1
    ]
    if not lines:
        return ""
    head = ["machine, model, moments (never clipped)", *policies]
    return "\n".join(["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) + "\n"


def _cell(row: Row | None) -> str:
    if row is None or "refused" in row:
        return "" if row is None else "no plan"
    ratio = f"{row['of_bound']:.2f}"
    return f"{row['seconds']:.2f} ({f'**{ratio}**' if meets(row) else ratio} of {next(iter(row['bounds']))})"


def _model(row: Row) -> str:
    tokens = "" if row.get("batch", 4) == 4 else f" ({row['batch']} × 2,048 tokens)"
    return f"{row['model']}{tokens} {row['moments']}"


def _refused(row: Row) -> str:
    return f"| {_model(row)} | {_clipped(row)} | {row['policy']} | no plan: {row['refused']} |"


def _line(row: Row) -> str:
    found = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["bounds"].items() if seconds >= 0.005)
    wanted = "reported" if row["clipped"] else "yes" if meets(row) else f"**no** ({WANTED[row['lead'] >= _LEAD]:.2f})"
    hidden = f"{100 * row['hidden']:.0f} %" if "hidden" in row else ""
    placed = row["placed"]
    shares = ", ".join(f"{placed[f'{state}_in_ram']:.2f}" for state in ("weights", "states", "gradients"))
    moved = f"{row['read_per_parameter']:.1f} + {row['written_per_parameter']:.1f}"
    return (
        f"| {_model(row)} | {_clipped(row)} | {row['policy']} | {row['seconds']:.2f} | {found} "
        f"| {row['of_bound']:.2f} | {wanted} | {hidden} | {moved} | {shares} |"
    )


def _clipped(row: Row) -> str:
    return "always" if row["clipped"] else "never"


def _rates(machine: SimulatedMachine) -> str:
    giga = 1e9
    said = {
        "cores": f"{machine.cores:.0f}",
        "RAM": f"{machine.host_bytes / 2**30:.0f} GiB",
        "device": f"{machine.device_bytes / 2**30:.0f} GiB",
        "dram": f"{machine.dram / giga:.0f} GB/s",
        "disk": f"{machine.disk_read / giga:.0f} + {machine.disk_write / giga:.0f} GB/s",
        "up, down": f"{machine.up / giga:.0f} + {machine.down / giga:.0f} GB/s",
        "both": f"{machine.both / giga:.0f} GB/s",
        "flops": f"{machine.flops / 1e12:.0f} TFLOP/s",
        "adam": ", ".join(f"{form} {rate / giga:.2f} Gparam/s" for form, rate in machine.adam.items()),
        "checksums": f"{machine.checksums / giga:.0f} GB/s",
        "land": f"{machine.land / giga:.0f} Gparam/s",
        "disk_mixed": f"{machine.disk_mixed:g}",
        "disk_core_s_per_byte": f"{machine.disk_core_s_per_byte:g}",
        "disk_latency_s": f"{machine.disk_latency_s:g}",
        "visit_s": f"{machine.visit_s:g}",
    }
    lines = [f"| {name} | {value} | {machine.sources.get(name, 'as given')} |" for name, value in said.items()]
    return "\n".join(["| rate | value | source |", "|---|---|---|", *lines])


def calibration_table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return tables of predicted and measured seconds, with the rates."""
    lines = ["| steps measured in | tokens | case | predicted s | measured s | predicted / measured, median of rounds "
             "| within 15 % |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, result in found.items():
        work = result["workload"]
        for contender, each in result["contenders"].items():
            lines.append(
                f"| {name} | {work['batch'] * work['tokens']} | {contender} | {each['predicted']:.2f} "
                f"| {each['measured']:.2f} | {each['ratio']:.2f} | {'yes' if each['within'] else '**no**'} |"
            )
    return "\n".join(lines) + "\n"


def gpu_table(steps: Sequence[Row]) -> str:
    """Return a table of predicted and measured seconds of steps on a GPU."""
    lines = [
        "| run | row | predicted s | measured s | predicted / measured | within 15 % |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['run']} | {each['row']} | {each['predicted']:.2f} | {each['measured']:.2f} | {each['ratio']:.2f} "
        f"| {'yes' if each['within'] else '**no**'} |"
        for each in steps
    ]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the ratio of the step to its largest bound, with a bar for each scenario."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if "refused" not in row]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(shown)), layout="constrained")
    labels = [
        f"{row['machine']} {_model(row)}{', clipped' if row['clipped'] else ''}"
        + ("" if row["policy"] == "as is" else f" [{row['policy']}]")
        for row in shown
    ]
    colours = ["tab:gray" if row["clipped"] else "tab:green" if meets(row) else "tab:red" for row in shown]
    axes.barh(range(len(shown)), [row["of_bound"] for row in shown], color=colours)
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("simulated step / largest bound (gray: clips in every step; red: more than is wanted)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
