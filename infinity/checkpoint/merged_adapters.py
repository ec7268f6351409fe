"""save_merged: merge the LoRA adapters of a PEFT model into the base model, and write the result as a plain model, unit
by unit.

[Note: the values that are merged]
A merged weight is base + scaling * B @ A, computed as in PEFT's merge_and_unload, bit for bit. The base's weights have
the values with which the adapters were trained: weights in 4 or 8 bits are decoded. Merged weights are not encoded
again. Merged weights are rounded to the dtype of the model's weights. Because of the rounding, the logits of the merged
model are close to the logits of the base with separate adapters, but not equal. `computing_merged` makes the offloaded
model compute with merged weights, so that the written model can be compared with the offloaded model bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity.checkpoint.save_adapters import to_save
from infinity.checkpoint.save_pretrained import ModelTensors, save_parts
from infinity.checkpoint.tensor_names import Tensors
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable import module_buffers
from infinity.errors import NotAvailableError
from infinity.runtime.expert_adapters import adapter_of
from infinity.runtime.tiles import tiles_in
from infinity.state.layer_tiles import ExpertTile
from infinity.units.unit import OffloadedUnit

_PLAIN = {f"peft.tuners.lora.layer.{name}" for name in ("Linear", "Embedding", "ParamWrapper")}


def save_merged(model: Any, directory: str | Path, *, max_shard_size: str = "5GB") -> None:
    """Write a PEFT model with its LoRA adapters merged into its base, in the format of save_pretrained.

    The model is not changed and can be trained further. One unit's weights and its merged weights are in memory at a
    time.

    Args:
        model: a PEFT model whose base is offloaded.
        directory: as for save_pretrained.
        max_shard_size: as for save_pretrained.

    Raises:
        NotAvailableError: as for require_mergeable.
        others: as for save_pretrained.
    """
    require_mergeable(model)
    save_parts(_MergedTensors(model, to_save(model)), Path(directory).expanduser().absolute(), max_shard_size)


def require_mergeable(model: Any) -> None:
    """Raise NotAvailableError if a PEFT model's adapters cannot be merged. The error names the reason."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if len(model.peft_config) != 1:
        raise _not_available(f"{len(model.peft_config)} sets of adapters")
    ((adapter, config),) = model.peft_config.items()
    if not isinstance(config, LoraConfig):
        raise _not_available(f"adapters of {getattr(config.peft_type, 'value', config.peft_type)}")
    if getattr(config, "layer_replication", None):
        raise _not_available("adapters with layer_replication")
    base = model.get_base_model()
    modules = dict(base.named_modules())
    users = Counter(id(each) for module in modules.values() for each in module._parameters.values())
    for name, module in modules.items():
        if isinstance(module, BaseTunerLayer):
            _require_plain(name, module, adapter)
            changed = module.get_base_layer()
        elif isinstance(module, AuxiliaryTrainingWrapper):
            if not hasattr(module, "modules_to_save"):
                raise _not_available(f"{type(module).__name__} at '{name}'")
            changed = module.original_module
        else:
            continue
        if any(users[id(each)] > 1 for each in changed.parameters()):
            raise _not_available(
                f"adapters of '{name}', whose weight is tied to the weight of another module, so that merging "
                "would change both modules,"
            )


def _require_plain(name: str, layer: Any, adapter: str) -> None:
    """Raise NotAvailableError if a layer is not a plain LoRA layer. Only for plain layers the merged weight is base +
    scaling * B @ A.
    """
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if kind not in _PLAIN:
        raise _not_available(f"the adapter of '{name}', a {kind},")
    if layer.merged:
        raise NotAvailableError(
            f"the adapter of '{name}' is merged into the weights already: call model.unmerge_adapter() first"
        )
    if layer.use_dora.get(adapter):
        raise _not_available("adapters with use_dora")
    if adapter in layer.lora_variant:
        raise _not_available(f"adapters with {type(layer.lora_variant[adapter]).__name__}")
    if layer.lora_bias.get(adapter):
        raise _not_available("adapters with lora_bias")
    if any(not isinstance(tile, ExpertTile) for tile in tiles_in(layer.get_base_layer())):
        raise _not_available(f"adapters of '{name}', which runs in tiles because memory.device has no room for it,")


def _not_available(what: str) -> NotAvailableError:
    return NotAvailableError(
        f"merging {what} is not available yet: save the adapters, and merge them with PEFT's "
        "merge_and_unload, which needs the whole model in memory"
    )


