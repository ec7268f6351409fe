"""The names of a unit's tensors in checkpoint files, and the position of their elements in the files' tensors.

transformers may have renamed or fused tensors on loading. For files, the renaming and fusing is undone. A tile's
parameter (state/layer_tiles.py) is a part of a tensor in the file. This tensor has the name of the complete parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from infinity.checkpoint.safetensors_writer import Piece
from infinity.errors import ModelError
from infinity.state.layer_tiles import TileRows, rows_of

Tensors = dict[str, torch.Tensor]


class TensorNames:
    """The form that a model's tensors have in checkpoint files.

    Args:
        shapes: shapes of all parameters, by their names in the model.
        revert: function that converts the tensors of a unit to their names and shapes in files.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], revert: Callable[[Tensors], Tensors]) -> None:
        self._rows = rows_of(shapes)
        self._revert = revert

    def meta(self, part: Tensors) -> Tensors:
        """Return the tensors of a unit in the form of files, on the meta device.

        A tiled tensor appears completely in the result for the unit that has its first tile, and not in the results for
        units with other tiles.

        Args:
            part: the tensors of a unit, by their names in the model.

        Raises:
            ModelError: a tiled tensor has another form in files.
        """
        found = self._reverted({name: value for name, value in part.items() if name not in self._rows})
        for name, value in part.items():
            if name in self._rows and self._rows[name].begin == 0:
                found |= self._whole(self._rows[name], value.dtype)
        return found

    def pieces(self, part: Tensors) -> list[Piece]:
        """Return a unit's values as pieces for write_shards. `part` is emptied. Raises ModelError."""
        tiles = [(self._rows[name], part.pop(name)) for name in list(part) if name in self._rows]
        pieces = [(name, 0, value) for name, value in self._reverted(part).items()]
        part.clear()
        for place, value in tiles:
            whole = self._whole(place, value.dtype)
            if [tuple(each.shape) for each in whole.values()] == [place.shape]:
                pieces.append((next(iter(whole)), place.first, value))
            else:
                pieces.extend((name, 0, each) for name, each in self._rows_apart(place, value, whole).items())
        return pieces

    def _reverted(self, part: Tensors) -> Tensors:
        return self._revert(part) if part else {}

    def _whole(self, place: TileRows, dtype: torch.dtype) -> Tensors:
        """Return the tensors in files of a tiled parameter, on the meta device.

        This is one tensor of the same shape; or each row of the parameter is a tensor, or several.
        """
        found = self._revert({place.whole: torch.empty(place.shape, dtype=dtype, device="meta")})
        shapes = [tuple(value.shape) for value in found.values()]
        if shapes != [place.shape] and len(found) % place.shape[0]:
            raise _other_form(place)
        return found

    def _rows_apart(self, place: TileRows, value: torch.Tensor, whole: Tensors) -> Tensors:
        """Return the tensors in files of a tile, each of whose rows (experts) is one tensor or several in files.

        Args:
            place: place of the tile.
            value: value of the tile.
            whole: all tensors in files of the tile's parameter.
        """
        found: Tensors = {}
        for name, row in self._revert({place.whole: value}).items():
            # the rows of a tile are numbered from 0 on, and those of the parameter from the first row of the tile on
            moved = [at for at in _renumbered(name, place.begin) if at in whole and whole[at].shape == row.shape]
            if len(moved) != 1:
                raise _other_form(place)
            found[moved[0]] = row
        if len(found) * place.shape[0] != len(whole) * len(value):
            raise _other_form(place)
        return found


def _renumbered(name: str, more: int) -> set[str]:
    """Return the names that result if one of the numbers in a name is increased."""
    parts = name.split(".")
    return {
        ".".join([*parts[:at], str(int(part) + more), *parts[at + 1 :]])
        for at, part in enumerate(parts)
        if part.isdecimal()
    }


def _other_form(place: TileRows) -> ModelError:
    return ModelError(
        f"transformers saves '{place.whole}' in another form than the model's, and cannot convert it tile by tile; use "
        "infinity.state_dict(model)"
    )
