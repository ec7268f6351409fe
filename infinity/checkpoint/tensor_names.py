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
            ModelError: a tiled tensor has another shape in files.
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
            (name,) = self._whole(place, value.dtype)
            pieces.append((name, place.first, value))
        return pieces

    def _reverted(self, part: Tensors) -> Tensors:
        return self._revert(part) if part else {}

    def _whole(self, place: TileRows, dtype: torch.dtype) -> Tensors:
        """Return the complete tensor of a tile, by the tensor's name in files, on the meta device."""
        found = self._revert({place.whole: torch.empty(place.shape, dtype=dtype, device="meta")})
        if [tuple(value.shape) for value in found.values()] != [place.shape]:
            raise ModelError(
                f"transformers saves '{place.whole}' in another form than the model's, and cannot convert it tile by "
                "tile; use infinity.state_dict(model)"
            )
        return found
