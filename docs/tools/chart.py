"""Drawing of docs/pictures/peers.svg: the step of each system beside the others, from the files of bench/results.

`make docs` runs this. tests/docs/test_chart.py compares the picture with the output of this script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "peers.svg"
ON_GPU = "2026-11-26-gpu-h200.json"
CHOSEN = "3.2 B, some units on the device, 8,192 tokens, clipped"
RESIDENT = "2026-11-27-gpu-h200-resident.json"
ON_CPU = "2026-11-21-step-overlap-256-clipped.json"
GB = 1e9
WIDTH, LABELS, ROW, TITLE, NOTE = 760, 250, 24, 34, 20
BARS = WIDTH - LABELS - 190


@dataclass(frozen=True)
class Bar:
    """A system's step: seconds, and bytes of the memory that the panel names."""

    system: str
    seconds: float
    memory: float
    ours: bool = False


@dataclass(frozen=True)
class Panel:
    """Steps of several systems under the same conditions."""

    title: str
    conditions: str
    memory: str
    bars: tuple[Bar, ...]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / name).read_text())
    return found


def on_gpu() -> Panel:
    rows = _read(ON_GPU)["runs"][0]["rows"]["measured"] | _read(RESIDENT)["runs"][1]["rows"]["measured"]

    def bar(system: str, row: str, *, ours: bool = False) -> Bar:
        return Bar(system, rows[row]["seconds"], rows[row]["device_gb"] * GB, ours)

    return Panel(
        "One H200: Llama of 3.2 B, 8,192 tokens",
        "bf16, recomputation; one run of each, 2026-11-26 (infinity on the device: 2026-11-27, clipped in every step)",
        "GPU memory",
        (
            bar("plain torch, all on the device", "3.2 B, torch, 8,192 tokens, clipped"),
            bar("infinity, as it chooses: on the device", CHOSEN, ours=True),
            bar("infinity, all states in RAM", "3.2 B, 8,192 tokens, clipped", ours=True),
            bar("FSDP2 with CPU offload", "3.2 B, FSDP2, 8,192 tokens, clipped"),
        ),
    )


def on_cpu() -> Panel:
    steps = _read(ON_CPU)["summary"]

    def bar(system: str, name: str, *, ours: bool = False) -> Bar:
        return Bar(system, steps[name]["median_s"], steps[name]["step_peak_rss_bytes"], ours)

    return Panel(
        "Two cores, one virtio disk: Llama of 222 M, 256 tokens",
        "bf16, clipped in every step; infinity and DeepSpeed 0.19.8 with states on NVMe; in turns, 2026-11-21",
        "RAM",
        (
            bar("plain torch, bf16 moments", "torch"),
            bar("infinity, weights in RAM", "infinity-host", ours=True),
            bar("infinity, weights on NVMe", "infinity-nvme", ours=True),
            bar("DeepSpeed, weights in RAM", "deepspeed"),
        ),
    )


def picture() -> str:
    lines, top = [], 8
    for panel in (on_gpu(), on_cpu()):
        lines += _panel(panel, top)
        top += TITLE + ROW * len(panel.bars) + NOTE + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        f'font-family="sans-serif" font-size="13">\n<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _panel(panel: Panel, top: int) -> Iterator[str]:
    slowest = max(bar.seconds for bar in panel.bars)
    yield f'<text x="8" y="{top + 18}" font-weight="bold">{panel.title}: seconds per step, {panel.memory}</text>'
    for number, bar in enumerate(panel.bars):
        at = top + TITLE + number * ROW
        length = bar.seconds / slowest * BARS
        color = "#1a6fb5" if bar.ours else "#9aa5b1"
        yield f'<text x="8" y="{at + 14}">{bar.system}</text>'
        yield f'<rect x="{LABELS}" y="{at + 2}" width="{length:.1f}" height="{ROW - 8}" fill="{color}"/>'
        yield f'<text x="{LABELS + length + 8:.1f}" y="{at + 14}">{bar.seconds:.2f} s, {bar.memory / GB:.1f} GB</text>'
    yield (
        f'<text x="8" y="{top + TITLE + ROW * len(panel.bars) + 14}" font-size="11" fill="#555555">'
        f"{panel.conditions}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
