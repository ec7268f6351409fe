"""The body of a generation's manifest: model, optimizers, buffers, RNG states and tracked objects.

The body is read from disk, so every field has a type, and unknown fields are errors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, Field, PlainValidator, ValidationError, model_validator

from infinity.errors import ConfigError
from infinity.io.schema import COUNT_MAX, Count, DiskRecord, Name, Text, first_problem, require_unique, validated
from infinity.sizes import round_up
from infinity.state.codec import require_codec
from infinity.state.moments import KEPT
from infinity.state.unit import ELEMENT_ALIGNMENT

_GROUPS_MAX = 1 << 17
_PARAMETERS_MAX = 1 << 20
_DIMENSIONS_MAX = 64
_METADATA = "__metadata__"
"""The key in the header of safetensors files that is not the name of a tensor."""


def _tensor_name(name: str) -> str:
    if name == _METADATA:
        raise ValueError(f"{name} cannot be the name of a tensor")
    return name


_TensorName = Annotated[Name, AfterValidator(_tensor_name)]


class GroupRecord(DiskRecord):
    """A group of a unit's parameters (state/unit.py). `numel` is the number of elements of its flat buffers, including
    alignment gaps.

    Attributes:
        group: index of the group in its unit.
        dtype: dtype of the weights.
        master: form of the fp32 master.
        moments: form of exp_avg and exp_avg_sq.
        codec: encoding of the weights; None if the weights are stored in `dtype`.
    """

    unit: Name
    group: Count
    dtype: Literal["float32", "bfloat16", "float16"]
    trainable: bool
    master: Literal["weight", "split16", "fp32", "none"]
    moments: Literal["fp32", "bf16", "int8"]
    numel: Count
    codec: Annotated[Text, Field(max_length=64), AfterValidator(require_codec)] | None = None

    @model_validator(mode="after")
    def _sound(self) -> GroupRecord:
        """Check the codec and the form of the master, which must be possible for the dtype (state/dtypes.py)."""
        if self.codec is not None and self.trainable:
            raise ValueError(f"trained weights in {self.codec}")
        masters = {"float32": ("weight",), "float16": ("fp32",)}.get(self.dtype, ("split16", "fp32", "none"))
        if self.master not in masters:
            raise ValueError(f"{self.dtype} weights with a {self.master} master")
        return self


class ParameterRecord(DiskRecord):
    """A parameter, which consists of the elements [offset, offset + numel) of its group.

    Attributes:
        aliases: other names of a tied parameter.
        group: index of the parameter's group in the unit.
        offset: index of the parameter's first element in the group.
    """

    name: _TensorName
    aliases: Annotated[list[_TensorName], Field(max_length=_PARAMETERS_MAX)]
    shape: Annotated[list[Count], Field(max_length=_DIMENSIONS_MAX)]
    unit: Name
    group: Count
    offset: Count

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ModelRecord(DiskRecord):
    """The facts about the model that a program needs to read the states.

    Attributes:
        class_name: class name of the model.
        config, generation_config: JSON text in transformers' format; None for other models.
    """

    class_name: Name
    config: Text | None
    generation_config: Text | None
    groups: Annotated[list[GroupRecord], Field(max_length=_GROUPS_MAX)]
    parameters: Annotated[list[ParameterRecord], Field(max_length=_PARAMETERS_MAX)]

    @model_validator(mode="after")
    def _sound(self) -> ModelRecord:
        """Check that the parameters of each group follow each other, in the layout of state/unit.py."""
        require_unique(((group.unit, group.group) for group in self.groups), "the group")
        require_unique(self.names(), "the parameter")
        ends = {(group.unit, group.group): 0 for group in self.groups}
        for parameter in self.parameters:
            key = parameter.unit, parameter.group
            if key not in ends:
                raise ValueError(
                    f"'{parameter.name}' is in group {parameter.group} of {key[0]!r}, which does not exist"
                )
            if parameter.numel > COUNT_MAX or parameter.offset != ends[key]:
                raise ValueError(f"'{parameter.name}' is not where it belongs in its group, at {ends[key]}")
            ends[key] += round_up(parameter.numel, ELEMENT_ALIGNMENT)
        for group in self.groups:
            numel = max(ends[group.unit, group.group], ELEMENT_ALIGNMENT)
            if group.numel != numel:
                raise ValueError(f"group {group.group} of {group.unit!r} has {group.numel} elements instead of {numel}")
        return self

    def names(self) -> Iterable[str]:
        """Return all names of all parameters. A tied parameter has several names."""
        for parameter in self.parameters:
            yield parameter.name
            yield from parameter.aliases

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each parameter under each of its names."""
        return {name: each.shape for each in self.parameters for name in (each.name, *each.aliases)}


