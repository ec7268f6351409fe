"""A generation's description of its model.

With this description, other programs than the one that trained the model can read the states.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from infinity import _native
from infinity.durable.generation_body import GroupRecord, ModelRecord, ParameterRecord
from infinity.state.discover import DiscoveredUnits
from infinity.state.dtypes import master_format


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter. A tied parameter has several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def describe(model: nn.Module, found: DiscoveredUnits, master: _native.MasterName) -> ModelRecord:
    """Return a record of the model's class and configuration, and of the place of each parameter in its group.

    Args:
        model: the model to describe.
        found: units and parameters of the model.
        master: form of the fp32 master of bf16 weights, as the config sets it.
    """
    names = names_of(model)
    groups, parameters = [], []
    for unit in found.units:
        for index, group in enumerate(unit.groups):
            dtype: Any = str(group.dtype).removeprefix("torch.")
            groups.append(
                GroupRecord(
                    unit=unit.name,
                    group=index,
                    dtype=dtype,
                    trainable=group.trainable,
                    master=master_format(group.dtype, master),
                    moments=group.moments,
                    numel=group.numel,
                    codec=group.codec,
                )
            )
            for spec in group.specs:
                same = names[found.parameters[unit.index][spec.name]]
                parameters.append(
                    ParameterRecord(
                        name=spec.name,
                        aliases=[name for name in same if name != spec.name],
                        shape=list(spec.shape),
                        unit=unit.name,
                        group=index,
                        offset=spec.offset,
                    )
                )
    return ModelRecord(
        class_name=type(model).__name__,
        config=_json(getattr(model, "config", None)),
        generation_config=_json(getattr(model, "generation_config", None)),
        groups=groups,
        parameters=parameters,
    )


def _json(config: Any) -> str | None:
    return str(config.to_json_string()) if hasattr(config, "to_json_string") else None
