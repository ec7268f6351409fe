"""Directory in which the commands of the documentation run as they are written.

The sandbox contains a small model, small data, swap configs and a script, under the names that the pages use. A disk
that a page calls /mnt/… is a folder of the sandbox.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests import processes, sampling
from tests.docs.pages import ROOT, Block, blocks

MODEL = "path/or/hub-id"
_TIMEOUT_S = 300
_TEXT = "Once upon a time the quick brown fox asked a hen what a fox is. The hen said nothing, and the fox went on.\n"
_TALK = [{"role": "user", "content": "What is a fox?"}, {"role": "assistant", "content": "Quick and brown."}]
_WORSE = [{"role": "assistant", "content": "I do not know."}]
_SWAP = {"weights": "nvme", "optimizer": "nvme", "memory": {"device": "64MiB", "host": "256MiB"}, "commit_every": 1}
STOPPED = f"""\
import os, signal, sys
import infinity
from infinity.cli.main import main

step, steps = infinity.AdamW.step, []

def stopping(optimizer, *arguments, **options):
    steps.append(optimizer)
    if len(steps) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return step(optimizer, *arguments, **options)

infinity.AdamW.step = stopping
code = main(["finetune", "--model", "{MODEL}", "--data", "notes.txt", "--config", "there.yaml", "--output", "stopped",
             "--steps", "8", "--sequence-length", "32"])
sys.exit(0 if code == 130 else f"the run ended with {{code}}")
"""
"""Code that starts a run of eight steps and stops the run with Ctrl-C after three steps."""

PRELUDE = """\
import torch
import infinity

tokens = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(0))
dataset = [{"input_ids": each, "labels": each} for each in tokens]
loader = torch.utils.data.DataLoader(dataset)
"""
MODEL_IN_PRELUDE = f"""\
model = infinity.load_pretrained("{MODEL}", "swap.yaml")
optim = infinity.AdamW(model.parameters(), lr=1e-5)
"""
"""Code before blocks that continue with the model and the optimizer of a previous block."""


def make_things(place: Path) -> None:
    """Make the model, its tokenizer and the data, which are the same for every block."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = next(block.text for block in blocks("jinja") if block.page == "docs/finetune.md")
    tokenizer.save_pretrained(place / MODEL)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=4096)
    LlamaForCausalLM(config).bfloat16().save_pretrained(place / MODEL)
    (place / "notes.txt").write_text(_TEXT * 600)
    (place / "chats.jsonl").write_text((json.dumps({"messages": _TALK}) + "\n") * 50)
    rows = {"texts": {"text": _TEXT}, "preferences": {"prompt": _TALK[:1], "chosen": _TALK[1:], "rejected": _WORSE}}
    for name, row in rows.items():
        (place / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 50)
    for recipe in (ROOT / "examples" / "recipes").glob("*.py"):
        shutil.copy(recipe, place)
    (place / "texts").mkdir()
    (place / "texts/one.txt").write_text(_TEXT * 100)


def byte_level_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>")


def make_files(place: Path, block: Block) -> None:
    """Write the swap configs and the script that the page shows before the block, or default configs and a default
    script.
    """
    for name in ("nvme", "nvme0", "nvme1", "fast-disk", "a", "b"):
        (place / "mnt" / name).mkdir(parents=True, exist_ok=True)
    files = {"swap.yaml": _SWAP | {"nvme": {"paths": ["swap"]}}, "other.yaml": {"nvme": {"paths": ["elsewhere"]}}}
    for name, config in files.items():
        (place / name).write_text(yaml.safe_dump(config))
    script = next(each for each in blocks("python") if each.marks.get("file") == "train.py")
    (place / "train.py").write_text(script.text)
    for each in blocks("yaml", "json", "python"):
        if each.page == block.page and each.line < block.line and "file" in each.marks:
            (place / each.marks["file"]).write_text(here(each.text, place))


def stop_a_run(directory: str, place: Path) -> None:
    """Make a run that stops early, so that its swap directory contains a run that can be resumed."""
    config = _SWAP | {"nvme": {"paths": [here(directory, place)]}}
    (place / "there.yaml").write_text(yaml.safe_dump(config))
    require_success([sys.executable, "-c", STOPPED], place)


def here(text: str, place: Path) -> str:
    """Return the text with the sandbox's folder in place of /mnt."""
    return text.replace("/mnt/", f"{place}/mnt/")


def environment(place: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hf"), "XDG_CACHE_HOME": str(place / "cache")}
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    recipes = {"STEPS": "2", "EVERY": "2", "LENGTH": "128"}
    return {**os.environ, "PATH": path, **offline, **quiet, **recipes}


def require_success(command: list[str], place: Path) -> None:
    done = subprocess.run(
        command,
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (
        f"{command}\nended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )


def run_shell(block: Block, place: Path) -> None:
    require_success(["bash", "-euo", "pipefail", "-c", here(block.text, place)], place)


def run_python(code: str, place: Path) -> None:
    """Run code in a separate process. In `make test`, this process is forked from a process that has imported the
    libraries.
    """
    if sampling.SHARE:
        require_success([sys.executable, "-c", code], place)
        return
    done = processes.run(_execute, code, str(place), environment(place))
    assert done.returncode == 0, f"{code}\nended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def _execute(code: str, place: str, variables: dict[str, str]) -> None:
    import huggingface_hub.constants

    os.environ.clear()
    os.environ.update(variables)
    os.chdir(place)
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # the libraries read HF_HUB_OFFLINE when they are imported
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
