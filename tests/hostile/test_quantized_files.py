"""Checkpoints in FP8, NVFP4 and MXFP4 whose config or tensors' headers are absurd: the model is loaded, or the error is
typed."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest

import infinity
from infinity.errors import InfinityError
from tests.checkpoint.fp8 import qwen3, write_fp8
from tests.checkpoint.packed import FORMS
from tests.hostile.limits import failures
from tests.hostile.mutations import JSON_VALUES, mutate_tensors, mutated
from tests.hostile.stores import CASES, config
from tests.sampling import seed

Case = tuple[list[Path], Path, int]
"""Directories of the checkpoints, directory for this case alone, and number of the case."""


def mutate_config(path: Path, draw: random.Random) -> None:
    values = json.loads(path.read_text())
    values["quantization_config"] = mutated(values["quantization_config"], draw, JSON_VALUES)
    path.write_text(json.dumps(values))


_SAME_SIZE = {
    "F8_E4M3": ["F8_E5M2", "F8_E8M0", "U8", "I8", "BOOL"],
    "U8": ["F8_E4M3", "F8_E8M0", "I8", "BOOL"],
    "F32": ["I32", "U32"],
    "BF16": ["F16", "I16"],
    "I32": ["F32", "U32"],
    "I64": ["F64", "U64"],
}
_ENDS = ["", "_scale_inv", "_scale", ".weight", ".weight_packed", ".weight_scale_2", ".weight_global_scale", "_blocks"]


def mutate_a_tensor(path: Path, draw: random.Random) -> None:
    """Change name, dtype or shape of a tensor in the header of a safetensors file, which stays valid."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry = header.pop(name)
    act = draw.choice(["name", "dtype", "shape"])
    if act == "name":
        base, _, rest = name.rpartition(".weight" if ".weight" in name else "_")
        name = draw.choice(
            [name.replace("up", "down"), name + draw.choice(_ENDS), base + draw.choice(_ENDS), rest, "x"]
        )
    elif act == "dtype":
        entry["dtype"] = draw.choice(_SAME_SIZE[entry["dtype"]])
    else:
        entry["shape"] = draw.choice([entry["shape"][::-1], [math.prod(entry["shape"])], [1, *entry["shape"]]])
    text = json.dumps(header | {name: entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def check(case: Case) -> None:
    bases, work, number_of = case
    draw = random.Random(f"{seed('INFINITY_HOSTILE_SEED')} quantized {number_of}")
    copy = work / "copy"
    shutil.copytree(draw.choice(bases), copy)
    if (chosen := draw.choice(["config", "config", "a tensor", "a tensor", "tensors"])) == "config":
        mutate_config(copy / "config.json", draw)
    else:
        (mutate_a_tensor if chosen == "a tensor" else mutate_tensors)(copy / "model.safetensors", draw)
    try:
        model = infinity.load_pretrained(copy, config(work / "swap"), defer=True).requires_grad_(False)
        infinity.offload(model, config(work / "swap"))
        infinity.close(model, discard=True)
    except InfinityError as error:
        assert "\n" not in str(error)
    shutil.rmtree(work)


@pytest.mark.timeout(3600)
def test_a_checkpoint_of_nobody_is_a_model_or_a_typed_error(tmp_path: Path) -> None:
    bases = [write_fp8(qwen3(), tmp_path / "fp8"), *(form.write(tmp_path / name) for name, form in FORMS.items())]
    cases = [(bases, tmp_path / str(number_of), number_of) for number_of in range(CASES)]
    assert failures(check, cases, tmp_path) == []
