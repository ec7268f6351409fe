"""A tile's name says what it is a part of; each tile is a unit of its own."""

from __future__ import annotations

import math

import pytest
from torch import nn

import infinity
from infinity.state.discover import discover
from infinity.state.layer_tiles import TileRows, places_of, rows_of, tile_name, tile_of
from tests.models import llama


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lm_head.infinity_tile_0.weight", ("lm_head.weight", 0)),
        ("a.b.infinity_tile_12.bias", ("a.b.bias", 12)),
        ("infinity_tile_3.weight", ("weight", 3)),
        ("lm_head.weight", None),
        ("lm_head.infinity_tile_00.weight", None),
        ("lm_head.my_infinity_tile_0.weight", None),
        ("lm_head.infinity_tile_0.weight.exp_avg", None),
    ],
)
def test_a_name_says_which_tile_it_is(name: str, found: tuple[str, int] | None) -> None:
    assert tile_of(name) == found


def test_the_rows_of_a_tile_follow_those_of_the_tiles_before_it_by_number() -> None:
    shapes = {f"head.{tile_name(index)}.weight": (index + 1, 5) for index in (10, *range(10))}
    rows = rows_of({"other": (3,), **shapes})
    assert rows["head.infinity_tile_10.weight"] == TileRows("head.weight", 55, 66, (66, 5))
    assert rows["head.infinity_tile_2.weight"].first == 15
    assert "other" not in rows
    wholes = {"other": (3,), "scale": ()}
    assert places_of({**wholes, **shapes}) == rows | {
        name: TileRows(name, 0, math.prod(shape), shape) for name, shape in wholes.items()
    }


def units(model: nn.Module) -> list[str]:
    return [unit.name for unit in discover(model).units]


def test_each_tile_is_a_unit() -> None:
    model, _ = llama()
    before = units(model)
    infinity.tile(model.lm_head, 3)
    assert units(model) == [*before, *(f"lm_head.infinity_tile_{index}" for index in range(3))]


def test_a_block_with_a_tile_in_it_is_cut_as_what_is_outside_blocks_and_other_blocks_stay() -> None:
    model, _ = llama()
    infinity.tile(model.model.layers[1].mlp.up_proj, 2)
    tiles = [f"model.layers.1.mlp.up_proj.infinity_tile_{index}" for index in range(2)]
    blocks = [f"model.layers.{index}" for index in (0, 2, 3)]
    found = units(model)
    assert sorted(found) == sorted(["model.embed_tokens", *blocks, *tiles, "remainder"])
    remainder = discover(model).parameters[found.index("remainder")]
    assert "model.layers.1.self_attn.q_proj.weight" in remainder


def test_a_layer_alone_is_cut_into_its_tiles() -> None:
    assert units(infinity.tile(nn.Linear(8, 8), 2)) == ["infinity_tile_0", "infinity_tile_1"]


def test_what_a_block_reads_beside_its_tiles_is_counted_with_each_of_them() -> None:
    model, _ = llama()
    infinity.tile(model.model.layers[1].mlp.up_proj, 2)
    found = discover(model)
    names = {unit.index: unit.name for unit in found.units}
    sites = {site.name: [names[index] for index in site.beside] for site in found.sites}
    assert sites["model.layers.1.mlp.up_proj.infinity_tile_0"] == ["remainder"]
    assert sites["model.layers.1.self_attn"] == ["remainder"]
    assert sites["model.layers.0"] == sites["lm_head"] == []