class ParameterProgress(DiskRecord):
    """The number of optimizer steps of a parameter, and the moments of the parameter that already exist, by torch's
    names."""

    step: Count
    begun: Annotated[dict[Name, Literal[True]], Field(max_length=_DIMENSIONS_MAX)]


_NUMBERS = (
    "lr", "initial_lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay", "initial_accumulator_value",
)  # fmt: skip
_SWITCHES = ("maximize", "amsgrad", "nesterov")
_SEED_END = 1 << 64


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Check the types of a param group's hyperparameters, and return the group. Each optimizer checks the values
    itself.

    Raises:
        ValueError: a hyperparameter is missing or has the wrong type.
    """
    params = group.get("params")
    if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
        raise ValueError("params is not a list of names")
    if "lr" not in group:
        raise ValueError("lr is missing")
    for name in _NUMBERS:
        if name in group:
            _require_finite(name, group[name])
    if "betas" in group:
        betas = group["betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ValueError(f"betas is {_short(betas)}, not a pair of numbers")
        for index, beta in enumerate(betas):
            _require_finite(f"betas[{index}]", beta)
    for name in _SWITCHES:
        if not isinstance(group.get(name, False), bool | np.bool_ | int):
            raise ValueError(f"{name} is {_short(group[name])}, not true or false")
    seed = group.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < _SEED_END:
        raise ValueError(f"seed is {_short(seed)}, not an integer between 0 and 2^64 - 1")
    return group


def _require_finite(name: str, value: Any) -> None:
    one = value.item() if isinstance(value, torch.Tensor | np.ndarray | np.generic) and _size(value) == 1 else value
    if isinstance(one, bool) or not isinstance(one, int | float) or not abs(one) <= sys.float_info.max:
        raise ValueError(f"{name} is {_short(value)}, not a finite number")


def _size(value: Any) -> int:
    return int(value.numel() if isinstance(value, torch.Tensor) else value.size)


def _short(value: Any) -> str:
    """Return a short text for a value in a message. If the value may be long, the text is only its type."""
    return repr(value) if value is None or isinstance(value, bool | float) else f"a {type(value).__name__}"


class OptimizerRecord(DiskRecord):
    """An optimizer without its tensors.

    Attributes:
        class_name: class name of infinity's optimizer.
        param_groups: hyperparameters of each group, with the names of its parameters in `params`.
        state: progress of each parameter, by name.
        last_grad_norm: gradient norm of the last step.
        skipped_steps: number of all steps that were skipped.
        skips_in_a_row: number of steps that were skipped since the last step that was made.
    """

    class_name: Name
    param_groups: list[Annotated[dict[str, Any], AfterValidator(_hyperparameters)]]
    state: Annotated[dict[str, ParameterProgress], Field(max_length=_PARAMETERS_MAX)]
    last_grad_norm: float
    skipped_steps: Count
    skips_in_a_row: Count

    @model_validator(mode="after")
    def _sound(self) -> OptimizerRecord:
        # SGD without momentum has no moments, and neither has an expert that had no token yet
        expected = KEPT.get(self.class_name.lower()) if self.class_name != "SGD" else None
        for name, progress in self.state.items():
            if expected is not None and progress.begun and progress.begun.keys() != expected.keys():
                raise ValueError(f"{self.class_name} has {sorted(progress.begun)} of '{name}' and not {set(expected)}")
        return self


def record_optimizer(class_name: str, **values: Any) -> OptimizerRecord:
    """Return the record of an existing optimizer.

    Raises:
        ConfigError: a value such as a learning rate of NaN, which a resumed run could not read.
    """
    try:
        return OptimizerRecord(class_name=class_name, **values)
    except ValidationError as error:
        raise ConfigError(f"infinity.{class_name} cannot be kept in a generation: {first_problem(error)}") from error


def _random_numbers(value: Any) -> dict[str, Any]:
    """Check a snapshot of durable/rng.py, and return it.

    The check finds the errors that the generators would not notice themselves.

    Raises:
        ValueError: the snapshot is malformed.
    """
    if not isinstance(value, dict) or value.keys() != {"python", "numpy", "torch", "cuda"}:
        raise ValueError("states of the generators of Python, numpy, torch and CUDA are missing")
    python, mine, cuda = value["python"], value["numpy"], value["cuda"]
    if not isinstance(python, tuple) or len(python) != 3 or not _is_words(python[1], 625) or python[1][-1] > 624:
        raise ValueError("no state of Python's generator")
    if not isinstance(mine, dict) or not isinstance(mine.get("state"), dict):
        raise ValueError("no state of numpy's generator")
    if mine.get("bit_generator") == "MT19937":
        at = mine["state"].get("pos")
        if not _is_words(mine["state"].get("key"), 624) or not isinstance(at, int | np.integer) or not 0 <= at <= 624:
            raise ValueError("no state of numpy's generator")
    states = [value["torch"], *(cuda if isinstance(cuda, list) else [None])]
    if not all(isinstance(each, torch.Tensor) and each.dtype == torch.uint8 and each.dim() == 1 for each in states):
        raise ValueError("no states of torch's generators")
    return value


def _is_words(value: Any, count: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint32 and value.shape == (count,)


_RandomNumbers = Annotated[dict[str, Any], PlainValidator(_random_numbers)]


def _buffers(value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, dict) or not all(isinstance(each, torch.Tensor) for each in value.values()):
        raise ValueError("not a dict of tensors by name")
    for name in value:
        if not isinstance(name, str):
            raise ValueError("not a dict of tensors by name")
        _tensor_name(name)
    return value


class GenerationBody(DiskRecord):
    """The body of a generation.

    Attributes:
        optimizers: optimizers in the order of their creation.
        tracked: state_dicts of the objects that were passed to infinity.track, by name.
        buffers: the model's persistent buffers.
        rng: states of the random number generators at the top of the training loop.
        rng_before_forward: states of the generators when the next forward began; None if no forward had begun.
        unsure: reason why a run that resumes from this generation may continue at another place in its loop; "" if it
            continues at the same place.
    """

    optimizers: list[OptimizerRecord]
    tracked: dict[str, Any]
    model: ModelRecord
    buffers: Annotated[dict[str, torch.Tensor], PlainValidator(_buffers)]
    rng: _RandomNumbers
    rng_before_forward: _RandomNumbers | None
    unsure: str = ""

    @model_validator(mode="after")
    def _sound(self) -> GenerationBody:
        """Check that optimizers and buffers fit the model's parameters."""
        trainable = {(group.unit, group.group) for group in self.model.groups if group.trainable}
        known = {each.name: (each.unit, each.group) in trainable for each in self.model.parameters}
        require_unique((name for each in self.optimizers for name in each.state), "the optimizer's state of")
        for optimizer in self.optimizers:
            for name in (name for group in optimizer.param_groups for name in group["params"]):
                if name not in known:
                    raise ValueError(f"{optimizer.class_name} has '{name}', which is not a parameter of the model")
            for name in optimizer.state:
                if not known.get(name, False):
                    raise ValueError(f"{optimizer.class_name} trained '{name}', which is not a trained parameter")
        for name in self.buffers.keys() & set(self.model.names()):
            raise ValueError(f"'{name}' is a parameter and a buffer")
        return self

    def begun(self) -> dict[str, list[str]]:
        """Return the moments that already exist, by parameter, with torch's names."""
        return {name: list(each.begun) for optimizer in self.optimizers for name, each in optimizer.state.items()}


def parse_body(value: dict[str, Any], source: object) -> GenerationBody:
    """Parse the body of a manifest. Raises ManifestError, which names `source` and the field."""
    return validated(GenerationBody, value, source)
