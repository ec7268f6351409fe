"""Partition of a model into units, and the modules whose forward reads the units.

Blocks are the children of the outermost `ModuleList`s. In a model without `ModuleList`s, blocks are the children of
`ModuleDict`s. In a model with neither of them, blocks are the children of `Sequential`s. If a child is a container
without a forward (for example in a list of lists), the child cannot be called, so its children are the blocks. Outside
of the blocks, units are the largest modules that contain no block: each embedding, the head, and every module of 1 MiB
or more. The remaining small parameters form one unit, which is never evicted. A tile of a linear layer
(state/layer_tiles.py) is a unit. A block that contains a tile is divided by the rule for modules outside of the blocks,
unless all its tiles are experts: all other parameters of a mixture of experts are then one unit, as in other blocks.

Hooks run when modules are called. A weight may also be read without a call of its module: in another method of a block
than `forward`, or by `F.linear(x, other.weight)`. Such a weight is fetched when it is read
(units/released_parameters.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from infinity import _native
from infinity.errors import ModelError
from infinity.sizes import round_up
from infinity.state.codec import Codec
from infinity.state.frozen_codecs import FrozenName, codecs_of
from infinity.state.layer_tiles import ExpertTile, LayerTile
from infinity.state.unit import ELEMENT_ALIGNMENT, ParameterFacts, PartialUnit, Unit, build_unit

REMAINDER = "remainder"
_OWN_UNIT_BYTES = 1 << 20


@dataclass(frozen=True)
class HookedModule:
    """A site: a module that gets hooks, because its forward reads parameters of units.

    Attributes:
        name: fully qualified name of the module.
        module: the module.
        units: indices of the units.
        beside: for a block that contains tiles, the units of the block that may be on the device at the same time. If
            other code than torch.utils.checkpoint recomputes the block, it keeps views of all parameters that the
            block's modules read, except views of tiles. While experts of the block run backward, these units stay.
    """

    name: str
    module: nn.Module
    units: tuple[int, ...]
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class DiscoveredUnits:
    """Units of a model.

    Attributes:
        units: units by index.
        parameters: for each unit, its parameters, in the order of the layout, by their first name.
        sites: modules to hook.
        root_candidates: the root module, and every module that contains a site. A call of any of these modules may be a
            complete forward pass.
    """

    units: tuple[Unit, ...]
    parameters: tuple[dict[str, nn.Parameter], ...]
    sites: tuple[HookedModule, ...]
    root_candidates: tuple[nn.Module, ...]


def discover(model: nn.Module, moments: _native.MomentsName = "fp32", frozen: FrozenName = "auto") -> DiscoveredUnits:
    """Partition a model into units.

    Args:
        model: the model.
        moments: form of the moments; "int8" means int8 for weights of matrix products; embeddings and parameters of one
            dimension (norms, biases) then have fp32 moments.
        frozen: form in which frozen weights of the blocks are kept at home (state/frozen_codecs.py).

    Raises:
        ModelError: the model has no parameters, or infinity does not support the dtype of a parameter.
    """
    if next(model.parameters(), None) is None:
        raise ModelError(f"{type(model).__name__} has no parameters to offload")
    partition = _ModelPartition(model)
    partition.walk("", model)
    return partition.finish(moments, frozen)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, in the order of its modules."""
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    blocks = next((found for kind in kinds if (found := _find_blocks(model, kind))), set[nn.Module]())
    return [module for module in model.modules() if module in blocks]


