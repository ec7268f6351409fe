"""A picture of the sweep: rate over depth and over block size, for each path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.cli.bench.report import PathReport, format_block
from infinity.cli.bench.sweep import Point


def plot(reports: Sequence[PathReport], path: Path) -> None:
    """Write a PNG: a row per path; the bars are the slowest and fastest run.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(reports), 2, figsize=(11, 4 * len(reports)), squeeze=False)
    for (left, right), report in zip(rows, reports, strict=True):
        _draw(left, report.points, by_depth=True)
        _draw(right, report.points, by_depth=False)
        left.set_title(f"{report.path}: blocks of 1 MiB")
        right.set_title("about as many bytes in flight")
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _draw(axes: Any, points: Sequence[Point], *, by_depth: bool) -> None:
    for kind, marker in (("read", "o"), ("overwrite", "s")):
        chosen = [point for point in points if point.workload.kind == kind]
        if by_depth:
            chosen = [point for point in chosen if point.workload.block_bytes == 1 << 20]
            where = [point.workload.queue_depth for point in chosen]
        else:
            # One point per block: the one with the most in flight.
            best = {point.workload.block_bytes: point for point in chosen}
            chosen = list(best.values())
            where = [point.workload.block_bytes for point in chosen]
        rates = [point.rate / 1e9 for point in chosen]
        low = [point.rate / 1e9 - min(s.rate for s in point.samples) / 1e9 for point in chosen]
        high = [max(s.rate for s in point.samples) / 1e9 - point.rate / 1e9 for point in chosen]
        axes.errorbar(where, rates, yerr=[low, high], marker=marker, capsize=3, label=kind)
        axes.set_xscale("log", base=2)
        axes.set_xticks(where, [str(x) if by_depth else format_block(x) for x in where])
    axes.set_xlabel("queue depth" if by_depth else "block")
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
