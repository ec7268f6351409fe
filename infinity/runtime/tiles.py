"""infinity.tile: tiles of rows for a linear layer whose weight is too large for the device.

[Note: how a tiled layer computes]
Each tile is a module with some rows of the weight and of the bias, and each tile is a separate unit. While one tile
runs, the other tiles may be in the store (ZeRO-Infinity, arXiv 2104.07857, section 5.1.3). The concatenated outputs of
the tiles are the output of the layer.

The gradient of the input is the sum of the tiles' contributions. The contributions are added in fp32, and the sum is
rounded once, like the result of one matrix product. To add each contribution as soon as it is computed, each tile
passes a carrier to the next tile: a tensor with the input's shape but without memory. In the backward, the gradient of
the carrier is the sum so far:

    input ──▶ _CarrierStart ──▶ carrier ──▶ tile 0 ──▶ carrier ──▶ tile 1 ──▶ …        backward: … ──▶ + tile 1 ──▶ +
    tile 0 input, cut off ─────────────────▶ tile 0 ─────────────▶ tile 1

The outputs of all other tiles are inputs of the last tile, so that the tiles form a chain (stage_chain.py).
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from infinity.coordinator import registry
from infinity.errors import ConfigError, ModelError, StaleWeightsError
from infinity.runtime.deferred_parameters import (
    RowsReader,
    ValueReader,
    is_a_deferred,
    name_of_deferred,
    rows_of_deferred,
)
from infinity.state.frozen_codecs import remember_rows
from infinity.state.layer_tiles import LayerTile, rows_of, tile_name
from infinity.state.unit import ELEMENT_ALIGNMENT
from infinity.state.values import RowsSource, Source

_WIDE_BYTES = 16 << 20
"""Largest number of bytes of 16-bit weights converted to fp32 at a time for the gradient of the input."""

_KEYS = ("weight", "bias")
_cut: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters that layers had before the layers were tiled. No module may have such a parameter any more.

The value is a description of the parameter and references to the parameters of the tiles.
"""


def tile(module: nn.Linear, tiles: int) -> nn.Linear:
    """Cut a linear layer into tiles of its rows, in place.

    The device then needs room for the weight of one tile instead of the weight of the layer. Call this before the
    model is offloaded:

        model = infinity.load_pretrained("path/or/hub-id", "swap.yaml", defer=True)
        infinity.tile(model.lm_head, 8)
        infinity.offload(model, "swap.yaml")

    infinity.offload tiles a layer by itself if memory.device has no room for the layer. A run that is resumed, or that
    continues from its portable copy, has the same tiles as before.

    The tiled layer has the same outputs as the original layer. The gradient of the layer's input is the sum over the
    tiles, in fp32 (ZeRO-Infinity, arXiv 2104.07857, section 5.1.3). `model.state_dict()`, infinity.save_pretrained and
    portable copies have the whole weight under the layer's name. `model.named_parameters()` has the weight of each
    tile.

    Args:
        module: a torch.nn.Linear whose weight belongs to no other module. It may be on the meta device, or part of a
            model that load_pretrained(defer=True) returned.
        tiles: number of tiles; all tiles have about the same number of rows.

    Returns:
        The same module.

    Raises:
        ModelError: the module is not a linear layer, was changed by other code, or is offloaded. infinity.offload also
            raises ModelError if the weight belongs to a second module.
        ConfigError: `tiles` is less than 2, or greater than the number of the layer's rows.
    """
    why = why_not(module)
    if why:
        raise ModelError(why)
    rows = module.out_features
    if not isinstance(tiles, int) or isinstance(tiles, bool) or not 2 <= tiles <= rows:
        raise ConfigError(f"tiles is {tiles!r}: a layer of {rows} rows is cut into 2 to {rows} tiles")
    begins = _begins(rows, module.in_features, tiles)
    vars(module).pop("forward", None)
    module.__class__ = TiledLinear
    cut_rows(module, _KEYS, begins, RowTile, f"a {module.in_features} to {rows} linear layer")
    return module


