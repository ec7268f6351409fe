"""What a generation says beside where its states are: read from disk, so every field is typed and none is unknown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from infinity.io.manifest import Record, validated

_Count = Annotated[int, Field(ge=0, le=1 << 48)]
_Name = Annotated[str, Field(max_length=4096)]


class GroupRecord(Record):
    """A group of a unit's parameters (state/unit.py): `numel` elements in flat buffers, alignment gaps included.

    Attributes:
        group: its index in its unit.
        dtype: of the weights.
        master: how the fp32 master is kept beside them.
        moments: how exp_avg and exp_avg_sq are kept.
    """

    unit: _Name
    group: _Count
    dtype: Literal["float32", "bfloat16", "float16"]
    trainable: bool
    master: Literal["weight", "split16", "fp32", "none"]
    moments: Literal["fp32", "bf16", "int8"]
    numel: _Count


class ParameterRecord(Record):
    """A parameter: elements [offset, offset + numel) of its group.

    Attributes:
        aliases: other names of a tied parameter.
    """

    name: _Name
    aliases: list[_Name]
    shape: list[_Count]
    unit: _Name
    group: _Count
    offset: _Count


class ModelRecord(Record):
    """What a reader of the states must know of the model.

    Attributes:
        class_name: of the model; `config` and `generation_config`: as transformers writes them, None for other models.
    """

    class_name: _Name
    config: str | None
    generation_config: str | None
    groups: list[GroupRecord]
    parameters: list[ParameterRecord]


class ParameterProgress(Record):
    """A parameter's optimizer steps, and which of its moments have begun, by torch's names."""

    step: _Count
    begun: dict[_Name, bool]


class OptimizerRecord(Record):
    """An optimizer without its tensors.

    Attributes:
        class_name: of infinity's optimizers.
        param_groups: hyperparameters, and the names of the parameters in `params`.
        state: by parameter.
    """

    class_name: _Name
    param_groups: list[dict[str, Any]]
    state: dict[str, ParameterProgress]
    last_grad_norm: float
    skipped_steps: _Count
    skips_in_a_row: _Count


class Body(Record):
    """The body of a generation.

    Attributes:
        optimizers: in the order they were made.
        tracked: by name, the state_dict of what was given to infinity.track.
        buffers: the model's persistent ones.
        rng: random number generators at the top of the loop; `rng_before_forward`: when the next forward began, None
            when none has.
    """

    optimizers: list[OptimizerRecord]
    tracked: dict[str, Any]
    model: ModelRecord
    buffers: dict[str, Any]
    rng: dict[str, Any]
    rng_before_forward: dict[str, Any] | None


def parse_body(value: dict[str, Any], source: object) -> Body:
    """Raises ManifestError that names `source` and the field."""
    return validated(Body, value, source)
