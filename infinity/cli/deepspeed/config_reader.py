"""Reader of a DeepSpeed config as a list of keys: from JSON, or from a config file of Accelerate.

Accelerate's names of the keys are replaced by DeepSpeed's.

[Note: which files]
DeepSpeed reads hjson, which is JSON with comments. This reader refuses a file with comments, and the error says how to
remove the comments. A reader that accepts hjson would also accept some damaged files, and guess their meaning.
Accelerate's file is YAML, or JSON with the same keys. Accelerate's file names a DeepSpeed config in
`deepspeed_config_file`, or itself contains some keys of a DeepSpeed config. Accelerate uses these keys only if the
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

from infinity.cli.deepspeed.keys import DEEPSPEED, KEYS, ROWS, SECTIONS
from infinity.errors import ConfigError, printable
from infinity.files import read_regular
from infinity.quoting import quoted
from infinity.strict_parsers import parse_json, parse_yaml

FILE_BYTES_MAX = 1 << 20
AUTO = "auto"
_LINK, _ACCELERATE, _FSDP = "deepspeed_config_file", "deepspeed_config", "fsdp_config"
_OURS = {"weights", "nvme", "memory", "commit_every"}
_SHOWN = 5


@dataclass(frozen=True)
class ConfigItem:
    """A key of a config, and its value.

    Attributes:
        key: name of the key in the table of keys.
        shown: the key, as written in the file.
    """

    key: str
    value: Any
    shown: str


@dataclass(frozen=True)
class SourceConfig:
    """A config that was read.

    Attributes:
        items: the keys with their values, in the file's order. Each key occurs once.
        overruled: keys without effect, because another place sets the same key. Examples are keys of Accelerate if
            there is also a DeepSpeed config, and an `aio` in a section where DeepSpeed does not read `aio`.
        file: the path by which a script names the DeepSpeed config; "" if Accelerate's file has all keys.
        accelerate: the config file of Accelerate; "" if there is none.
        fsdp: whether `file` or `accelerate` is a config of FSDP.
    """

    items: tuple[ConfigItem, ...]
    overruled: tuple[ConfigItem, ...]
    file: str
    accelerate: str
    fsdp: bool = False


def read(path: Path) -> SourceConfig:
    """Read a config of DeepSpeed or FSDP, or Accelerate's config file.

    Raises:
        ConfigError: the file cannot be read, or is not a DeepSpeed config. If the actual kind of the file is known, the
            error names this kind.
    """
    _require_no_checkpoint(path.expanduser())
    name, values = printable(path), _values(path)
    if values.get("distributed_type") == "FSDP":
        inner = _of_fsdp(_section(name, _FSDP, values.pop(_FSDP, None) or {}), f"{_FSDP}.")
        others = {key: value for key, value in values.items() if value != {} and key != "distributed_type"}
        return SourceConfig((*inner, *_of_accelerate(others)), (), "", str(path), fsdp=True)
    if _ACCELERATE in values:
        return _with_accelerate(path, _section(name, _ACCELERATE, values.pop(_ACCELERATE)), values)
    link = values.get("deepspeed")
    if isinstance(link, str) and "zero_optimization" not in values:
        file = shlex.quote(printable(link))
        raise ConfigError(f"{name}: is not a DeepSpeed config; it names one: infinity convert {file}")
    # The section activation_checkpointing, and other keys that FSDP lacks, show that the file is a DeepSpeed config.
    fsdp = _of_fsdp(values)
    known = {each.shown for each in fsdp if each.key in KEYS and not isinstance(each.value, Mapping)}
    if known and not (values.keys() - known) & {*DEEPSPEED, *SECTIONS}:
        return SourceConfig(fsdp, (), str(path), "", fsdp=True)
    return SourceConfig(*_of_deepspeed(name, values), str(path), "")


def nearest_key(key: str) -> str:
    """Return the known key or section that is most similar to an unknown key; "" if none is similar."""
    known = [each for each in KEYS if each.startswith("fsdp.")] if key.startswith("fsdp.") else [*DEEPSPEED, *SECTIONS]
    section, _, last = key.rpartition(".")
    inside = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == section}
    anywhere = {each.rpartition(".")[2]: each for each in known}
    for names, cutoff in ((inside, 0.6), (anywhere, 0.75)):
        for near in difflib.get_close_matches(last[:80], names, n=1, cutoff=cutoff):
            return names[near]
    return ""


def _require_no_checkpoint(path: Path) -> None:
    """Raise ConfigError if the path is a checkpoint folder of DeepSpeed, or the folder of one step in it."""
    of_step = any(path.glob("*_optim_states.pt"))
    if of_step or any(path.glob("*/*_optim_states.pt")):
        folder = path.parent if of_step else path
        script = shlex.join(["python", printable(folder / "zero_to_fp32.py"), printable(folder)])
        raise ConfigError(
            f"{printable(path)}: is a checkpoint of DeepSpeed, not a config, and infinity cannot resume it. To start a "
            f"new run with its weights: `{script} OUT --safe_serialization` writes them to OUT (DeepSpeed must be "
            "installed); copy config.json and the tokenizer's files of the model to OUT; then OUT is a model for "
            "infinity. `infinity convert` takes the JSON that DeepSpeed was started with"
        )


def _values(path: Path) -> dict[str, Any]:
    name, is_yaml = printable(path), path.suffix in (".yaml", ".yml")
    try:
        text = read_regular(path.expanduser(), FILE_BYTES_MAX, follow=True).decode("utf-8-sig")
        values = parse_yaml(text) if is_yaml else parse_json(text)
    except OSError as error:
        raise ConfigError(f"cannot read the DeepSpeed config {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        hint, comment = "", re.search(r"(?m)(?:^|[,{\[])\s*(//|#|/\*)", text)
        if comment and not is_yaml:
            hint = (
                f". It has comments, as in line {text.count(chr(10), 0, comment.start(1)) + 1}, which JSON does not "
                "have: remove them. If DeepSpeed is installed, `hjson -j FILE > plain.json` removes them"
            )
        raise ConfigError(f"{name}: not valid {'YAML' if is_yaml else 'JSON'}: {error}{hint}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected the keys and values of a DeepSpeed config, found {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _section(name: str, shown: str, value: Any) -> dict[Any, Any]:
    """Return a section. Raises ConfigError if the value is not a mapping."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: {shown} is {quoted(value)}; it must have keys and values")
    return value


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def _of_deepspeed(name: str, values: dict[str, Any]) -> tuple[tuple[ConfigItem, ...], tuple[ConfigItem, ...]]:
    """Return one item for each key, and the duplicate items.

    If a key occurs in its proper section and in another section, the item of the proper section is used.
    """
    _require_deepspeed(name, values)
    if isinstance(values.get("zero_optimization"), bool):  # DeepSpeed before 0.2
        old = [ConfigItem("zero_optimization.stage", int(values.pop("zero_optimization")), "zero_optimization")]
    else:
        old = []
    items = [*old, *(item for key, value in values.items() for item in _flat(name, key, value, key))]
    ordered = sorted(items, key=lambda item: item.key != item.shown)
    first = {item.key: item for item in reversed(ordered)}
    return tuple(first[key] for key in reversed(first)), tuple(item for item in ordered if first[item.key] is not item)


