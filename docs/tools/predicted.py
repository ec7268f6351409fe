"""Write docs/reference/predicted.md: what `infinity plan` says of every preset on three machines that are not here.

`make docs` runs this. tests/docs/test_predicted.py compares the page with what this script would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import on_machine
from infinity.cli.planning.model import Batch, adapt, build
from infinity.cli.planning.presets import PRESETS
from infinity.cli.planning.report import duration
from infinity.cli.planning.scenario import Scenario
from infinity.config import load_config
from infinity.errors import PlanError
from infinity.plan.disk import Disks

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
`infinity plan --model PRESET --machine MACHINE --batch-size {SEQUENCES} --sequence-length {LENGTH}` prints a cell of
the first table as a whole report, with every rate and where it comes from; `--set moments=int8`, and `--lora 16
--frozen nf4` (with `--ranks 1` on several GPUs), print those of the others. How near predictions come to what was
measured on a machine that is here: [infinity plan](../plan.md).

A cell has the time of one step of {SEQUENCES * LENGTH:,} tokens for each GPU, what it is bound by, and the terabytes
that 1,000 steps write to all drives. `weights` and `optimizer` are `auto`; activations are recomputed. A step with more
tokens takes hardly longer where the disk is the bound (`--micro-batches`).
"""


def machine_line(name: str) -> str:
    machine = MACHINES[name]
    many = f"{machine.gpus} × " if machine.gpus > 1 else ""
    return (
        f"| `{name}` | {many}{machine.device_bytes / 2**30:.0f} GiB, {machine.flops / 1e12:.0f} TFLOP/s | "
        f"{machine.host_bytes / 2**30:.0f} GiB, {machine.dram / 1e9:.0f} GB/s, {machine.cores:.0f} cores | "
        f"{machine.disks}, {machine.disk_read / 1e9:.0f} GB/s read, {machine.disk_write / 1e9:.0f} GB/s written |"
    )


def scenario(preset: str, name: str, form: dict[str, str]) -> Scenario:
    machine, model = MACHINES[name], build(preset, torch.bfloat16)
    ranks = machine.gpus
    if "frozen" in form:
        adapt(model, 16)
        ranks = 1  # several ranks cannot share encoded weights yet
    return Scenario(
        model=model,
        config=on_machine(machine, load_config({"weights": "auto", "optimizer": "auto", **form})),
        machine=machine,
        disks=Disks(machine.disk_bytes // ranks),
        device=torch.device("cuda", 0),
        batch=Batch(SEQUENCES, LENGTH),
        ranks=ranks,
    )


def cell(preset: str, name: str, form: dict[str, str]) -> str:
    given = scenario(preset, name, form)
    try:
        found = given.outcome()
    except PlanError as error:
        what = str(error)
        if what.startswith("the swap file"):
            return "does not fit (drives)"
        return f"does not fit ({'memory.host' if what.startswith(('memory.host', 'the plan')) else 'memory.device'})"
    if not found.activations_fit:
        return "does not fit (activations)"
    written = given.ranks * found.prediction.moved.written_bytes / 1e9
    alone = " (one GPU)" if given.ranks < MACHINES[name].gpus else ""
    return f"{duration(found.prediction.seconds)}, {found.prediction.bound}, {written:,.2f} TB{alone}"


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


if __name__ == "__main__":
    PAGE.write_text(page())
