"""The names of tiles: rows of a linear layer's weight that are a unit of their own (runtime/tiles.py).

A tile is a child of the layer, called `infinity_tile_` and its number; its parameters are rows of the layer's. So the
name of a tile's parameter says which parameter it is a part of, and with the shapes of the tiles before it, which rows:

    lm_head.infinity_tile_2.weight     rows of `lm_head.weight`, behind those of the tiles 0 and 1

Files have whole parameters under their own names. Stores have tiles.
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
    """Rows of a linear layer: a module of its own, and so a unit of its own."""


@dataclass(frozen=True)
class Rows:
    """The place of a tile's parameter: rows [begin, end) of the whole one.

    Attributes:
        whole: its name.
        shape: of the whole one.
    """

    whole: str
    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def first(self) -> int:
        """Elements of the whole parameter before the tile's."""
        return self.begin * math.prod(self.shape[1:])


def tile_name(index: int) -> str:
    """What the layer calls a tile."""
    return f"{_PREFIX}{index}"


def tile_of(name: str) -> tuple[str, int] | None:
    """The name of the whole parameter, and the number of the tile; None where it is no tile's parameter."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match["layer"] + match["key"], int(match["index"]))


def rows_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Rows]:
    """The place of each parameter of a tile, by its name. Args: shapes: of all parameters of a model."""
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
    """rows_of(), and for each parameter of no tile all of it."""
    wholes = {name: Rows(name, 0, shape[0] if shape else 1, tuple(shape)) for name, shape in shapes.items()}
    return wholes | rows_of(shapes)
