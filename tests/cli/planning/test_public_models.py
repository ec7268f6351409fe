"""Presets have the sizes that are published, and cost nothing to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from infinity.cli.planning.model import build
from infinity.cli.planning.public_models import PRESETS

BILLIONS = {
    "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3-405b": 405.9, "qwen3-8b": 8.19, "qwen3-32b": 32.8,
    "gpt-j-6b": 6.05, "gpt-neox-20b": 20.6, "turing-nlg-17b": 17.2, "megatron-8b": 8.3, "mt-nlg-530b": 530,
    "gpt-3-175b": 175, "mgpt-13b": 13.1, "dense-1t": 1040,
}  # fmt: skip


@pytest.mark.covering(most=6)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_its_publication_says(name: str) -> None:
    model = build(name, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(BILLIONS[name] * 1e9, rel=0.01)


def test_presets_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, infinity.cli.planning.public_models as p; "
        "assert p.PRESETS; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
