#!/usr/bin/env python3
"""Peak memory and losses of plain scripts that add a new head to a checkpoint, with and without `infinity run`.

The checkpoint is twice as large as memory.host. The scripts train a sequence classifier with a loop, and a reward model
with TRL's RewardTrainer.

    python bench/new_head.py
    python bench/new_head.py --hidden 256 --layers 2 --host 16 --device 16    # to try the script itself

Each script runs in a separate process. The peak memory of a script is the peak that the kernel counted, including
pages of mapped files. The reported peak does not include the memory of the process before the model was loaded. The
libraries have trained a tiny model before that moment. Weights are fp32, so that the losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
STEPS = 3
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def warmed_up() -> int:
    """Return the memory of the process after the libraries have trained a tiny model."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1, vocab_size=64, pad_token_id=0
    )
    model = LlamaForSequenceClassification(config)
    optim = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(2, 8, dtype=torch.int64), labels=torch.tensor([0, 1])).loss.backward()
    optim.step()
    return rss()


def classification(checkpoint: Path) -> tuple[int, list[float]]:
    """Train a classifier. Returns the memory of the process before the model was loaded, and the losses."""
    import torch
    from transformers import AutoModelForSequenceClassification

    before = warmed_up()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=3, pad_token_id=0).train()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(1, 512, (4, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=torch.tensor([0, 1, 2, 0])).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return before, losses


def reward(checkpoint: Path) -> tuple[int, list[float]]:
    """Train a reward model. Returns the memory of the process before the model was loaded, and the losses."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    rows = [json.loads(line) for line in (checkpoint.parent / "preferences.jsonl").read_text().splitlines()[:16]]
    args = RewardConfig(
        output_dir=str(checkpoint.parent / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        max_length=128,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    before = warmed_up()
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1, dtype=torch.float32)
    trainer = RewardTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    return before, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


SCRIPTS = {"classification": classification, "reward": reward}


def run(command: list[str], log: Path) -> tuple[int, dict[str, Any]]:
    """Run a command. Returns the peak memory of the script's process, and the JSON that the script wrote."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}:\n{log.read_text()[-3000:]}")
    return usage.ru_maxrss * 1024, json.loads(log.with_suffix(".json").read_text())


def measure(work: Path, name: str, budget: int) -> dict[str, Any]:
    """Run a script without and with infinity; return the peaks and losses of both."""
    me = [str(Path(__file__).resolve()), "--work", str(work), "--part", name, "--result"]
    found: dict[str, Any] = {}
    for kind, launcher in (("plain", []), ("infinity", ["-m", "infinity.run", str(work / "swap.json")])):
        log = work / f"{name}-{kind}.log"
        peak, said = run([sys.executable, *launcher, *me, str(log.with_suffix(".json"))], log)
        found[kind] = {"peak_MiB": (peak - said["before"]) / MIB, "losses": said["losses"]}
        if kind == "infinity":
            found[kind]["peak_over_budgets"] = (peak - said["before"]) / budget
            found[kind]["said"] = next(line for line in log.read_text().splitlines() if "it takes" in line)
    pairs = list(zip(*(found[kind]["losses"] for kind in ("plain", "infinity")), strict=True))
    found["largest_difference_of_losses"] = max(abs(ours / plain - 1) for plain, ours in pairs)
    if len(pairs) != STEPS or not all(math.isclose(*pair, rel_tol=1e-4) for pair in pairs):
        raise SystemExit(f"{name}: the losses differ: {pairs}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/bench-new-head"))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--host", type=int, default=200, help="memory.host, in MiB")
    parser.add_argument("--device", type=int, default=200, help="memory.device, in MiB")
    parser.add_argument("--part", choices=["make", *SCRIPTS], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "make":
        import torch

        from examples.make_demo_checkpoint import make_checkpoint

        make_checkpoint(args.work / "in", args.hidden, args.layers, 8192, torch.float32, 100_000)
        return
    if args.part:
        before, losses = SCRIPTS[args.part](args.work / "in" / "checkpoint")
        args.result.write_text(json.dumps({"before": before, "losses": losses}))
        return
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    try:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", "make"], check=True, env=ENVIRONMENT)
        swap = {
            "weights": "nvme",
            "optimizer": "nvme",
            "activations": "recompute",
            "memory": {"device": f"{args.device}MiB", "host": f"{args.host}MiB"},
            "nvme": {"paths": [str(args.work.resolve() / "swap")]},
            "commit_every": 0,
        }
        (args.work / "swap.json").write_text(json.dumps(swap))
        nbytes = sum(file.stat().st_size for file in (args.work / "in" / "checkpoint").glob("*.safetensors"))
        print(json.dumps({"checkpoint_MiB": nbytes / MIB, "host_MiB": args.host, "device_MiB": args.device}))
        for name in SCRIPTS:
            print(json.dumps({name: measure(args.work, name, (args.host + args.device) * MIB)}, indent=2), flush=True)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)


if __name__ == "__main__":
    main()
