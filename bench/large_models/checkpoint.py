"""Checkpoint of a Llama, or of a mixture of experts, of a given size with random weights, written tensor by tensor, and
text to train it on."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from peers.workload import Workload

from infinity.checkpoint.safetensors_writer import Piece
from infinity.checkpoint.save_pretrained import Tensors, revert_of, write_configs, write_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from make_demo_checkpoint import VOCABULARY, collect_text, train_tokenizer

_HEAD_WIDTH = 64
_HIDDEN_PER_LAYER = 56
"""Width divided by depth; the value is typical of models of a few billion parameters."""
_HIDDEN_MULTIPLE = 128
_MIXTURE = {"hidden": 1024, "intermediate": 768, "heads": 16, "vocabulary": VOCABULARY}
_CHOSEN = 4
_SHARD = "500MB"
_FP8_BLOCK = 128
_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
    "activation_scheme": "dynamic",
}
_TEXT_BYTES = 4 << 20


def shape_of(parameters: float, batch: int, tokens: int, experts: int = 0) -> Workload:
    """Return the model with the fewest layers that has at least this many parameters: a Llama, or with experts a
    mixture with narrow experts, of which each token uses _CHOSEN."""
    if experts:
        return _deep_enough(parameters, batch, tokens, _MIXTURE | {"experts": experts, "chosen": _CHOSEN})
    hidden = round(math.cbrt(parameters * _HIDDEN_PER_LAYER / 12) / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE
    hidden = max(hidden, _HIDDEN_MULTIPLE)
    shape = {
        "hidden": hidden,
        "intermediate": hidden * 8 // 3 // _HEAD_WIDTH * _HEAD_WIDTH,
        "heads": hidden // _HEAD_WIDTH,
        "vocabulary": VOCABULARY,
    }
    return _deep_enough(parameters, batch, tokens, shape)


def _deep_enough(parameters: float, batch: int, tokens: int, shape: dict[str, int]) -> Workload:
    without = Workload(layers=0, **shape).numel
    per_layer = Workload(layers=1, **shape).numel - without
    layers = max(math.ceil((parameters - without) / per_layer), 1)
    return Workload(layers=layers, **shape, batch=batch, tokens=tokens, recompute=True)


def make_checkpoint(work: Workload, directory: Path, *, fp8: bool = False) -> None:
    """Write checkpoint/ with a tokenizer, and text/, into `directory`, which is created under its name only when it is
    complete. With `fp8`, the weights of linear layers and of experts are in FP8, as DeepSeek publishes them.

    One tensor is in memory at a time. Experts are written one by one, as in public checkpoints.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    from transformers import AutoModelForCausalLM

    aside = directory.with_name(f"{directory.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    collect_text(aside / "text", _TEXT_BYTES)
    checkpoint = aside / "checkpoint"
    checkpoint.mkdir()
    train_tokenizer(aside / "text").save_pretrained(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(work.config(), dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    revert = revert_of(model)

    def in_files(tensors: Tensors) -> Tensors:
        found = revert(tensors)
        return {key: each for name, value in found.items() for key, each in _in_fp8(name, value)} if fp8 else found

    generator = torch.Generator().manual_seed(work.seed)

    def meta() -> Iterator[Tensors]:
        for name, parameter in parameters.items():
            yield in_files({name: parameter.detach()})

    def values() -> Iterator[list[Piece]]:
        for name, parameter in parameters.items():
            value = torch.ones(parameter.shape, dtype=torch.bfloat16)  # values of the norms
            if parameter.dim() > 1:
                value.normal_(0.0, model.config.initializer_range, generator=generator)
            yield [(each, 0, part) for each, part in in_files({name: value}).items()]

    write_weights(checkpoint, meta(), values(), sum(each.numel() for each in parameters.values()), _SHARD)
    write_configs(model, checkpoint)
    if fp8:
        config = checkpoint / "config.json"
        values = json.loads(config.read_text()) | {"quantization_config": _FP8_CONFIG}
        config.write_text(json.dumps(values, indent=2))
    aside.rename(directory)


def _in_fp8(name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a weight in files: codes, and the scale of each block; or the weight itself."""
    if not name.endswith("_proj.weight"):
        return [(name, value)]
    rows, columns = (-(-side // _FP8_BLOCK) for side in value.shape)
    if value.is_meta:
        codes, scales = value.to(torch.float8_e4m3fn), torch.empty(rows, columns, device="meta")
    else:
        scales = torch.full((rows, columns), value.abs().max().item() / 448)  # the largest number of e4m3
        codes = (value / scales[0, 0]).to(torch.float8_e4m3fn)
    return [(name, codes), (f"{name}_scale_inv", scales)]


def tensor_bytes(checkpoint: Path) -> int:
    """Return the bytes of a checkpoint's tensors, read from the headers of its files."""
    from safetensors import safe_open

    total = 0
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                total += math.prod(tensor.get_shape()) * {"F32": 4, "BF16": 2, "F8_E4M3": 1}[tensor.get_dtype()]
    return total