def _require_deepspeed(name: str, values: dict[str, Any]) -> None:
    """Raise ConfigError if no key shows that this is a DeepSpeed config."""
    if values.keys() & _OURS:
        raise ConfigError(f"{name}: is not a DeepSpeed config; it looks like a swap config, which `infinity run` takes")
    if "distributed_type" in values:
        raise ConfigError(
            f"{name}: this config file of Accelerate has no {_ACCELERATE}; its distributed_type is "
            f"{quoted(values['distributed_type'])}, and the file does not say where states are kept. Write this to "
            "swap.yaml: `{weights: auto, optimizer: auto}`, or for a model larger than RAM `{weights: nvme, optimizer: "
            "nvme, nvme: {paths: [DIRECTORY]}}`; `infinity plan --model MODEL --config swap.yaml` says whether it fits"
        )
    if not values.keys() & {*DEEPSPEED, *SECTIONS}:
        near = {key: nearest_key(key) for key in list(values)[:_SHOWN]}
        found = ", ".join(f"{quoted(key)}{f' (did you mean {hint}?)' if hint else ''}" for key, hint in near.items())
        raise ConfigError(
            f"{name}: is not a DeepSpeed config: it has none of DeepSpeed's keys, such as zero_optimization. Found: "
            f"{found or 'nothing'}"
        )


