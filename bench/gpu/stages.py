"""Table of the stages: the question that each stage answers, and the stage's time limit.

The expectation of a single figure is written beside its measurement, in the stage's own module. The times in the table
are estimates for an H200 with 16 cores and PCIe Gen5 ×16.
"""

from __future__ import annotations

from gpu.runner import Stage

STAGES = (
    # If the build fails, no later stage can run; on few cores the build may therefore use the time of later stages.
    Stage(0, "machine", 240, "gpu.stage_machine", False, "the build, PCIe, memory, disk and I/O engine", 20, 400),
    Stage(1, "pinning", 25, "gpu.stage_pinning", True, "pin 4, 16, 64 GiB; a refusal leaves the GPU usable", 15),
    Stage(2, "copies", 30, "gpu.stage_copies", True, "50-56 GB/s each way, 80 both, 3 % of memory torch pinned", 15),
    Stage(3, "seam", 70, "gpu.stage_seam", True, "order and lifetimes of copies beside a kernel that sleeps", 20),
    Stage(4, "tests", 90, "gpu.stage_tests", True, "tests/gpu: the same bits from every tier", 20),
    Stage(5, "host", 25, "gpu.stage_host", False, "Adam alone 80-200 GB/s, 3-7 Gparam/s; the disk", 10),
    Stage(6, "step", 60, "gpu.stage_step", True, "a step of 1.24 B parameters in each placement beside torch", 25),
    Stage(7, "commands", 80, "gpu.stage_commands", True, "every command ends well; a killed run is resumed", 30),
    Stage(9, "ranks", 120, "gpu.stage_ranks", True, "two GPUs, two ranks: the bits of one process", 20),
    # The last stage uses the time that the other stages leave.
    Stage(8, "rows", 400, "gpu.stage_rows", True, "3.2 B and 8 B in RAM beside torch and FSDP2, and the bound", 30),
)

NUMBERS = tuple(sorted(stage.number for stage in STAGES))