class _ModelPartition:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        blocks = set(blocks_of(model))
        tiles: set[nn.Module] = {module for module in model.modules() if isinstance(module, LayerTile)}
        self._of_model = blocks
        layers = {tile for tile in tiles if not isinstance(tile, ExpertTile)}
        self._opened = blocks & _ancestors(model, layers)
        self._mixtures = (blocks & _ancestors(model, tiles)) - self._opened
        self._blocks = (blocks - self._opened) | tiles
        self._parents = _ancestors(model, self._blocks - self._mixtures) | _ancestors(model, self._mixtures)
        self._found: dict[PartialUnit, int] = {}  # each with its index
        self._remainder = PartialUnit(REMAINDER, stays=True)
        self._owner: dict[nn.Parameter, PartialUnit] = {}
        self._sites: list[tuple[str, nn.Module, list[PartialUnit], nn.Module | None]] = []
        self._root_candidates: list[nn.Module] = []

    def walk(self, name: str, module: nn.Module, block: nn.Module | None = None) -> None:
        """Collect the units and sites of a module and of the modules below it.

        Args:
            name: fully qualified name of the module.
            module: the module.
            block: the block of the module if this block contains tiles; otherwise None.
        """
        if module not in self._parents:
            self._add_site(name, module, block, recurse=True)
            return
        self._root_candidates.append(module)
        if module in self._mixtures:
            self._add_mixture(name, module)
            return
        block = module if module in self._opened else block
        self._add_site(name, module, block, recurse=False)
        for child_name, child in module.named_children():
            self.walk(f"{name}.{child_name}" if name else child_name, child, block)

    def _add_mixture(self, name: str, block: nn.Module) -> None:
        """Collect a block whose tiles are experts, with everything else in one unit."""
        tiles = {f"{name}.{key}": each for key, each in block.named_modules() if isinstance(each, ExpertTile)}
        experts = {parameter for tile in tiles.values() for parameter in tile.parameters()}
        self._add_site(name, block, block, recurse=True, but=experts)
        self._root_candidates.extend(each for each in block.modules() if each in self._parents and each is not block)
        for key, tile in tiles.items():
            self._add_site(key, tile, block, recurse=True)

    def _add_site(
        self,
        name: str,
        module: nn.Module,
        block: nn.Module | None,
        *,
        recurse: bool,
        but: Collection[nn.Parameter] = (),
    ) -> None:
        named = [
            (f"{name}.{key}" if name else key, parameter)
            for key, parameter in module.named_parameters(recurse=recurse, remove_duplicate=True)
            if parameter not in but
        ]
        if not named:
            return
        fresh = [(key, parameter) for key, parameter in named if parameter not in self._owner]
        if fresh:
            self._assign(name, module, fresh, recurse)
        needed = list(dict.fromkeys(self._owner[parameter] for _, parameter in named))
        self._sites.append((name, module, needed, block))

    def _assign(self, name: str, module: nn.Module, fresh: list[tuple[str, nn.Parameter]], recurse: bool) -> None:
        nbytes = sum(parameter.numel() * parameter.element_size() for _, parameter in fresh)
        own = module in self._blocks or (recurse and (isinstance(module, nn.Embedding) or nbytes >= _OWN_UNIT_BYTES))
        routed = isinstance(module, ExpertTile)
        unit = PartialUnit(name or type(module).__name__, routed=routed) if own else self._remainder
        self._found.setdefault(unit, len(self._found))
        for key, parameter in fresh:
            self._owner[parameter] = unit
            unit.parameters[key] = parameter

    def finish(self, moments: _native.MomentsName, frozen: FrozenName) -> DiscoveredUnits:
        facts = _facts(self._model, moments, codecs_of(self._model, self._of_model, frozen))
        units = tuple(build_unit(index, found, facts) for found, index in self._found.items())
        beside: dict[nn.Module, dict[int, None]] = {block: {} for block in self._opened | self._mixtures}
        for _, module, needed, block in self._sites:
            if block is not None and not isinstance(module, LayerTile):
                beside[block].update(dict.fromkeys(self._found[found] for found in needed))
        sites = tuple(
            HookedModule(
                name,
                module,
                tuple(self._found[found] for found in needed),
                () if block is None else tuple(beside[block]),
            )
            for name, module, needed, block in self._sites
        )
        if self._model not in self._root_candidates:
            self._root_candidates.insert(0, self._model)
        return DiscoveredUnits(
            units, tuple(found.parameters for found in self._found), sites, tuple(self._root_candidates)
        )


def _facts(
    model: nn.Module, moments: _native.MomentsName, codecs: Mapping[nn.Parameter, Codec]
) -> dict[nn.Parameter, ParameterFacts]:
    """Return the facts of each parameter, in the order of model.parameters().

    The order is the same for every placement.
    """
    embedded = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    facts, index = {}, 0
    for parameter in model.parameters():
        exact = moments == "int8" and (parameter in embedded or parameter.dim() < 2)
        facts[parameter] = ParameterFacts(index, "fp32" if exact else moments, codecs.get(parameter))
        index += round_up(parameter.numel(), ELEMENT_ALIGNMENT)
    return facts


def _find_blocks(model: nn.Module, container: type[nn.Module]) -> set[nn.Module]:
    """Return the children of the outermost containers that have parameters."""
    blocks: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, container):
                add(child)
            else:
                visit(child)

    def add(child: nn.Module) -> None:
        if _has_forward(child):
            if next(child.parameters(), None) is not None:
                blocks.add(child)
            return
        for grandchild in child.children():
            add(grandchild)

    visit(model)
    return blocks


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward. Containers do not have one."""
    return type(module).forward is not nn.Module.forward


def _ancestors(model: nn.Module, blocks: set[nn.Module]) -> set[nn.Module]:
    """Return every module that contains a block."""
    above: set[nn.Module] = set()

    def visit(module: nn.Module) -> bool:
        if module in blocks:
            return True
        below = [visit(child) for child in module.children()]  # a list, so that every child is visited
        if any(below):
            above.add(module)
            return True
        return False

    visit(model)
    return above
