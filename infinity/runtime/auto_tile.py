"""Automatic tiling: if the device has no room for a linear layer, infinity.offload cuts the layer into as many tiles as
the plan needs.

[Note: which layers, and how many tiles]
While one module runs, the weights of the next module are fetched. Two weights that are each larger than half of
memory.device therefore never fit at the same time. A layer with such a weight is cut into tiles of a quarter of
memory.device, of an eighth, and so on, until the plan fits. Each tile size is tried on a skeleton of the model, which
has the modules of the model but no values. If no tile size fits, the PlanError of the original model is raised. This
PlanError is also raised if every single layer fits but a block of several layers does not.

All ranks have the same model and make their plans for the same memory sizes, so all ranks choose the same tiles.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn

from infinity.errors import DeviceRoomError
from infinity.runtime.tiles import tile, why_not
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

_SHARES = (4, 8, 16, 32, 64)


def tile_to_fit(model: nn.Module, error: DeviceRoomError, plan: Callable[[nn.Module], object]) -> bool:
    """Tile the layers that are too large for the device, if the plan fits with the tiles; log each tiled layer.

    Args:
        model: the model whose layers are tiled in place.
        error: the error that planning raised for the model without tiles.
        plan: function that makes the plan of a model like this one, or raises DeviceRoomError.

    Returns:
        Whether the plan fits with tiles.
    """
    limit, layers = error.limit_bytes, dict(model.named_modules())
    tiles, nbytes = tiles_to_fit(model, error, plan), _layers(model)
    for name, count in tiles.items():
        tile(cast("nn.Linear", layers[name]), count)
        logger.info(
            "memory.device is %s, and '%s' has %s of weights: it runs in %d tiles",
            format_bytes(limit), name or type(model).__name__, format_bytes(nbytes[name]), count,
        )  # fmt: skip
    return bool(tiles)


def tiles_to_fit(model: nn.Module, error: DeviceRoomError, plan: Callable[[nn.Module], object]) -> dict[str, int]:
    """Return the layers to tile so that the plan fits, by name, each with its number of tiles; {} if it never fits.

    The arguments are as for tile_to_fit. The model does not change.
    """
    limit, layers = error.limit_bytes, dict(model.named_modules())
    large = {name: nbytes for name, nbytes in _layers(model).items() if 2 * nbytes > limit}
    for share in _SHARES if large else ():
        tiles = {name: min(-(-nbytes * share // limit), _rows(layers[name])) for name, nbytes in large.items()}
        if _fits(model, tiles, plan):
            return tiles
    return {}


def _fits(model: nn.Module, tiles: Mapping[str, int], plan: Callable[[nn.Module], object]) -> bool:
    tried = _skeleton(model)
    modules = dict(tried.named_modules())
    for name, count in tiles.items():
        tile(cast("nn.Linear", modules[name]), count)
    try:
        plan(tried)
    except DeviceRoomError:
        return False
    return True


def _layers(model: nn.Module) -> dict[str, int]:
    """Return the names of the layers that can be tiled, each with the bytes of its weights.

    Layers with tied weights cannot be tiled.
    """
    users = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    return {
        name: sum(each.numel() * each.element_size() for each in module.parameters())
        for name, module in model.named_modules()
        if not why_not(module) and _rows(module) >= 2 and all(users[id(each)] == 1 for each in module.parameters())
    }


def _rows(layer: nn.Module) -> int:
    return cast("nn.Linear", layer).out_features


def _skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of a model's modules whose parameters are on the meta device; the copy has no hooks and no
    values."""
    parameters: dict[int, nn.Parameter] = {}
    modules: dict[int, nn.Module] = {}

    def parameter_of(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in parameters:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            parameters[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        return parameters[id(parameter)]

    def module_of(module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        if id(module) not in modules:
            made = modules[id(module)] = type(module).__new__(type(module))
            nn.Module.__init__(made)
            if isinstance(module, nn.Linear):
                vars(made).update(in_features=module.in_features, out_features=module.out_features)
            vars(made)["_parameters"] = {key: parameter_of(each) for key, each in module._parameters.items()}
            vars(made)["_modules"] = {key: module_of(each) for key, each in module._modules.items()}
        return modules[id(module)]

    made = module_of(model)
    assert made is not None
    return made
