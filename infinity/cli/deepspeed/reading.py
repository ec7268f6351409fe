"""A DeepSpeed config as a list of its keys: from JSON, or from a config file of Accelerate, whose names for the same
keys become DeepSpeed's.

[Note: which files]
DeepSpeed reads JSON with comments (hjson). Here comments are an error that says how to remove them: a reader that
guesses what a damaged file means is worse than none. Accelerate's file is YAML, or JSON with the same keys; it names a
DeepSpeed config in `deepspeed_config_file`, or has some of its keys in itself. Accelerate takes these only where the
DeepSpeed config says "auto", and so does this reader.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.cli.deepspeed.keys import ACCELERATE_KEYS, ACCELERATE_NAMES, FSDP_KEYS, KEYS, SECTIONS
from infinity.echo import quoted
from infinity.errors import ConfigError, printable
from infinity.files import read_regular
from infinity.strict import parse_json, parse_yaml

FILE_BYTES_MAX = 1 << 20
AUTO = "auto"
_LINK, _ACCELERATE, _FSDP = "deepspeed_config_file", "deepspeed_config", "fsdp_config"
_YAML = (".yaml", ".yml")
_OURS = {"weights", "nvme", "memory", "commit_every"}
_SHOWN = 5


@dataclass(frozen=True)
class Item:
    """A key of a config, and its value.

    Attributes:
        key: DeepSpeed's name with its sections, or a key of Accelerate.
        shown: as the file has it.
    """

    key: str
    value: Any
    shown: str


@dataclass(frozen=True)
class Source:
    """A config that was read.

    Attributes:
        items: its keys, in the file's order, each once.
        overruled: keys that are not read, because another place says the same: those of Accelerate beside a DeepSpeed
            config, and an `aio` that is not where DeepSpeed looks for it.
        file: the DeepSpeed config, as a script names it; "" where Accelerate's file has all of it.
        accelerate: the config file of Accelerate; "" where there is none.
        fsdp: whether it is a config of FSDP, which `file` is then, or `accelerate` has.
    """

    items: tuple[Item, ...]
    overruled: tuple[Item, ...]
    file: str
    accelerate: str
    fsdp: bool = False


def read(path: Path) -> Source:
    """Read a config of DeepSpeed or FSDP, or Accelerate's config file.

    Raises:
        ConfigError: the file cannot be read, or is no DeepSpeed config; says what it is instead, where that can be
            told.
    """
    name, values = printable(path), _values(path)
    link = values.get("deepspeed")
    if values.get("distributed_type") == "FSDP":
        inner = values.pop(_FSDP, None) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}: {_FSDP} is {quoted(inner)}; keys and values belong there")
        told = {key: value for key, value in values.items() if value != {} and key != "distributed_type"}
        others = [Item(f"accelerate.{key}", value, key) for key, value in told.items()]
        return Source((*_of_fsdp(inner, f"{_FSDP}."), *others), (), "", str(path), fsdp=True)
    if _ACCELERATE in values:
        return _of_accelerate(path, values)
    if isinstance(link, str) and "zero_optimization" not in values:
        file = shlex.quote(printable(link))
        raise ConfigError(f"{name}: is no DeepSpeed config; it names one: infinity convert {file}")
    if _is_fsdp(values):
        return Source(_of_fsdp(values), (), str(path), "", fsdp=True)
    _require_deepspeed(name, values)
    items, doubles = _once(_items(name, values))
    return Source(items, doubles, str(path), "")


def _is_fsdp(values: Mapping[str, Any]) -> bool:
    """Whether it has keys of FSDP, and none that only DeepSpeed has, in which activation_checkpointing is a section."""
    known = [each for each in _of_fsdp(values) if each.key in FSDP_KEYS and not isinstance(each.value, Mapping)]
    return bool(known) and not (values.keys() - {each.shown for each in known}) & (KEYS.keys() | SECTIONS)


def _of_fsdp(values: Mapping[str, Any], section: str = "") -> tuple[Item, ...]:
    """Its keys, which may do without `fsdp_`. Args: section: that they are in."""
    return tuple(
        Item(f"fsdp.{str(key).removeprefix('fsdp_')}", value, f"{section}{key}") for key, value in values.items()
    )


def _values(path: Path) -> dict[str, Any]:
    name = printable(path)
    try:
        text = read_regular(path.expanduser(), FILE_BYTES_MAX, follow=True).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the DeepSpeed config {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    is_yaml = path.suffix in _YAML
    try:
        values = parse_yaml(text) if is_yaml else parse_json(text)
    except ValueError as error:
        hint = "" if is_yaml else _about_comments(text)
        raise ConfigError(f"{name}: not valid {'YAML' if is_yaml else 'JSON'}: {error}{hint}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected the keys and values of a DeepSpeed config, found {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _about_comments(text: str) -> str:
    line = next((number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*(//|#|/\*)", line)), None)
    if line is None and not re.search(r"[,{\[]\s*(//|#|/\*)", text):
        return ""
    where = "" if line is None else f", as in line {line}"
    return (
        f". It has comments{where}, which JSON has not: remove them. Where DeepSpeed is installed, "
        "`hjson -j FILE > plain.json` does that"
    )


def _require_deepspeed(name: str, values: dict[str, Any]) -> None:
    """Raises ConfigError where nothing says that this is a DeepSpeed config."""
    if values.keys() & _OURS:
        raise ConfigError(f"{name}: is no DeepSpeed config; it looks like a swap config, which `infinity run` takes")
    if "distributed_type" in values:
        raise ConfigError(
            f"{name}: this config file of Accelerate has no {_ACCELERATE}; its distributed_type is "
            f"{quoted(values['distributed_type'])}, and nothing in it says where states rest. Write that to swap.yaml: "
            "`{weights: auto, optimizer: auto}`, or for a model larger than RAM "
            "`{weights: nvme, optimizer: nvme, nvme: {paths: [DIRECTORY]}}`; "
            "`infinity plan --model MODEL --config swap.yaml` says whether it fits"
        )
    known = KEYS.keys() | SECTIONS
    if not values.keys() & known:
        first = list(values)[:_SHOWN]
        near = {key: nearest_key(key) for key in first}
        found = ", ".join(f"{quoted(key)}{f' (did you mean {near[key]}?)' if near[key] else ''}" for key in first)
        raise ConfigError(
            f"{name}: is no DeepSpeed config: it has no key of one, such as zero_optimization. Found: "
            f"{found or 'nothing'}"
        )


def _items(name: str, values: Mapping[str, Any]) -> Iterator[Item]:
    values = dict(values)
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):  # of DeepSpeed before 0.2
        yield Item("zero_optimization.stage", int(zero), "zero_optimization")
        del values["zero_optimization"]
    for key, value in values.items():
        yield from _flat(name, key, value, key)


def _once(items: Iterator[Item]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The items whose keys are new, and the others; a key in its own place goes before one that is shown elsewhere."""
    ordered = sorted(items, key=lambda item: item.key != item.shown)
    first = {item.key: item for item in reversed(ordered)}
    return tuple(first[key] for key in reversed(first)), tuple(item for item in ordered if first[item.key] is not item)