def _flat(name: str, key: str, value: Any, shown: str) -> Iterator[ConfigItem]:
    if key == "zero_optimization.aio":  # several guides put it into this section
        key = "aio"
    if key in KEYS or key not in SECTIONS or value is None or value == {}:
        yield ConfigItem(key, value, shown)
        return
    for below, each in _section(name, shown, value).items():
        yield from _flat(name, f"{key}.{below}", each, f"{shown}.{below}")


# -- FSDP, Accelerate --------------------------------------------------------------------------------------------------


def _of_fsdp(values: Mapping[str, Any], section: str = "") -> tuple[ConfigItem, ...]:
    """Return the keys of FSDP, with or without the prefix `fsdp_`.

    `section` is the name of the keys' section, as a prefix.
    """
    return tuple(
        ConfigItem(f"fsdp.{str(key).removeprefix('fsdp_')}", value, f"{section}{key}") for key, value in values.items()
    )


def _of_accelerate(values: Mapping[str, Any]) -> tuple[ConfigItem, ...]:
    return tuple(ConfigItem(f"accelerate.{key}", value, key) for key, value in values.items())


def _with_accelerate(path: Path, inner: dict[Any, Any], values: dict[str, Any]) -> SourceConfig:
    """Combine the keys of Accelerate's file with the DeepSpeed config that the file names.

    `inner` has the keys for DeepSpeed in Accelerate's file, and `values` has the other keys of this file.
    """
    names = {key.accelerate: key.name for key in ROWS if key.accelerate}
    given, others = [], []
    for below, value in inner.items():
        shown = f"{_ACCELERATE}.{below}"
        if str(below) in names:
            open_path = value == "none" and "path" in str(below)
            given.append(ConfigItem(names[str(below)], None if open_path else value, shown))
        else:
            others.append(ConfigItem(f"accelerate.{shown}", value, shown))
    rest = (*others, *_of_accelerate(values))
    link = inner.get(_LINK)
    if link in (None, "none"):
        return SourceConfig((*given, *rest), (), "", str(path))
    if not isinstance(link, str):
        raise ConfigError(f"{printable(path)}: {_ACCELERATE}.{_LINK} is {quoted(link)}; it must be the path of a file")
    # Accelerate resolves the path from the working directory, but users often write the path relative to Accelerate's
    # file.
    beside = path.expanduser().parent / link
    file = Path(link) if Path(link).expanduser().exists() or not beside.exists() else beside
    theirs = _values(file)
    if _ACCELERATE in theirs:
        raise ConfigError(f"{printable(file)}: is another config file of Accelerate, not a DeepSpeed config")
    items, doubles = _of_deepspeed(printable(file), theirs)
    asked = {item.key for item in items if item.value == AUTO}
    told = {item.key: item for item in given if item.key in asked}
    overruled = (*doubles, *(item for item in given if item.key not in asked))
    return SourceConfig((*(told.get(item.key, item) for item in items), *rest), overruled, str(file), str(path))
