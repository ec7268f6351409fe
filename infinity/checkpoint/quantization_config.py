"""The quantization_config of a checkpoint, and the reader that belongs to it.

The model is built from plain linear layers, as if it were not quantized, and the library that quantized it is not used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infinity.checkpoint.bitsandbytes_files import BitsandbytesConfig
from infinity.checkpoint.fp8_files import Fp8Config
from infinity.checkpoint.packed_files import CompressedTensorsConfig, ModelOptConfig, Mxfp4Config
from infinity.checkpoint.quantized_files import IN_16_BITS, QuantizationMethod
from infinity.errors import ModelError

_METHODS: dict[str, Callable[[str, Mapping[str, Any]], QuantizationMethod]] = {
    "bitsandbytes": BitsandbytesConfig,
    "compressed-tensors": CompressedTensorsConfig,
    "fp8": Fp8Config,
    "modelopt": ModelOptConfig,
    "mxfp4": Mxfp4Config,
}
"""The methods of quantization that infinity reads, by their names in `quant_method`."""
_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def unquantized(
    model_class: Any, path: str, kwargs: Mapping[str, Any]
) -> tuple[Mapping[str, Any], QuantizationMethod | None]:
    """Return arguments with which `model_class.from_pretrained` builds a quantized model from plain layers.

    Args:
        model_class: a class with `from_pretrained`.
        path: a directory, or a hub id.
        kwargs: the caller's arguments for from_pretrained.

    Returns:
        `kwargs` itself and None, if the model is not quantized. Otherwise arguments with a config without quantization
        and with the names of quantized weights in the files, and the method of quantization.

    Raises:
        ModelError: the model is quantized in a way that cannot be read.
    """
    given = kwargs.get("config")
    hub = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
    quantization = _in_file(path if given is None else given, hub)
    if not quantization and getattr(given, "quantization_config", {}) is None:
        # The argument quantization_config=None of an Auto class replaces the value of config.json.
        quantization = _in_file(path, hub)
    if not quantization:
        return kwargs, None
    method = _method_of(path, quantization)
    config, rest = given, dict(kwargs)
    if isinstance(given, str | Path) or given is None:
        config, rest = _read_config(model_class, path if given is None else str(given), hub, kwargs)
    names = dict(kwargs.get("key_mapping") or {}) | dict(method.renamed)
    return rest | {"config": without_quantization(config)} | ({"key_mapping": names} if names else {}), method


def forget_renaming(model: Any, method: QuantizationMethod) -> None:
    """Make transformers save a model that it loaded with the arguments of unquantized() under the names of its
    parameters, and not under the names of quantized weights."""
    used = vars(model).get("_weight_conversions")
    if used is not None:
        model._weight_conversions = [each for each in used if each.source_patterns[0] not in method.renamed]


def method_of(path: str, config: Any) -> QuantizationMethod | None:
    """Return the method with which a model is quantized, from its config; None if the model is not quantized.

    Raises:
        ModelError: the model is quantized in a way that cannot be read.
    """
    found = _in_file(config, {})
    return _method_of(path, found) if found else None


def _method_of(path: str, quantization: Mapping[str, Any]) -> QuantizationMethod:
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = "bitsandbytes"  # transformers assumes bitsandbytes
    method = str(getattr(method, "value", method) or "a method without a name")
    if method not in _METHODS:
        raise ModelError(
            f"'{path}' is quantized by {method} (quantization_config in its config.json); infinity reads only what "
            f"bitsandbytes quantized, as NF4 or LLM.int8, FP8 of quant_method fp8 or compressed-tensors, NVFP4, MXFP4 "
            f"and 4-bit integers of compressed-tensors. {IN_16_BITS}"
        )
    return _METHODS[method](path, quantization)


def _in_file(source: Any, hub: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a model's quantization_config; None if the model is not quantized. `source` is the model's config, or the
    path of the config.
    """
    from transformers import PretrainedConfig

    values = source
    if isinstance(source, str | Path):
        try:
            values, _ = PretrainedConfig.get_config_dict(source, **hub)
        except Exception:  # from_pretrained raises a better error
            return None
    elif isinstance(source, PretrainedConfig):
        values = source.to_dict()
    for part in (values, values.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if found:
            return found if isinstance(found, dict) else vars(found)
    return None


def _read_config(model_class: Any, path: str, hub: Mapping[str, Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the config that from_pretrained would read, and the remaining arguments for it."""
    from transformers import AutoConfig

    again = dict(hub) | {name: kwargs[name] for name in ("trust_remote_code", "code_revision") if name in kwargs}
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    options = {name: value for name, value in kwargs.items() if name != "config"}
    config, rest = config_class.from_pretrained(path, return_unused_kwargs=True, **options)
    return config, rest | again


def without_quantization(config: Any) -> Any:
    """Return a copy of a config without its quantization."""
    config = copy.deepcopy(config)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            vars(part).pop("quantization_config", None)
    return config