def _flat(name: str, key: str, value: Any, shown: str) -> Iterator[Item]:
    if key == "zero_optimization.aio":  # where several guides put it
        key = "aio"
    if key in KEYS or key not in SECTIONS or value is None or value == {}:
        yield Item(key, value, shown)
    elif isinstance(value, Mapping):
        for below, each in value.items():
            yield from _flat(name, f"{key}.{below}", each, f"{shown}.{below}")
    else:
        raise ConfigError(f"{name}: {shown} is {quoted(value)}; keys and values belong there")


# -- Accelerate --------------------------------------------------------------------------------------------------------


def _of_accelerate(path: Path, values: dict[str, Any]) -> Source:
    name, inner = printable(path), values.pop(_ACCELERATE)
    if not isinstance(inner, dict):
        raise ConfigError(f"{name}: {_ACCELERATE} is {quoted(inner)}; keys and values belong there")
    given: list[Item] = []
    others: list[Item] = []
    for below, value in inner.items():
        shown = f"{_ACCELERATE}.{below}"
        known = ACCELERATE_NAMES.get(str(below))
        value = None if value == "none" and "path" in str(below) else value
        (others if known is None else given).append(Item(known or shown, value, shown))
    others += [Item(f"accelerate.{key}", value, key) for key, value in values.items()]
    link = inner.get(_LINK)
    if link in (None, "none"):
        return Source((*given, *others), (), "", str(path))
    if not isinstance(link, str):
        raise ConfigError(f"{name}: {_ACCELERATE}.{_LINK} is {quoted(link)}; the path of a file belongs there")
    file = _beside(path, Path(link))
    theirs = _values(file)
    if _ACCELERATE in theirs:
        raise ConfigError(f"{printable(file)}: is a config file of Accelerate again, and no DeepSpeed config")
    _require_deepspeed(printable(file), theirs)
    items, doubles = _once(_items(printable(file), theirs))
    asked = {item.key for item in items if item.value == AUTO}
    told = {item.key: item for item in given if item.key in asked}
    overruled = (*doubles, *(item for item in given if item.key not in asked))
    return Source((*(told.get(item.key, item) for item in items), *others), overruled, str(file), str(path))


def _beside(path: Path, link: Path) -> Path:
    """Where a path in a config file leads: from the working directory, as Accelerate takes it, or from the file."""
    from_file = path.expanduser().parent / link
    return link if link.expanduser().exists() or not from_file.exists() else from_file


def nearest_key(key: str) -> str:
    """The known key or section that is most like an unknown one; "" where none is."""
    known = [*FSDP_KEYS] if key.startswith("fsdp.") else [*KEYS, *SECTIONS]
    section, _, last = key.rpartition(".")
    inside = [each for each in known if each.rpartition(".")[0] == section]
    near = difflib.get_close_matches(last[:80], [each.rpartition(".")[2] for each in inside], n=1, cutoff=0.6)
    if near:
        return f"{section}.{near[0]}" if section else near[0]
    ends = {each.rpartition(".")[2]: each for each in known}
    near = difflib.get_close_matches(last[:80], ends, n=1, cutoff=0.75)
    return ends[near[0]] if near else ""


def known_key(key: str) -> Any:
    """The table's entry of a key; None for one that is unknown."""
    return KEYS.get(key) or FSDP_KEYS.get(key) or ACCELERATE_KEYS.get(key.removeprefix("accelerate."))
