"""The names that the tensors of a unit have in files, and where they begin there.

transformers may have renamed or fused tensors on loading, which is undone. A tile's parameter (state/tiles.py) is a
part of the tensor that the file has under the name of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from infinity.checkpoint.shards import Piece
from infinity.errors import ModelError
from infinity.state.tiles import Rows, rows_of

Tensors = dict[str, torch.Tensor]


class InFiles:
    """Args:
    shapes: of all parameters, by their names in the model.
    revert: gives the tensors of a unit the names and shapes that files have.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], revert: Callable[[Tensors], Tensors]) -> None:
        self._rows = rows_of(shapes)
        self._revert = revert

    def meta(self, part: Tensors) -> Tensors:
        """What files have of a unit, on the meta device. Of a tensor in tiles the first one has all.

        Args:
            part: the tensors of a unit, by their names in the model.

        Raises:
            ModelError: a tensor in tiles has another shape in files.
        """
        found = self._reverted({name: value for name, value in part.items() if name not in self._rows})
        for name, value in part.items():
            if name in self._rows and self._rows[name].begin == 0:
                found |= self._whole(self._rows[name], value.dtype)
        return found

    def pieces(self, part: Tensors) -> list[Piece]:
        """A unit's values, as write_shards takes them. `part` is emptied. Raises ModelError."""
        tiles = [(self._rows[name], part.pop(name)) for name in list(part) if name in self._rows]
        pieces = [(name, 0, value) for name, value in self._reverted(part).items()]
        part.clear()
        for place, value in tiles:
            (name,) = self._whole(place, value.dtype)
            pieces.append((name, place.first, value))
        return pieces

    def _reverted(self, part: Tensors) -> Tensors:
        return self._revert(part) if part else {}

    def _whole(self, place: Rows, dtype: torch.dtype) -> Tensors:
        """The tensor that a tile is a part of, by its name in files, on the meta device."""
        found = self._revert({place.whole: torch.empty(place.shape, dtype=dtype, device="meta")})
        if [tuple(value.shape) for value in found.values()] != [place.shape]:
            raise ModelError(
                f"transformers writes '{place.whole}' in another form than the model has, which cannot be done tile by "
                "tile; use infinity.state_dict(model)"
            )
        return found
