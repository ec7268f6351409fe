"""Names of tiles. A tile is a range of rows of a linear layer's weight, treated as a unit (runtime/tiles.py).

A tile is a child of the layer, called `infinity_tile_` and its number; its parameters are rows of the layer's
parameters. The name of a tile's parameter therefore contains the name of the complete parameter. The shapes of the
tiles before a tile determine the tile's rows:

    lm_head.infinity_tile_2.weight     rows of `lm_head.weight`, after those of tiles 0 and 1

Checkpoint files have complete parameters under their own names. Stores have tiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

_PREFIX = "infinity_tile_"
_NAME = re.compile(rf"(?P<layer>(?:.*\.)?){_PREFIX}(?P<index>0|[1-9][0-9]*)\.(?P<key>weight|bias)")


class Tile(nn.Module):
    """Rows of a linear layer, as a module, so that the rows are a unit."""


@dataclass(frozen=True)
class Rows:
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
    """Return the name of the complete parameter and the number of the tile; None if `name` is no tile's parameter."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match["layer"] + match["key"], int(match["index"]))


def rows_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Rows]:
    """Return the place of each parameter of a tile, by its name.

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
            places[name] = Rows(whole, begin, end, (total, *shapes[name][1:]))
            begin = end
    return places


def places_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Rows]:
    """Return the places of all parameters: the result of rows_of(), and all rows of each parameter outside tiles."""
    wholes = {name: Rows(name, 0, shape[0] if shape else 1, tuple(shape)) for name, shape in shapes.items()}
    return wholes | rows_of(shapes)
