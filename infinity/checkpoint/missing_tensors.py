"""Parameters for which a checkpoint has no tensor, such as the parameters of a new head. transformers initializes such
parameters.

[Note: where their values are]
transformers initializes the missing parameters while it loads the model, by the model's own rule and in the order of
the model's modules. All other parameters are on the meta device at that moment and draw no random numbers. Therefore
the initialized values, and the random numbers that are drawn later, are the same as in a script without infinity. At
the end of loading, accelerate moves every parameter to the meta device. The initialized values would be lost, because
they are in no file. Therefore infinity keeps a reference to every in-memory parameter that is assigned to a module.

With `ignore_mismatched_sizes`, transformers initializes a parameter whose tensor in the checkpoint has another size.
But transformers compares sizes only for tensors that it loads into memory. Therefore a model with such tensors is
loaded twice, the second time with these tensors in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.checkpoint.safetensors_reader import stored_as

Kept = Mapping[tuple[nn.Module, str], nn.Parameter]


@contextmanager
def keeping() -> Iterator[Kept]:
    """Inside the `with` block, record every in-memory parameter that is assigned to a module. The key is the module and
    the parameter's name in this module.
    """
    kept: dict[tuple[nn.Module, str], nn.Parameter] = {}

    def given(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            kept[module, name] = parameter

    hook = register_module_parameter_registration_hook(given)
    try:
        yield kept
    finally:
        hook.remove()


def put_back(model: nn.Module, names: list[str], kept: Kept) -> bool:
    """Give a parameter the values with which transformers initialized it. Return whether `kept` has such values.

    Args:
        model: the loaded model.
        names: all names of the parameter; a tied parameter has several.
        kept: the parameters that keeping() kept.
    """
    places = [(model.get_submodule(module), key) for module, _, key in (name.rpartition(".") for name in names)]
    found = next((kept[place] for place in places if place in kept), None)
    if found is None:
        return False
    for module, key in places:
        module._parameters[key] = found
    return True


def of_another_size(model: nn.Module, names: Iterable[list[str]], index: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the parameters whose tensors in the checkpoint have another size.

    Args:
        model: the loaded model.
        names: all names of each parameter.
        index: accelerate's index of the tensors' places.
    """
    found: list[str] = []
    for same in names:
        name = next((each for each in same if index.get(each, {}).get("safetensors_file")), None)
        if name is None:
            continue
        dtype, shape = stored_as(index[name]["safetensors_file"], index[name].get("weight_name", name))
        if "F" in dtype and shape != tuple(model.get_parameter(name).shape):  # quantized tensors have other shapes
            found += same
    return found


@contextmanager
def reporting_later() -> Iterator[Callable[[], None]]:
    """Delay transformers' report of missing, unexpected and mismatched tensors.

    Yields a function that logs the delayed report. If the `with` block raises an exception, the report is logged, too.
    """
    reporter = logging.getLogger("transformers.modeling_utils")
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            held.append(record)
        return record.levelno >= logging.ERROR

    def report() -> None:
        while held:
            reporter.handle(held.pop(0))

    reporter.addFilter(hold)
    try:
        yield report
    except BaseException:
        reporter.removeFilter(hold)
        report()
        raise
    finally:
        reporter.removeFilter(hold)
