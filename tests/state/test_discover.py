"""Units are the blocks; embeddings and heads are their own; shared parameters belong to one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from infinity.state.discover import discover
from infinity.state.unit import ParameterFacts, PartialUnit, build_unit
from tests.models import ARCHITECTURES, llama, mixtral, t5, tied_llama


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in discover(model).units]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_in_exactly_one_unit_and_ranges_do_not_overlap(architecture: str) -> None:
    model, _ = ARCHITECTURES[architecture]()
    found = discover(model)
    seen = [parameter for named in found.parameters for parameter in named.values()]
    assert len(seen) == len(set(seen)) == len(list(model.parameters()))
    for unit in found.units:
        ranges = sorted(group.byte_range(spec) for group in unit.groups for spec in group.specs)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert ranges[-1][1] <= unit.weight_bytes
        assert all(group.weight_offset % 4096 == 0 for group in unit.groups)


def test_a_llama_is_its_embedding_its_blocks_and_the_rest() -> None:
    assert names(llama()[0]) == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "remainder"]


def test_experts_inside_a_block_are_not_units() -> None:
    assert names(mixtral()[0]) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "remainder"]


def test_encoder_and_decoder_blocks_are_units() -> None:
    assert [name for name in names(t5()[0]) if "block" in name] == [
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    ]


def test_a_tied_head_needs_the_embeddings_unit() -> None:
    found = discover(tied_llama()[0])
    head = next(site for site in found.sites if site.name == "lm_head")
    assert [found.units[index].name for index in head.units] == ["model.embed_tokens"]


def test_a_model_without_blocks_is_one_unit() -> None:
    assert names(nn.Linear(600, 600)) == ["Linear"]


def test_a_large_module_outside_the_blocks_is_its_own_unit() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(512, 1024)
            self.norm = nn.LayerNorm(4)

    assert names(Model()) == ["blocks.0", "blocks.1", "head", "remainder"]


def test_groups_are_by_dtype_with_trained_ones_first() -> None:
    found = PartialUnit(
        "u",
        {
            "frozen": nn.Parameter(torch.zeros(5), requires_grad=False),
            "half": nn.Parameter(torch.zeros(3, 7).bfloat16()),
            "full": nn.Parameter(torch.zeros(100)),
        },
    )
    facts = {parameter: ParameterFacts(0, "fp32") for parameter in found.parameters.values()}
    unit = build_unit(0, found, facts)
    assert [(group.trainable, group.dtype) for group in unit.groups] == [
        (True, torch.bfloat16),
        (True, torch.float32),
        (False, torch.float32),
    ]
    assert unit.numel == 126


def test_dtypes_that_cannot_move_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"parameter 'weight' is torch.float64"):
        discover(model)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameters"):
        discover(nn.ReLU())
