"""Check the demo: the loss fell clearly, and the swap directory has the generation of the last step."""

from __future__ import annotations

import csv
import sys
from pathlib import Path


def main() -> int:
    output, swap = Path(sys.argv[1]), Path(sys.argv[2])
    with (output / "loss.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
    print(f"loss fell from {first:.2f} to {last:.2f} in {len(losses)} steps")
    if not last < 0.8 * first:
        print("error: the loss did not fall clearly", file=sys.stderr)
        return 1
    if not (swap / f"generation-{len(losses):012d}.infinity").exists():
        print(f"error: {swap} has no generation of step {len(losses)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
