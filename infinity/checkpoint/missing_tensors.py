"""Parameters for which a checkpoint has no tensor, such as those of a new head: transformers initializes them.

[Note: where their values are]
transformers initializes these parameters while it loads, by the model's own rule and in the order of its modules. All
others are on the meta device then and draw no random numbers. So the values, and the random numbers drawn afterwards,
are those of a script without infinity. After that, accelerate puts every parameter on the meta device. The initialized
values would be lost, because they are in no file. Therefore a parameter in memory is kept when it is assigned to a
module.

A tensor of another size is initialized if the script asks for it (`ignore_mismatched_sizes`). But transformers compares
sizes only for tensors that it loads into memory. Such a model is loaded twice, the second time with these tensors in
memory.
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
    """Keep the in-memory parameters that are assigned to modules in the block, by the module and their name in it."""
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
    """Assign to a parameter the values that it was initialized with. Return whether there were any.

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
    """Return the names of the parameters that the checkpoint has with another size.

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
        if "F" in dtype and shape != tuple(model.get_parameter(name).shape):  # codes have their own shapes
            found += same
    return found


@contextmanager
def reporting_later() -> Iterator[Callable[[], None]]:
    """Delay transformers' report of missing, unexpected and mismatched tensors.

    Yields a function that logs the delayed report. An exception in the block logs it, too.
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
