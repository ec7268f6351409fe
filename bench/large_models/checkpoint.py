"""Checkpoint of a Llama of a given size with random weights, written tensor by tensor, and text to train it on."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from peers.workload import Workload

from infinity.checkpoint.safetensors_writer import Piece
from infinity.checkpoint.save_pretrained import Tensors, write_configs, write_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from make_demo_checkpoint import VOCABULARY, collect_text, train_tokenizer

_HEAD_WIDTH = 64
_HIDDEN_PER_LAYER = 56
"""Width divided by depth; the value is typical of models of a few billion parameters."""
_HIDDEN_MULTIPLE = 128
_SHARD = "500MB"
_TEXT_BYTES = 4 << 20


def shape_of(parameters: float, batch: int, tokens: int) -> Workload:
    """Return the Llama with the fewest layers that has at least this many parameters."""
    hidden = round(math.cbrt(parameters * _HIDDEN_PER_LAYER / 12) / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE
    hidden = max(hidden, _HIDDEN_MULTIPLE)
    shape = {
        "hidden": hidden,
        "intermediate": hidden * 8 // 3 // _HEAD_WIDTH * _HEAD_WIDTH,
        "heads": hidden // _HEAD_WIDTH,
        "vocabulary": VOCABULARY,
    }
    without = Workload(layers=0, **shape).numel
    per_layer = Workload(layers=1, **shape).numel - without
    layers = max(math.ceil((parameters - without) / per_layer), 1)
    return Workload(layers=layers, **shape, batch=batch, tokens=tokens, recompute=True)


def make_checkpoint(work: Workload, directory: Path) -> None:
    """Write checkpoint/ with a tokenizer, and text/, into `directory`, which is created under its name only when it is
    complete.

    One tensor is in memory at a time.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    from transformers import LlamaForCausalLM

    aside = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    collect_text(aside / "text", _TEXT_BYTES)
    checkpoint = aside / "checkpoint"
    checkpoint.mkdir()
    train_tokenizer(aside / "text").save_pretrained(checkpoint)
    with torch.device("meta"):
        model = LlamaForCausalLM(work.llama_config()).to(torch.bfloat16)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(work.seed)

    def meta() -> Iterator[Tensors]:
        yield {name: parameter.detach() for name, parameter in parameters.items()}

    def values() -> Iterator[list[Piece]]:
        for name, parameter in parameters.items():
            value = torch.ones(parameter.shape, dtype=torch.bfloat16)  # values of the norms
            if parameter.dim() > 1:
                value.normal_(0.0, model.config.initializer_range, generator=generator)
            yield [(name, 0, value)]

    write_weights(checkpoint, meta(), values(), sum(each.numel() for each in parameters.values()), _SHARD)
    write_configs(model, checkpoint)
    aside.rename(directory)


def tensor_bytes(checkpoint: Path) -> int:
    """Return the bytes of a checkpoint's tensors, read from the headers of its files."""
    from safetensors import safe_open

    total = 0
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            total += sum(2 * math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total