def cut_rows(
    module: nn.Module, keys: Sequence[str], begins: Sequence[int], make: Callable[[], LayerTile], what: str
) -> None:
    """Replace parameters of a module by tiles of their rows, which become child modules.

    Args:
        module: the module.
        keys: names of the parameters, which have the same number of rows.
        begins: first row of each tile.
        make: function that returns a new tile.
        what: the module, for messages.
    """
    parameters = {key: module._parameters.pop(key) for key in keys}
    rows = max(len(each) for each in parameters.values() if each is not None)
    made_of: dict[str, list[weakref.ref[nn.Parameter]]] = {key: [] for key in keys}
    for index, (begin, end) in enumerate(zip(begins, [*begins[1:], rows], strict=True)):
        made = make()
        for key, parameter in parameters.items():
            part = _rows(parameter, key, index, begin, end)
            made.register_parameter(key, part)
            made_of[key] += [] if part is None else [weakref.ref(part)]
        module.add_module(tile_name(index), made)
    for key, parameter in parameters.items():
        if parameter is not None:
            _cut[parameter] = f"the {key} of {what}", made_of[key]
            parameter.__class__ = type("Cut", (_ReplacedParameter, type(parameter)), {})
    module.register_state_dict_post_hook(_join)
    module.register_load_state_dict_pre_hook(_split)


def tiles_in(module: nn.Module) -> list[LayerTile]:
    """Return the tiles of a module, in the order of their rows."""
    return [each for each in module._modules.values() if isinstance(each, LayerTile)]


class _ReplacedParameter(nn.Parameter):
    """Parameter that a layer had before it was tiled.

    Reading `.grad` of this parameter raises: code that still has the parameter in a list would read None and conclude
    that there is no gradient.
    """

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        raise ModelError(
            f"this was {_cut[self][0]}, which is in tiles since the model was offloaded, so that the parts can move "
            "apart: the gradient is in the tiles. Take model.parameters() again, after the optimizer is made."
        )


def in_tiles(parameter: nn.Parameter) -> list[nn.Parameter]:
    """Return the parameters of the tiles if the parameter's layer was tiled. For any other parameter, return the
    parameter itself."""
    found = _cut.get(parameter)
    return [parameter] if found is None else [part for each in found[1] if (part := each()) is not None]


def why_not(module: nn.Module) -> str:
    """Return the reason why a module cannot be tiled; "" if it can be tiled. Only the module is checked, not the model
    around it."""
    if isinstance(module, TiledLinear):
        return "this layer is in tiles already"
    if type(module) is not nn.Linear:
        return f"infinity.tile takes a torch.nn.Linear, such as model.lm_head, not a {type(module).__name__}"
    if any(registry.find(parameter) for parameter in module.parameters()):
        return (
            "this layer is offloaded already: tile it before infinity.offload (after infinity.load_pretrained(path, "
            "config, defer=True), or where the model is made)"
        )
    others = module._parameters.keys() - set(_KEYS)
    if others:
        return f"this layer has an added parameter '{min(others)}': tile the layer before it is added"
    # When accelerate loads a model to the meta device, it sets a layer's own forward as an attribute of the layer,
    # which is not a replacement.
    forward = vars(module).get("forward", module.forward)
    if getattr(forward, "__func__", None) is not nn.Linear.forward:
        return (
            "the forward of this layer was replaced (for example by infinity.use_chunked_loss): tile the layer before "
            "that"
        )
    return ""


