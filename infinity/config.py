"""The swap config: where states live and how they move. Nothing about training.

One schema for YAML, JSON and dicts. An unknown key is an error that names the nearest known one; a key whose feature
is not built yet is refused, never ignored.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from infinity.errors import ConfigError, NotAvailableError
from infinity.sizes import parse_bytes


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


def _word(value: object) -> object:
    """YAML takes a bare `off` for false."""
    return "off" if value is False else value


Size = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Tier = Literal["device", "host", "nvme", "auto"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryConfig(_Section):
    """The budgets. Omitted = measured."""

    device: Size | None = None
    """Bytes on the device for weights, activations and gradients in flight. Without a GPU this is RAM too."""
    host: Size | None = None
    """Bytes of RAM for everything infinity keeps or stages there."""


class NvmeConfig(_Section):
    """The disks and how they are driven."""

    paths: Annotated[list[Path], BeforeValidator(_one_or_many)] = Field(default_factory=list)
    """Directories for the swap files; each belongs to one run at a time. Several are striped by measured bandwidth."""
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    block: Size | None = None
    """Larger transfers are cut to this; omitted = as infinity-bench measured, else 1 MiB."""
    in_flight: Size | None = None
    """In flight on each device, all blocks together; omitted = as infinity-bench measured, else 32 MiB."""
    queue_depth: int = Field(default=128, ge=1, le=1024)
    """Blocks in flight on each device, however small they are."""
    deadline_s: float = Field(default=300.0, gt=0, le=86400)
    """A device that leaves a block unanswered for so long is given up: the run ends with an error, not in a hang."""
    checksums: bool = True
    """Check every page read against what was written."""


class UpdateConfig(_Section):
    """How the optimizer's pass is cut. Never changes a bit of the result."""

    tile: Size | None = None
    """Bytes of one fp32 moment per tile; omitted = enough for every thread's cache, 1 MiB at least."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads of the update; omitted = the cores this process may use, and no more than torch uses."""


class SwapConfig(_Section):
    """Where states live and how they move (README, "The swap config")."""

    weights: Tier = "auto"
    optimizer: Tier = "auto"
    gradients: Literal["host", "device", "nvme", "auto"] = "auto"
    activations: Literal["auto", "keep", "recompute", "host", "nvme"] = "auto"
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)
    update: UpdateConfig = Field(default_factory=UpdateConfig)
    overlap: Annotated[Literal["auto", "during_backward", "before_forward", "off"], BeforeValidator(_word)] = "auto"
    """When updates run: during_backward begins them before the step is decided and redoes what the step makes wrong;
    before_forward begins them with the step and lets each unit's next use wait for its own; off: step() does it all;
    auto: during_backward as long as that turns out right. Never changes a bit of the result."""
    commit_every: int = Field(default=0, ge=0)
    """Steps between durable generations; 0: never, states are updated in place."""
    keep: int = Field(default=1, ge=1, le=64)
    """Generations that stay; each takes the space of the states once, beside the slots that are written."""
    master: Literal["split16", "fp32", "none"] = "split16"
    moments: Literal["fp32", "bf16", "int8"] = "fp32"

    def require_available(self) -> None:
        """Refuse what the schema names and this version does not have yet.

        Raises:
            NotAvailableError: names the key and what to write instead.
        """
        refused = {
            "optimizer: device": (self.optimizer == "device", "optimizer: host, nvme or auto"),
            "gradients: device": (self.gradients == "device", "gradients: host, nvme or auto"),
            f"activations: {self.activations}": (
                self.activations in ("host", "nvme"),
                "activations: recompute or keep",
            ),
        }
        for key, (asked, instead) in refused.items():
            if asked:
                raise NotAvailableError(f"{key} is not available yet; use {instead}")


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys


def _explain(error: ValidationError, source: str) -> ConfigError:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, _known_keys(SwapConfig), n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(SwapConfig.model_fields)}"
            lines.append(f"unknown key '{key}'; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            known = [] if item["type"] != "literal_error" else re.findall("'([^']+)'", item["ctx"]["expected"])
            near = difflib.get_close_matches(str(item["input"]), known, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            lines.append(f"{key}: {message} (given: {item['input']!r}){hint}")
    return ConfigError(f"{source}: " + "; ".join(lines))


def load_config(source: str | Path | Mapping[str, Any] | SwapConfig | None) -> SwapConfig:
    """Read and check a swap config.

    Args:
        source: path of a YAML or JSON file, a mapping with the same keys, a SwapConfig, or None for all defaults.

    Raises:
        ConfigError: unreadable, unknown key or bad value; names the key and the nearest known one.
        NotAvailableError: a feature that is not built yet.
    """
    if isinstance(source, SwapConfig):
        config = source
    else:
        name, values = "swap config", source
        if isinstance(source, str | Path):
            name, values = str(source), _read_file(Path(source))
        if not isinstance(values, Mapping | None):
            raise ConfigError(f"{name}: expected keys and values, found {type(values).__name__}")
        try:
            config = SwapConfig.model_validate(dict(values or {}))
        except ValidationError as error:
            raise _explain(error, name) from None
    config.require_available()
    return config


def _read_file(path: Path) -> Any:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the swap config {path}: {error.strerror}") from error
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
