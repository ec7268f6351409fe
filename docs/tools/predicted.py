"""Writer of docs/reference/predicted.md: the prediction of `infinity plan` for every preset on three machines.

It also writes two other tables: in the README, some of these predictions beside measurements on an H200; in
docs/recipes.md, the needs of the recipes in examples/recipes.

`make docs` runs this script. tests/docs/test_predicted.py compares the page and the tables with its output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import on_machine
from infinity.cli.planning.model import adapt, build
from infinity.cli.planning.plan_report import duration
from infinity.cli.planning.public_models import PRESETS
from infinity.cli.planning.scenario import PlanScenario
from infinity.config import SwapConfig, load_config
from infinity.errors import PlanError
from infinity.integrations.checkpoint_folders import pins_for
from infinity.plan.disk import DiskLimits
from infinity.sizes import format_bytes
from infinity.state.training_step import BatchShape

PAGE = Path(__file__).parents[1] / "reference" / "predicted.md"
GENERATED = "<!-- Written by docs/tools/predicted.py. Change the code it reads, then run `make docs`. -->\n\n"
ON = ("consumer", "h200", "8xh200")
LENGTH, SEQUENCES = 2048, 4
FORMS = {
    "Full fine-tuning, exact (fp32 moments)": {},
    "Full fine-tuning, 8-bit moments": {"moments": "int8"},
    "LoRA of rank 16 on a base in 4 bits": {"frozen": "nf4"},
}
HEAD = f"""\
# Predicted: every preset on three machines

**Nothing here was measured.** These are the predictions of `infinity plan`, with rates from data sheets;
`infinity plan --model PRESET --machine MACHINE --batch-size {SEQUENCES} --sequence-length {LENGTH}` prints the whole
report of a cell of the first table, with every rate and its source; with `--set moments=int8`, or with
`--lora 16 --frozen nf4`, it prints those of the other tables. The page
[infinity plan](../plan.md) compares predictions with measurements.

A cell has the time of one step of {SEQUENCES * LENGTH:,} tokens for each GPU, its bound, and the terabytes that 1,000
steps write to all drives. `weights` and `optimizer` are `auto`; activations are recomputed. If the disk is the
bound, a step with more tokens takes hardly longer (`--micro-batches`).
"""

README = Path(__file__).parents[2] / "README.md"
RESULTS = Path(__file__).parents[2] / "bench" / "results"
MEASURED = ("2026-11-27-gpu-h200-resident.json", "2026-11-27-gpu-h200.json")
"""Files of measurements, the newest first."""
TABLE = re.compile(r"(<!-- Written by docs/tools/predicted.py. -->\n)(.*?)(\n\n)", re.DOTALL)
IN_README = {
    "8 B, all parameters": ("llama-3-8b", {}, "8.0 B, some units on the device, 8,192 tokens, unclipped"),
    "8 B, all parameters, 8-bit moments": (
        "llama-3-8b",
        {"moments": "int8"},
        "8.0 B, int8, 8,192 tokens, unclipped, during backward",
    ),
    "8 B, LoRA on a base in 4 bits": (
        "llama-3-8b",
        {"frozen": "nf4"},
        "8.0 B, LoRA on NF4, 8,192 tokens, clipped",
    ),
    "32 B, all parameters, 8-bit moments": ("qwen3-32b", {"moments": "int8"}, ""),
    "70 B, LoRA on a base in 4 bits": ("llama-3-70b", {"frozen": "nf4"}, ""),
}
"""Preset, form, and name of the row in the files of measurements, by the row's title."""

RECIPES_PAGE = Path(__file__).parents[1] / "recipes.md"
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
IN_RECIPES = {
    "full": BatchShape(4, 2048, passes=2),
    "lora": BatchShape(4, 2048, passes=2),
    "dpo": BatchShape(4, 1024, passes=2),
    "reward": BatchShape(4, 1024, passes=2),
    "deepspeed": BatchShape(4, 2048, passes=2),
}
"""Work of a step by recipe. A pair of DPO's and of the reward model's is two sequences."""
FOLDERS = 3
"""Number of checkpoint folders that the scripts keep."""


def machine_line(name: str) -> str:
    machine = MACHINES[name]
    many = f"{machine.gpus} × " if machine.gpus > 1 else ""
    return (
        f"| `{name}` | {many}{machine.device_bytes / 2**30:.0f} GiB, {machine.flops / 1e12:.0f} TFLOP/s | "
        f"{machine.host_bytes / 2**30:.0f} GiB, {machine.dram / 1e9:.0f} GB/s, {machine.cores:.0f} cores | "
        f"{machine.disks}, {machine.disk_read / 1e9:.0f} GB/s read, {machine.disk_write / 1e9:.0f} GB/s written |"
    )