def _begins(rows: int, in_features: int, tiles: int) -> list[int]:
    """Return the first row of each tile.

    If there are enough rows, tiles begin at multiples of ELEMENT_ALIGNMENT elements. With this alignment, the blocks of
    8-bit moments (state/int8.py) are the same as the blocks of the whole weight.
    """
    step = ELEMENT_ALIGNMENT // math.gcd(ELEMENT_ALIGNMENT, in_features)
    begins = [index * rows // tiles // step * step for index in range(tiles)]
    return begins if len(set(begins)) == tiles else [index * rows // tiles for index in range(tiles)]


def _rows(parameter: nn.Parameter | None, key: str, index: int, begin: int, end: int) -> nn.Parameter | None:
    """Return a tile's parameter, which shares no memory with the layer's parameter."""
    if parameter is None:
        return None
    if is_a_deferred(parameter):
        layer = name_of_deferred(parameter).removesuffix(key)
        part = rows_of_deferred(parameter, f"{layer}{tile_name(index)}.{key}", begin, end)
    else:
        values = parameter.detach()[begin:end]
        if parameter.is_contiguous():  # a placeholder is not contiguous and has no memory to clone
            values = values.clone()
        part = nn.Parameter(values, requires_grad=parameter.requires_grad)
    remember_rows(parameter, part, begin, end)
    return part


def tile_as_linear(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Tile the linear layers of a model in the same way as in an earlier run.

    Layers of the earlier run that do not match the model are skipped.

    Args:
        model: the model whose layers are tiled in place.
        shapes: shapes of the earlier run's parameters, by name.
    """
    wholes = Counter(place.whole for place in rows_of(shapes).values())
    modules = dict(model.named_modules())
    for whole, tiles in wholes.items():
        layer = modules.get(whole.removesuffix("weight").removesuffix("."))
        if isinstance(layer, nn.Linear) and not why_not(layer) and 2 <= tiles <= layer.out_features:
            tile(layer, tiles)


def require_untied(model: nn.Module) -> None:
    """Raise ModelError if another module has the whole weight of a tiled layer as its parameter."""
    for name, parameter in model.named_parameters():
        if parameter in _cut:
            raise ModelError(
                f"'{name}' is tied to {_cut[parameter][0]} that infinity.tile has cut: a tied weight cannot be tiled. "
                "Build the model again without tiling that layer, or untie it first (its own copy of the weight, and "
                "tie_word_embeddings=False in the config)"
            )


def by_rows(model: nn.Module, source: Source) -> Source:
    """Return a source of the values of a model's tiles, given a source of whole parameters.

    The returned source does not keep the model alive.
    """
    rows = rows_of({name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)})
    if not rows:
        return source

    def value(name: str) -> torch.Tensor:
        if name not in rows:
            return source(name)
        place = rows[name]
        if isinstance(source, RowsSource):
            return source.rows(place.whole, place.begin, place.end)
        whole = source(place.whole)
        if tuple(whole.shape) != place.shape:
            raise ModelError(
                f"'{place.whole}' is {tuple(whole.shape)} in the checkpoint and {place.shape} in the model"
            )
        return whole[place.begin : place.end]

    return value


def readers(model: nn.Module, source: Source) -> dict[str, ValueReader]:
    """Return the readers of a model's parameters, by name, given a source of whole parameters."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    rows = rows_of(shapes)
    return {
        name: ValueReader(source, name)
        if name not in rows
        else RowsReader(source, rows[name].whole, rows[name].begin, rows[name].end)
        for name in shapes
    }


class RowTile(LayerTile):
    """Some rows of a linear layer.

    Attributes:
        weight: [rows, in_features].
        bias: [rows], or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(
        self, given: torch.Tensor, carrier: torch.Tensor | None, before: tuple[torch.Tensor, ...] | None = None
    ) -> Any:
        """Compute the rows of the tile.

        Args:
            given: the layer's input, [..., in_features].
            carrier: see [Note: how a tiled layer computes]; None: the input needs no gradient.
            before: outputs of all other tiles, for the last tile; None for the other tiles.

        Returns:
            The tile's output and the carrier; the last tile returns the layer's output.
        """
        made = functional.linear(given, self.weight, self.bias)
        if carrier is not None:
            made, carrier = _InputGradient.apply(made, carrier, self)
        return (made, carrier) if before is None else torch.cat([*before, made], dim=-1)


class TiledLinear(nn.Linear):
    """A linear layer in tiles, which infinity.tile makes from a torch.nn.Linear.

    The attributes `weight` and `bias` are whole tensors, which are only for reading. To change the layer, change the
    parameters of the tiles.
    """

    @property
    def tiles(self) -> list[RowTile]:
        """The tiles, in the order of their rows."""
        return [module for module in self._modules.values() if isinstance(module, RowTile)]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Whole weight, concatenated from the weights of the tiles; for reading only."""
        return _ConcatenatedParameter.of([tile.weight for tile in self.tiles])

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """Whole bias, concatenated from the biases of the tiles; for reading only."""
        parts = [tile.bias for tile in self.tiles if tile.bias is not None]
        return _ConcatenatedParameter.of(parts) if parts else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        carrier: torch.Tensor | None = None
        if torch.is_grad_enabled() and input.requires_grad:
            carrier, input = _CarrierStart.apply(input), input.detach()
        *others, last = self.tiles
        before = []
        for each in others:
            made, carrier = each(input, carrier)
            before.append(made)
        whole: torch.Tensor = last(input, carrier, tuple(before))
        return whole

    def extra_repr(self) -> str:
        has_bias = self.tiles[0].bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


class _ConcatenatedParameter(torch.Tensor):
    """A whole parameter, concatenated from its tiles.

    Operations that write to this tensor raise, because the change would be lost.
    """

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, _ConcatenatedParameter) and _changes(name):
            raise ModelError(
                f"`{name}` of a parameter of a layer in tiles, which is a temporary copy for reading: change the "
                "parameters of the tiles (`for tile in layer.tiles: tile.weight…`), or freeze the layer with "
                "layer.requires_grad_(False)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if (
                isinstance(first, _ConcatenatedParameter)
                and isinstance(found, torch.Tensor)
                and _same_memory(found, first)
            ):
                found = found.as_subclass(cls)
        return found


def _changes(name: str) -> bool:
    """Return whether an operation of this name writes to its first argument."""
    if name.endswith("__"):
        return name in ("__set__", "__setitem__", "__delete__") or name in _IN_PLACE
    return name.endswith("_")


_IN_PLACE = [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return int(one.untyped_storage()._cdata) == int(other.untyped_storage()._cdata)


def concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a whole parameter, concatenated from its tiles. It is only for reading."""
    return _ConcatenatedParameter.of(parts)


class _CarrierStart(torch.autograd.Function):
    """Function that makes the carrier before the first tile. In the backward, the carrier's gradient becomes the
    gradient of the input."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = given.dtype
        return given.new_zeros((), dtype=_wide(given.dtype)).expand(given.shape)

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        (total,) = came
        return None if total is None else total.to(ctx.dtype)


class _InputGradient(torch.autograd.Function):
    """Function whose backward adds a tile's part of the input's gradient to the carrier's gradient. It does not compute
    the weight's gradient.

    The backward reads the weight from the tile. If the weight were saved for the backward, recomputation
    (torch.utils.checkpoint) would need the weights of all tiles of a block at the same time.
    """

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, carrier: torch.Tensor, tile: RowTile) -> Any:
        ctx.set_materialize_grads(False)
        ctx.tile, ctx.version = tile, version_of(tile.weight)
        return made.view_as(made), carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        gradient, total = came
        if gradient is not None:
            if version_of(ctx.tile.weight) != ctx.version:
                raise StaleWeightsError(
                    "this backward pass needs the weights of a layer in tiles from before they were changed, by "
                    "optim.step() or in place. Call backward() on every loss before that."
                )
            total = _with_product(total, gradient, ctx.tile.weight)
        return gradient, total, None


def version_of(weight: nn.Parameter) -> int:
    """Return a number that changes whenever the values of the weight change."""
    found = registry.find(weight)
    if found is None:
        return weight._version
    coordinator, place = found
    return coordinator.units[place.unit.index].version


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _with_product(total: torch.Tensor | None, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `total` [..., in] + `gradient` [..., out] @ `weight` [out, in], in fp32."""
    wide, (rows, columns) = _wide(weight.dtype), weight.shape
    found = None if total is None else total.reshape(-1, columns)
    flat = gradient.reshape(-1, rows)
    one_product = weight.is_cuda and torch.version.cuda is not None and not torch.is_grad_enabled()
    if one_product and gradient.dtype == weight.dtype != wide:
        product = torch.mm(flat, weight, out_dtype=wide)
        found = product if found is None else product.add_(found)
    else:
        step = rows if weight.dtype == wide else max(_WIDE_BYTES // (columns * wide.itemsize), 1)
        for first in range(0, rows, step):
            part, of_weight = flat[:, first : first + step].to(wide), weight[first : first + step].to(wide)
            found = part @ of_weight if found is None else torch.addmm(found, part, of_weight)
    assert found is not None
    return found.reshape(*gradient.shape[:-1], columns)


def _join(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    """Replace the tiles' parameters in a state_dict by whole parameters."""
    tiles = tiles_in(module)
    for key in tiles[0]._parameters:
        names = [f"{prefix}{tile_name(index)}.{key}" for index in range(len(tiles))]
        parts = [state_dict.pop(name) for name in names if name in state_dict]
        if parts:
            state_dict[prefix + key] = torch.cat(parts)


def _split(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
    """Split whole parameters of a state_dict into the parameters of the tiles.

    Parameters of other shapes stay in the state_dict, so that torch reports them as unexpected keys.
    """
    done = set()
    shapes = {
        f"{tile_name(index)}.{key}": parameter.shape
        for index, each in enumerate(tiles_in(module))
        for key, parameter in each.named_parameters(recurse=False)
    }
    for name, place in rows_of(shapes).items():
        whole = state_dict.get(prefix + place.whole)
        if whole is not None and tuple(whole.shape) == place.shape:
            state_dict[prefix + name] = whole[place.begin : place.end]
            done.add(prefix + place.whole)
    for name in done:
        del state_dict[name]
