"""Parameters that a checkpoint has no tensor for, as of a new head: transformers initializes them.

[Note: where their values are]
transformers initializes them while it loads, by the model's own rule and in the order of its modules. All others are
on the meta device then, where nothing is drawn: the values, and the random numbers that come after them, are those of
a script without infinity. Then accelerate puts every parameter on the meta device. The values would be gone, as they
are in no file; so a parameter in memory is kept when a module is given it.

A tensor of another size is initialized where the script asks for it (`ignore_mismatched_sizes`), but transformers
compares the sizes only of what it loads into memory: such a model is loaded twice, the second time with these tensors
in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.checkpoint.tensor_files import stored_as

Kept = Mapping[tuple[nn.Module, str], nn.Parameter]


@contextmanager
def keeping() -> Iterator[Kept]:
    """In the block the parameters in memory that modules are given are kept, by the module and their name there."""
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
    """Give a parameter the values that it was initialized with. Returns whether it was.

    Args:
        names: of the parameter, which is tied where it has several.
    """
    places = [(model.get_submodule(module), key) for module, _, key in (name.rpartition(".") for name in names)]
    found = next((kept[place] for place in places if place in kept), None)
    if found is None:
        return False
    for module, key in places:
        module._parameters[key] = found
    return True


def of_another_size(model: nn.Module, names: Iterable[list[str]], index: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of the parameters that the checkpoint has with another size.

    Args:
        names: of each parameter.
        index: accelerate's, of where tensors are.
    """
    found: list[str] = []
    for same in names:
        name = next((each for each in same if index.get(each, {}).get("safetensors_file")), None)
        if name is None:
            continue
        dtype, shape = stored_as(index[name]["safetensors_file"], index[name].get("weight_name", name))
        if "F" in dtype and shape != tuple(model.get_parameter(name).shape):  # codes have shapes of their own
            found += same
    return found


@contextmanager
def reporting_later() -> Iterator[Callable[[], None]]:
    """In the block transformers does not report which tensors are missing, left over or of another size. Yields what
    reports them after all, as an exception in the block does."""
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