def scenario(preset: str, name: str, form: dict[str, str]) -> PlanScenario:
    config = load_config({"weights": "auto", "optimizer": "auto", **form})
    return of_config(preset, name, config, BatchShape(SEQUENCES, LENGTH))


def of_config(preset: str, name: str, config: SwapConfig, batch: BatchShape) -> PlanScenario:
    machine, model = MACHINES[name], build(preset, torch.bfloat16)
    ranks = machine.gpus
    if config.frozen != "auto":
        adapt(model, 16, experts=False)
    return PlanScenario(
        model=model,
        config=on_machine(machine, config),
        machine=machine,
        disks=DiskLimits(machine.disk_bytes // ranks),
        device=torch.device("cuda", 0),
        batch=batch,
        ranks=ranks,
    )


def cell(preset: str, name: str, form: dict[str, str], *, bound: bool = True) -> str:
    """Return the seconds of a step, its bound if `bound`, and the terabytes that 1,000 steps write."""
    given = scenario(preset, name, form)
    try:
        found = given.outcome()
    except PlanError as error:
        what = str(error)
        if what.startswith("several ranks"):
            return "does not fit (weights on NVMe)"
        if what.startswith("the swap file"):
            return "does not fit (drives)"
        return f"does not fit ({'memory.host' if what.startswith(('memory.host', 'the plan')) else 'memory.device'})"
    if not found.activations_fit:
        return "does not fit (activations)"
    written = given.ranks * found.written_bytes / 1e9
    alone = " (one GPU)" if given.ranks < MACHINES[name].gpus else ""
    by = f", {found.prediction.bound}" if bound else ""
    return f"{duration(found.prediction.seconds)}{by}, {written:,.2f} TB{alone}"


def page() -> str:
    return GENERATED + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    yield "| machine | GPU | RAM | drives |\n|---|---|---|---|"
    yield from map(machine_line, ON)
    for title, form in FORMS.items():
        yield f"\n## {title}\n"
        yield f"| preset | {' | '.join(f'`{name}`' for name in ON)} |\n|---|{'---|' * len(ON)}"
        for preset in PRESETS:
            yield f"| {preset} | {' | '.join(cell(preset, name, form) for name in ON)} |"


def readme_row(title: str) -> str:
    preset, form, row = IN_README[title]
    cells = [cell(preset, name, form, bound=False) for name in ("consumer", "h200")]
    return f"| {' | '.join([title, *cells, measured(row)])} |"


def measured(row: str) -> str:
    """Return the seconds of a step in the newest run that has the row."""
    for name in MEASURED:
        for run in reversed(json.loads((RESULTS / name).read_text())["runs"]):
            rows = run.get("rows", {}).get("measured", {})
            if row in rows:
                return f"{rows[row]['seconds']:.2f} s"
    return "not measured"


def readme_table() -> str:
    head = (
        "| model and job | 24 GB GPU, 64 GB RAM, one SSD: predicted | H200, 128 GB RAM, one SSD: predicted | the same: "
        "measured |\n|---|---|---|---|"
    )
    return "\n".join([head, *map(readme_row, IN_README)])


def recipe_row(name: str) -> str:
    """Return the row of a recipe for a model of 8 B on a machine with a GPU of 24 GB."""
    batch, config = IN_RECIPES[name], load_config(RECIPES / f"{name}.yaml")
    given = of_config("llama-3-8b", "consumer", config.model_copy(update={"pins": pins_for(FOLDERS)}), batch)
    if name == "dpo":  # the reference model gets half of the device memory and a fifth of the RAM
        memory = given.config.memory
        share = memory.model_copy(update={"device": memory.device // 2, "host": memory.host * 4 // 5})
        given = replace(given, config=given.config.model_copy(update={"memory": share}))
    found = given.outcome()
    assert found.activations_fit, name
    device = found.plan.device_bytes + found.work.peak_bytes
    cells = [
        name,
        f"{batch.tokens * batch.count:,}",
        duration(found.prediction.seconds),
        f"{found.written_bytes / 1e9:,.2f} TB",
        format_bytes(device),
        format_bytes(found.plan.host_bytes),
        format_bytes(found.plan.layout.swap.nbytes),
    ]
    return f"| {' | '.join(cells)} |"


def recipes_table() -> str:
    head = (
        "| recipe | tokens of a step | time of a step | written in 1,000 steps | device memory | RAM | swap files |\n"
        "|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *map(recipe_row, IN_RECIPES)])


def with_table(page: Path, table: str) -> str:
    """Return the page with the table replaced."""
    return TABLE.sub(lambda found: found[1] + table + found[3], page.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(with_table(README, readme_table()))
    RECIPES_PAGE.write_text(with_table(RECIPES_PAGE, recipes_table()))
