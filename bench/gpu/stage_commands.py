"""Stage 7: every command, called as a user calls it, each with a separate small model.

Each command must end with success. A run that was killed and resumed must end with the same bits as an uninterrupted
run. Several commands run at the same time, because starting takes most of their time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.record import Options, Record, run
from gpu.runner import ROOT

_AT_ONCE = 16  # each command starts Python and spends most of its time on imports
_TRAINED = ["--sequence-length", "128", "--batch-size", "2", "--lr", "1e-3"]
_SCRIPT = """
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

folder, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
text = next(path.read_text() for path in sorted((Path(folder).parent / "text").iterdir()))
ids = (tokenizer(text[:20000])["input_ids"] * 10)[:640]
rows = [{"input_ids": (row := torch.tensor(ids[at : at + 64])), "labels": row} for at in range(0, 640, 64)]
arguments = TrainingArguments(
    out, max_steps=4, per_device_train_batch_size=2, report_to=[], logging_steps=1, save_strategy="no"
)
trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, train_dataset=rows)
assert trainer.train().training_loss < 20
"""


def stage(record: Record, options: Options) -> None:
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    model, text = work / "input" / "checkpoint", work / "input" / "text"
    made = record.measure("a model", "made", lambda: _make(work / "input", record), good=lambda found: found["rc"] == 0)
    if made is None or made["rc"]:
        return
    (work / "script.py").write_text(_SCRIPT)

    def swap(name: str, **fields: Any) -> list[str]:
        values = {
            "weights": "nvme",
            "optimizer": "nvme",
            "commit_every": 1,
            "nvme": {"paths": [str(work / name)]},
            "memory": {"device": "1GiB", "host": "2GiB"},  # other commands compute on the device at the same time
        }
        (work / f"{name}.yaml").write_text(json.dumps(values | fields))
        return ["--config", str(work / f"{name}.yaml")]

    def finetune(name: str, steps: int, *more: str) -> list[str]:
        files = ["--model", str(model), "--data", str(text), "--output", str(work / f"out-{name}")]
        return ["finetune", *files, *swap(name), "--steps", str(steps), *_TRAINED, *more]

    still = {"commit_every": 0}
    write = ["--prompt", "the quick brown", "--max-tokens", "8"]
    commands: dict[str, Sequence[str]] = {
        "doctor": ["doctor", *swap("doctor")[1:]],
        "plan": ["plan", "--model", str(model), *swap("plan")],
        "finetune": finetune("whole", 6, "--verify-output"),
        "finetune, evaluated": finetune(
            "eval", 4, "--eval-split", "0.1", "--eval-steps", "2", "--sample", "the quick", "--sample-tokens", "4"
        ),
        "finetune, micro-batches": finetune("micro", 3, "--micro-batches", "2"),
        "finetune, accumulation": finetune("sums", 3, "--gradient-accumulation", "2"),
        "finetune, LoRA on NF4": finetune("lora", 4, "--lora", "8", "--frozen", "nf4"),
        "generate": ["generate", "--model", str(work / "out-whole"), *swap("write", **still), *write],
        "generate, adapters": ["generate", "--model", str(work / "out-lora"), *swap("adapters", **still), *write],
        "run, a Trainer's script": ["run", swap("run")[1], str(work / "script.py"), str(model), str(work / "trained")],
    }
    trains = all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))
    if not trains:
        commands["generate"] = ["generate", "--model", str(model), *swap("write", **still), *write]
        for name in [name for name in commands if name.startswith("finetune") or name == "generate, adapters"]:
            record.skip(name, "TRL and datasets are not installed here")
            del commands[name]
    trained = {"generate": "finetune", "generate, adapters": "finetune, LoRA on NF4"}
    begun: dict[str, Future[dict[str, Any]]] = {}

    def call(name: str) -> dict[str, Any]:
        if trained.get(name) in begun:
            begun[trained[name]].result()
        return _call(commands[name], record)

    def killed() -> dict[str, Any]:
        again = _killed(finetune("killed", 6), work, record)
        begun["finetune"].result()
        return again | {"same": _same(work / "out-whole", work / "out-killed")}

    with ThreadPoolExecutor(_AT_ONCE) as at_once:
        for name in commands:
            begun[name] = at_once.submit(call, name)
        if trains:
            begun["finetune, killed and resumed"] = at_once.submit(killed)
        for name, future in begun.items():
            record.measure(name, "ends with 0, its bits are those expected", future.result, good=_is_well)


def _is_well(found: dict[str, Any]) -> bool:
    return found["rc"] == 0 and found.get("same", True)


def _make(folder: Path, record: Record) -> dict[str, Any]:
    size = ["--hidden", "256", "--layers", "4", "--vocabulary", "2048", "--text-bytes", "200000"]
    return _done([sys.executable, str(ROOT / "examples" / "make_demo_checkpoint.py"), str(folder), *size], record)


def _call(command: Sequence[str], record: Record) -> dict[str, Any]:
    return _done([sys.executable, "-m", "infinity", *command], record)


def _done(command: Sequence[str], record: Record) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(record.left_s - 2, 1), check=False
    )
    print(done.stdout[-3000:], done.stderr[-6000:], sep="\n", file=sys.stderr)
    found: dict[str, Any] = {"rc": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    return found | {"tail": (done.stderr.strip() or done.stdout.strip())[-1500:] if done.returncode else ""}


def _killed(command: Sequence[str], work: Path, record: Record) -> dict[str, Any]:
    """Kill the run as soon as a step is durable, and resume the run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "infinity", *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and record.left_s > 12:
            if any(
                int(path.name.split("-")[1].split(".")[0]) for path in (work / "killed").glob("generation-*.infinity")
            ):
                break
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return _call(["finetune", "--resume", str(work / "killed")], record)


def _same(*folders: Path) -> bool:
    """Return whether the models in all these folders have the same bytes."""
    files = [folder / "model.safetensors" for folder in folders]
    return all(path.exists() for path in files) and len({path.read_bytes() for path in files}) == 1


if __name__ == "__main__":
    run(stage)
