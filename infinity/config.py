"""Swap config: where states are kept and how they move. It contains nothing about training.

One schema serves YAML, JSON and dicts. An unknown key is an error that names the nearest known key. A value whose
feature is not implemented yet raises an error; no value is ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from infinity.errors import ConfigError, NotAvailableError, printable
from infinity.files import nearest, read_regular, require_different, require_possible
from infinity.quoting import quoted
from infinity.sizes import THREADS_MAX, parse_bytes
from infinity.strict_parsers import parse_json, parse_yaml

_FILE_BYTES_MAX = 64 << 10
_MISTAKES_MAX = 10
"""Maximum number of mistakes that one error names."""
_KEY_CHARS_MAX = 80
_STEPS_END = 10**12
PINS_MAX = 64


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


def _different(paths: list[Path]) -> list[Path]:
    require_different(paths)
    return paths


def _path(value: object) -> object:
    if isinstance(value, str | Path):
        require_possible(str(value))
    return value


def _whole(value: object) -> object:
    """Accept integers only. Without this check, pydantic accepts true as 1, 32.0 as 32 and ' 1_0 ' as 10."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(?:0|[1-9][0-9]{0,17})", value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("write a whole number, such as 32")
    return value


def _steps_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        steps = _whole(value)
    except ValueError:
        raise ValueError("write auto, or a whole number, such as 32") from None
    if not isinstance(steps, int) or not 0 <= steps < _STEPS_END:
        raise ValueError("the number of steps must be 0 or more, with at most twelve digits")
    return steps


def _word(value: object) -> object:
    """Return 'off' for False, because some YAML readers read an unquoted `off` as False."""
    return "off" if value is False else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("write a number, such as 300")
    return value


_RANKS_MARGIN_S = 30.0
"""Seconds after nvme.deadline_s in which a rank can report that its disk hangs."""

