"""Names of tiles. A tile is a range of rows of a linear layer's weight that is a unit of its own (runtime/tiles.py).

A tile is a child module of the layer, with the name `infinity_tile_` and its number. The parameters of a tile are rows
of the layer's parameters, and their names contain the name of the complete parameter. A tile's rows follow the rows of
all tiles with smaller numbers:

    lm_head.infinity_tile_2.weight     rows of `lm_head.weight`, after those of tiles 0 and 1

Checkpoint files contain complete parameters under their own names, and stores contain the parameters of tiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

_PREFIX = "infinity_tile_"
_NAME = re.compile(rf"(?P<layer>(?:.*\.)?){_PREFIX}(?P<index>0|[1-9][0-9]*)\.(?P<key>[^.]+)")


class LayerTile(nn.Module):
    """Module with rows of a layer's parameters, so that the rows can be a unit."""


class ExpertTile(LayerTile):
    """Some experts of a mixture: a tile whose rows are experts."""


@dataclass(frozen=True)
class TileRows:
    """Place of a tile's parameter: rows [begin, end) of the complete parameter.

    Attributes:
        whole: name of the complete parameter.
        begin, end: range of rows.
        shape: shape of the complete parameter.
    """

    whole: str
    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def first(self) -> int:
        """Number of elements of the complete parameter before the tile's elements."""
        return self.begin * math.prod(self.shape[1:])


def tile_name(index: int) -> str:
    """Return the name of a tile within its layer."""
    return f"{_PREFIX}{index}"


def tile_of(name: str) -> tuple[str, int] | None:
    """Return the name of the complete parameter and the number of the tile; None if `name` is not the name of a tile's
    parameter."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match["layer"] + match["key"], int(match["index"]))


def rows_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, TileRows]:
    """Return the place of each parameter that belongs to a tile, by the parameter's name.

    Args:
        shapes: shapes of all parameters of a model, by name.
    """
    tiles: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        found = tile_of(name)
        if found is not None:
            tiles.setdefault(found[0], []).append((found[1], name))
    places = {}
    for whole, numbered in tiles.items():
        names = [name for _, name in sorted(numbered)]
        total = sum(shapes[name][0] for name in names)
        begin = 0
        for name in names:
            end = begin + shapes[name][0]
            places[name] = TileRows(whole, begin, end, (total, *shapes[name][1:]))
            begin = end
    return places


def places_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, TileRows]:
    """Return the places of all parameters. For parameters outside of tiles, this is all rows; for the others, the
    result of rows_of()."""
    wholes = {name: TileRows(name, 0, shape[0] if shape else 1, tuple(shape)) for name, shape in shapes.items()}
    return wholes | rows_of(shapes)