@contextmanager
def computing_merged(model: Any) -> Iterator[None]:
    """During the `with` block, make the model compute with the weights that save_merged writes."""

    def compute(
        place: _Place, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> Any:
        merged = {key: _weight_of(each) for key, each in place.adapted.items()}
        if module is not place.module:
            return torch.func.functional_call(place.module, merged, inputs, keywords)
        own = dict(module._parameters)  # a call of the tile, as in functional_call, would call this hook again
        try:
            module._parameters.update(merged)  # type: ignore[arg-type]
            return module.forward(*inputs, **keywords)
        finally:
            module._parameters.update(own)

    with ExitStack() as stack:
        for layer in _layers(model.get_base_model()).values():
            bank = tiles_in(layer.get_base_layer())
            for each in _chain(layer) if bank else ():
                stack.callback(setattr, each, "_disable_adapters", each.disable_adapters)
                each._disable_adapters = True
            for place in _places(layer):
                hooked = place.module if bank else layer
                # before infinity's own hook, after which a tile has no values
                hook = hooked.register_forward_hook(partial(compute, place), with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
        yield


class _Adapted(NamedTuple):
    """Parameter of a layer, or of one tile of a bank, with an adapter.

    Attributes:
        layer: PEFT's layer with the adapter.
        parameter: the parameter.
        experts: the experts of the tile; None for a parameter that is not in a tile.
    """

    layer: Any
    parameter: nn.Parameter
    experts: tuple[int, int] | None


class _Place(NamedTuple):
    """Module that computes with adapted parameters.

    Attributes:
        module: the base layer, or a tile of it.
        adapted: its adapted parameters, by name.
    """

    module: nn.Module
    adapted: dict[str, _Adapted]


def _places(layer: Any) -> list[_Place]:
    """Return the modules that compute with the parameters that a LoRA layer and the layers nested in it adapt."""
    base = layer.get_base_layer()
    if not (tiles := tiles_in(base)):
        return [_Place(base, {_key(each): _Adapted(each, getattr(base, _key(each)), None) for each in _chain(layer)})]
    ends = list(accumulate((len(next(tile.parameters())) for tile in tiles), initial=0))
    return [
        _Place(tile, {_key(each): _Adapted(each, tile.get_parameter(_key(each)), experts) for each in _chain(layer)})
        for tile, experts in zip(tiles, pairwise(ends), strict=True)
    ]


def _weight_of(adapted: _Adapted) -> torch.Tensor:
    """Return the merged weight of a parameter that has its values, as the adapter has."""
    layer, parameter, experts = adapted
    with torch.no_grad():
        (adapter,) = layer.scaling
        merged = parameter.detach().clone()
        if experts is None:
            merged += layer.get_delta_weight(adapter)  # in place, like PEFT: the delta may have another dtype
        else:
            found = adapter_of(layer, adapter)
            merged += (
                found.of(*found.narrow(*experts))
                .delta(transposed=bool(layer.get_base_layer().is_transposed))
                .to(merged.dtype)
            )
        return merged


def _key(layer: Any) -> str:
    """Return the name of the base layer's parameter that a LoRA layer adapts."""
    return str(getattr(layer, "parameter_name", "weight"))


def _layers(base: nn.Module) -> dict[str, Any]:
    """Return the LoRA layers that PEFT put in the places of the model's own layers, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {name: module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    inner = {id(each) for layer in found.values() for each in _chain(layer)[1:]}
    return {name: layer for name, layer in found.items() if id(layer) not in inner}


def _chain(layer: Any) -> list[Any]:
    """Return a LoRA layer and the LoRA layers nested in it. There is one LoRA layer for each adapted parameter of the
    module.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = [layer]
    while isinstance(found[-1].base_layer, BaseTunerLayer):
        found.append(found[-1].base_layer)
    return found


class _MergedTensors(ModelTensors):
    """The tensors of the merged model. `model` is a PEFT model."""

    def __init__(self, model: Any, coordinator: Coordinator) -> None:
        base = model.get_base_model()
        root = registry.model_of(coordinator)
        self._names = _MergedNames(
            base, next(name for name, module in (base if root is None else root).named_modules() if module is base)
        )
        places = [place for layer in _layers(base).values() for place in _places(layer)]
        self._adapted = {id(each.parameter): each for place in places for each in place.adapted.values()}
        super().__init__(base, coordinator)
        self._wide, self._given = {}, {}  # merged weights have no masters

    def _parameters(self, unit: OffloadedUnit) -> Mapping[str, nn.Parameter]:
        found = ((self._names.in_model(name), each) for name, each in unit.parameters.items())
        return {name: each for name, each in found if name is not None}

    def _value(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        adapted = self._adapted.get(id(parameter))
        return parameter.detach() if adapted is None else _weight_of(adapted)

    def _read_for(self, unit: OffloadedUnit) -> list[int]:
        adapted = [self._adapted[id(each)] for each in unit.parameters.values() if id(each) in self._adapted]
        weights = [weight for each in adapted for weight in each.layer.lora_A.parameters()]
        found = {unit.index} | {place.unit.index for _, place in filter(None, map(registry.find, weights))}
        return sorted(found)

    def _buffers(self) -> Tensors:
        found = ((self._names.of_base(name), each) for name, each in module_buffers.named(self.model))
        return {name: each for name, each in found if name is not None}


class _MergedNames:
    """Converts the names of a PEFT model's parameters and buffers to their names in the merged model.

    Args:
        base: the base model, with PEFT's layers in it.
        above: the name of `base` in the offloaded model.
    """

    def __init__(self, base: nn.Module, above: str) -> None:
        self._above = f"{above}." if above else ""
        self._kept = {name: f"{name}{'.base_layer' * len(_chain(layer))}." for name, layer in _layers(base).items()}
        self._kept |= {
            name: f"{name}.modules_to_save.{next(iter(module.modules_to_save))}."
            for name, module in base.named_modules()
            if hasattr(module, "modules_to_save") and hasattr(module, "original_module")
        }

    def in_model(self, name: str) -> str | None:
        """Return the name that a parameter of the offloaded model has in the merged model.

        The result is None for parameters of adapters, and for parameters that adapters replace.
        """
        return self.of_base(name.removeprefix(self._above))

    def of_base(self, name: str) -> str | None:
        parts = name.split(".")
        for end in range(1, len(parts)):
            above = ".".join(parts[:end])
            if above in self._kept:
                kept = self._kept[above]
                return f"{above}.{name.removeprefix(kept)}" if name.startswith(kept) else None
        return name