Size = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Whole = Annotated[int, BeforeValidator(_whole)]
Tier = Literal["device", "host", "nvme", "auto"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryConfig(_Section):
    """Memory budgets. A budget that is omitted is measured."""

    device: Size | None = None
    """Device memory that infinity may use; omitted = measured.

    One half is for weights and for gradients on their way to RAM, and is allocated once. The other half is for
    activations. Without a GPU, device memory is a part of RAM.
    """
    host: Size | None = None
    """RAM for everything that infinity keeps or stages in RAM, such as gradients, staging buffers and states;
    omitted = 80 % of the RAM that is available when the model is offloaded. Set a size on a virtual machine whose RAM
    grows when it is used. Gradients take 2 B per bf16 parameter, or 4 B where the gradients of several backward passes
    are added. If accumulation_steps is given, the plan reserves these 4 B for as many units as fit. With gradients:
    nvme, RAM has room for the gradients of two units in fp32."""


class NvmeConfig(_Section):
    """Disks, and how they are used."""

    paths: Annotated[
        list[Annotated[Path, BeforeValidator(_path)]],
        BeforeValidator(_one_or_many),
        AfterValidator(_different),
        Field(max_length=64),
    ] = Field(default_factory=list)
    """Directories for the swap files, one for each disk.

    Each directory belongs to one run at a time. A missing directory is created if its parent directory exists. Data is
    striped over several directories in proportion to the bandwidth of their disks. The bandwidth was measured by
    infinity-bench, or is measured by a short probe at the start.
    """
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    """Engine of the disk I/O. io_uring: the kernel's asynchronous interface. threads: for kernels and containers that
    refuse io_uring. auto: io_uring if the kernel allows it, else threads."""
    block: Size | None = None
    """Size of the blocks into which larger transfers are split; omitted = the size that infinity-bench measured to be
    best, else 1 MiB."""
    in_flight: Size | None = None
    """Maximum number of bytes in flight on each disk; omitted = the number that infinity-bench measured to be best,
    else 32 MiB."""
    queue_depth: Whole = Field(default=128, ge=1, le=1024)
    """Maximum number of blocks in flight on each disk."""
    deadline_s: Annotated[float, BeforeValidator(_number)] = Field(default=300.0, gt=0, le=86400, allow_inf_nan=False)
    """Seconds that a disk may take to complete a block.

    If a block takes longer, the run ends with an error that names the disk.
    """
    checksums: bool = True
    """Whether each 4 KiB block that is read is compared with the checksum of the block that was written.

    The checksums take RAM: 0.1 % of the size of the swap files.
    """


class UpdateConfig(_Section):
    """Division of an update into tiles and threads. This section never changes a bit of the result."""

    tile: Size | None = None
    """Size of the tiles into which an update is divided: bytes of one fp32 moment per tile; omitted = as many bytes as
    fit the threads' caches, at least 1 MiB. Never changes a bit of the result."""
    threads: Whole | None = Field(default=None, ge=1, le=THREADS_MAX)
    """Number of compute threads of an update; omitted = the number of cores that this process may use, but at most the
    number of threads that torch uses. Never changes a bit of the result."""


class RanksConfig(_Section):
    """Several ranks. Without torchrun the section has no effect."""

    gather: Literal["auto", "world", "node", "none"] = "auto"
    """Ranks from which a rank gathers weights for each use.

    The first gather after an update is always from all ranks. world: all ranks (ZeRO-3). node: the ranks of this
    machine, which together keep a copy of all weights in RAM (hpZ). none: no rank; each rank keeps a copy of all
    weights in RAM (ZeRO-2). auto: node if there are several machines and the copy takes at most half of memory.host,
    else world. Never changes a bit of the result.
    """
    wire: Literal["auto", "host", "gloo"] = "auto"
    """Way of the weights to the ranks. Never changes a bit of the result.

    host: the ranks of one machine share memory. If all weights rest in RAM, the ranks keep one copy of them there, and
    each rank uses this copy. Otherwise each rank brings its slice to the shared memory for each use, and all ranks
    copy it from there. Gradients take the same way. It needs all ranks on one machine. gloo: each rank keeps a slice of
    the weights, and the ranks send the slices to each other for each use (gather). auto: host if it is possible.
    """
    deadline_s: Annotated[float | None, BeforeValidator(_number)] = Field(
        default=None, gt=0, le=604800, allow_inf_nan=False
    )
    """Seconds for which each rank waits for another rank; omitted = nvme.deadline_s and 30 seconds. After that the run
    ends with an error that says where each rank is. A script in which one rank does something alone for longer, such as
    an evaluation without the model, needs a larger value."""


class SwapConfig(_Section):
    """Swap config: the tiers of the states, and the way that states move (docs/reference/config.md)."""

    weights: Tier = "auto"
    """Tier of the weights between uses."""
    optimizer: Tier = "auto"
    """Tier of the optimizer states between updates: both moments, and the fp32 master or its 16-bit residual (see
    master). device: the device (GPU) keeps the weights, states and gradients of all units that are trained, and updates
    them there. auto: the device, for as many units as fit half of memory.device (more if the other half is larger than
    40 GiB), and RAM and NVMe for the other units."""
    gradients: Literal["host", "device", "nvme", "auto"] = "auto"
    """Tier in which gradients wait for the step, except gradients of units whose states the device keeps (optimizer):
    these stay there. auto: RAM for as many units as memory.host has room for, and NVMe for
    the other units. nvme: NVMe for all units. On NVMe, the first micro-batch moves 4 B per bf16 parameter (2 B written,
    2 B read), and each further micro-batch moves 8 B in fp32."""
    activations: Literal["auto", "keep", "recompute", "host", "nvme"] = "auto"
    """Tier of the tensors that a forward keeps for its backward. keep: the device. host: RAM. nvme: NVMe. auto: the
    device, if they fit or if the batch is not known; else RAM; NVMe only if no other plan fits. Without a GPU, host is
    the same as keep. recompute: the older spelling of recompute: blocks. Never changes a bit of the result."""
    recompute: Literal["auto", "blocks", "none"] = "auto"
    """Whether the backward pass computes each block again. blocks: a forward keeps only the inputs of the blocks. none:
    it keeps every tensor that the backward pass needs. auto: none with activations: keep; the faster one if the batch
    and the rates of the machine are known, as in infinity plan; else blocks if the model supports it. Never changes a
    bit of the result."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)
    update: UpdateConfig = Field(default_factory=UpdateConfig)
    ranks: RanksConfig = Field(default_factory=RanksConfig)
    overlap: Annotated[Literal["auto", "during_backward", "before_forward", "off"], BeforeValidator(_word)] = "auto"
    """Time at which updates run. during_backward: speculation; updates begin during the backward pass, before step() is
    called, and an update that step() does not accept is computed again. before_forward: updates begin with step(), and
    the next use of a unit waits for the update of this unit. off: step() returns when all updates are done. auto:
    during_backward as long as most of its updates are accepted and, on a GPU, as long as it is faster; else
    before_forward. Never changes a bit of the result."""
    vertical: bool = False
    """Whether a backward pass has several micro-batches, all of which go through one unit before the next unit.

    This way a unit's weights are fetched once for all micro-batches. infinity.backward makes such passes, and so does
    the Trainer under `infinity run`.
    """
    commit_every: Annotated[int | Literal["auto"], PlainValidator(_steps_or_auto)] = "auto"
    """Steps between durable generations. 0: no generations. States are updated in place and take half the space, and a
    run that is killed must start again from a saved model. auto: as often as is possible at little cost, if the disks
    have room for generations; a line of the plan shows how often that is, and why."""
    keep: Whole = Field(default=1, ge=1, le=64)
    """Number of generations that are kept. Each generation takes the space of one copy of the states."""
    pins: Whole = Field(default=0, ge=0, le=PINS_MAX)
    """Maximum number of generations that checkpoint folders pin at once.

    Each pin takes the space of one copy of the states.
    """
    master: Literal["split16", "fp32", "none"] = "split16"
    """Form of the fp32 master of bf16 weights. split16: the weight and a 16-bit residual, which together are the exact
    master. fp32: the full master, stored in addition to the weight. none: no master; weights are rounded
    stochastically."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Form of the optimizer's moments. bf16 and int8 move fewer bytes."""
    experts: Literal["auto", "apart", "together"] = "auto"
    """Whether the experts of a mixture are fetched, updated and released apart. apart: each expert is a unit (small
    experts: a few together), and only the weights of the experts that a batch is routed to are fetched. together: all
    experts of a layer are one unit with the rest of the layer. auto: apart, if the model computes its experts with
    transformers' grouped_mm, and with several ranks only with weights: host. Several ranks with experts apart share
    all weights in RAM (ranks.wire). Never changes a bit of the result on the CPU, unless experts have adapters
    (docs/exact.md)."""
    frozen: Literal["auto", "bf16", "int8", "nf4"] = "auto"
    """Form in which frozen weights of blocks are kept. nf4: in 4 bits. int8: in 8 bits. bf16: not encoded; weights keep
    their own dtype (bf16 or another one), and a quantized checkpoint is decoded once. auto: in the form that the
    checkpoint has, even if bitsandbytes quantized the checkpoint. Embeddings, head, norms and adapters are not
    encoded."""

    @model_validator(mode="after")
    def _one_meaning(self) -> SwapConfig:
        if self.activations == "recompute" and self.recompute == "none":
            raise ValueError(
                "activations: recompute and recompute: none contradict each other. Remove one: activations: recompute "
                "is the older spelling of recompute: blocks"
            )
        return self

    @property
    def ranks_deadline_s(self) -> float:
        """Seconds for which each rank waits for another rank."""
        return self.nvme.deadline_s + _RANKS_MARGIN_S if self.ranks.deadline_s is None else self.ranks.deadline_s

    def require_available(self, source: str = "") -> None:
        """Raise an error for values whose feature this version does not have yet.

        Args:
            source: name of the file that the config came from, for the message.

        Raises:
            NotAvailableError: the config has such a value; the message names the key and what to write instead.
        """
        for key in _NOT_YET:
            value = getattr(self, key)
            if value not in (usable := _usable(key)):
                instead = f"{key}: {', '.join(usable[:-1])} or {usable[-1]}"
                raise NotAvailableError(
                    f"{f'{source}: ' if source else ''}{key}: {value} is not available yet; use {instead}"
                )


_OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
"""Keys by which a config of DeepSpeed is recognized."""

_NOT_YET = {"gradients": ("device",)}
"""Values that this version does not accept, by key."""


def _usable(key: str) -> list[str]:
    """Return the values that this version accepts for a key."""
    return [each for each in get_args(SwapConfig.model_fields[key].annotation) if each not in _NOT_YET.get(key, ())]


def _known_keys(model: type[BaseModel], prefix: str = "", under: str = "") -> list[str]:
    """Return all keys of the config, or all keys of the section `under`."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return [key.removeprefix(f"{under}.") for key in keys if key.startswith(f"{under}.")] if under else keys


def _explain(error: ValidationError, source: str) -> ConfigError:
    mistakes = error.errors(include_url=False)
    if any(item["loc"][0] in _OF_DEEPSPEED for item in mistakes if item["type"] == "extra_forbidden"):
        return ConfigError(
            f"{source} is a config of DeepSpeed, not a swap config. `infinity convert {source} -o swap.yaml` makes a "
            "swap config of it."
        )
    lines = [_explain_one(item) for item in mistakes[:_MISTAKES_MAX]]
    if len(mistakes) > _MISTAKES_MAX:
        lines.append(f"and {len(mistakes) - _MISTAKES_MAX} more")
    return ConfigError(f"{source}: " + "; ".join(lines))


def _explain_one(item: Any) -> str:
    key = printable(".".join(str(part)[:_KEY_CHARS_MAX] for part in item["loc"]))
    if item["type"] in ("extra_forbidden", "invalid_key"):
        near = difflib.get_close_matches(key, _known_keys(SwapConfig), n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(SwapConfig.model_fields)}"
        return f"unknown key '{key}'; {hint}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "model_type":
        message = f"write keys and values here: {', '.join(_known_keys(SwapConfig, under=key))}"
    known = [] if item["type"] != "literal_error" else re.findall("'([^']+)'", item["ctx"]["expected"])
    if key in _NOT_YET and known:
        known = _usable(key)
        message = f"Input should be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
    # str() of a list could take gigabytes
    word = item["input"][:_KEY_CHARS_MAX] if isinstance(item["input"], str) else ""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    given = quoted(item["input"])
    return f"{key}: {message}{'' if given in message else f' (given: {given})'}{hint}"


def load_config(source: str | Path | Mapping[str, Any] | SwapConfig | None) -> SwapConfig:
    """Read and check a swap config.

    Args:
        source: path of a YAML or JSON file, a mapping with the same keys, a SwapConfig, or None for all defaults.

    Raises:
        ConfigError: the file is unreadable, a key is unknown or a value is wrong; the message names the key, and for an
            unknown key the nearest known key.
        NotAvailableError: the config asks for a feature that is not implemented yet.
    """
    if isinstance(source, SwapConfig):
        config = source
    else:
        name, values = "swap config", source
        if isinstance(source, str | Path):
            name, values = printable(source), _read_file(Path(source))
        if not isinstance(values, Mapping | None):
            raise ConfigError(f"{name}: expected keys and values, found {type(values).__name__}")
        try:
            config = SwapConfig.model_validate(dict(values or {}))
        except ValidationError as error:
            raise _explain(error, name) from None
    _require_directories(config.nvme.paths)
    config.require_available(printable(source) if isinstance(source, str | Path) else "")
    return config


def _require_directories(paths: list[Path]) -> None:
    """Raise ConfigError for a path that can never be created, because the path or its nearest existing parent is not a
    directory."""
    for path in paths:
        try:
            above = nearest(path)
            found = above.is_dir()
        except OSError as error:
            raise ConfigError(f"nvme.paths: cannot use {printable(path)}: {error.strerror}") from error
        if not found:
            raise ConfigError(
                f"nvme.paths: {printable(above)} is not a directory. Name a directory for the swap files."
            )


def _read_file(path: Path) -> Any:
    name = printable(path)
    try:
        text = read_regular(path, _FILE_BYTES_MAX, follow=True).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the swap config {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        return parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{name}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from error
