"""Deferred parameters: parameters of a model that is loaded but not offloaded yet. The value of a deferred parameter is
read only when the value is used.

[Note: why offloading waits]
A script that knows nothing of infinity loads a model, and then attaches adapters, freezes parameters, resizes the
embeddings, converts the weights or copies the model. The placement can be planned only after these changes. Until the
model is offloaded, each parameter is a placeholder of the released class (units/released_parameters.py), and its values
are read from the files of the checkpoint:

    an operation reads the parameter, and       the values are read, and freed when the operation ends
    autograd does not record the operation
    an operation writes to the parameter,       the values are read, and the parameter becomes an ordinary
    returns a view of it or its `.data`,        parameter
    or is recorded by autograd
    .to(dtype), deepcopy                        the result is another deferred parameter with the same values

A checkpoint may have the values in an encoded form (state/frozen_codecs.py). If a parameter's values have not changed
when the model is offloaded, the encoded form is used, even if the values were read before.

infinity.offload reads the values through `values_of(model)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import ModelError
from infinity.state.codec import decode
from infinity.state.frozen_codecs import encoded_form, forget, pass_on
from infinity.state.values import RowsSource, Source
from infinity.units.released_parameters import (
    ParameterLender,
    ReleasedParameter,
    lender_of,
    nan_placeholder,
    released_class,
)

Read = Callable[[], torch.Tensor]


class _DeferredParameters(ParameterLender):
    """The deferred parameters of this process. Each has a function that reads its value, and a name for messages."""

    def __init__(self) -> None:
        self._reads: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._released = released_class(self)

    def enter(self, parameter: nn.Parameter, name: str, read: Read) -> None:
        self._reads[parameter] = name, read
        parameter.__class__ = self._released

    def leave(self, parameter: nn.Parameter) -> Read:
        """Restore the ordinary class of a parameter, and return the function that reads its values. The parameter still
        has no values."""
        read: Read = self._reads.pop(parameter)[1]
        parameter.__class__ = nn.Parameter
        return read

    def has(self, parameter: nn.Parameter) -> bool:
        return isinstance(parameter, ReleasedParameter) and lender_of(parameter) is self

    def name_of(self, parameter: nn.Parameter) -> str:
        return str(self._reads[parameter][0])

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the values of a parameter, on the CPU, in the dtype of the checkpoint."""
        value: torch.Tensor = self._reads[parameter][1]()
        if value.shape != parameter.shape:
            raise ModelError(
                f"'{self.name_of(parameter)}' is {tuple(value.shape)} in the checkpoint and {tuple(parameter.shape)} "
                "in the model"
            )
        return value

    @contextmanager
    def lend(self, parameters: Sequence[nn.Parameter], use: str) -> Iterator[None]:
        there = list(dict.fromkeys(parameters))
        placeholders = {parameter: _raw(parameter) for parameter in there}
        reads = {parameter: self._reads[parameter] for parameter in there}
        versions = {}
        for parameter in there:
            self.keep(parameter)
            versions[parameter] = parameter._version
        holders = {parameter: _holders(parameter) for parameter in there}
        yield
        for parameter in there:
            # The values are kept if a graph refers to the parameter, because the backward needs them, or if a view of
            # the parameter exists, because the view may be written to.
            seen = parameter._version != versions[parameter] or _holders(parameter) > holders[parameter]
            if not torch.is_grad_enabled() and not seen:
                parameter.data = placeholders[parameter]
                self.enter(parameter, *reads[parameter])

    def keep(self, parameter: nn.Parameter) -> None:
        value = self.read(parameter).to(parameter.device, parameter.dtype)
        self.leave(parameter)
        parameter.data = value

    def written(self, parameter: nn.Parameter, use: str) -> None:
        """Allow the write. `lend` keeps the written values afterwards."""

    def copied(self, parameter: nn.Parameter, what: str) -> nn.Parameter:
        return self._another(parameter, parameter.dtype, parameter.device)

    def converted(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
        return self._another(parameter, dtype, device)

    def _another(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        another = _placeholder(parameter, dtype, device)
        self.enter(another, *self._reads[parameter])
        pass_on(parameter, another)
        return another

    def rows(self, parameter: nn.Parameter, name: str, begin: int, end: int) -> nn.Parameter:
        value = nan_placeholder(torch.Size([end - begin, *parameter.shape[1:]]), parameter.dtype, parameter.device)
        another = nn.Parameter(value, requires_grad=parameter.requires_grad)
        self.enter(another, name, _rows(self._reads[parameter][1], begin, end))
        return another

    def assign(self, parameter: nn.Parameter, value: nn.Parameter) -> None:
        """Assign `parameter.data = value` if both are deferred (Module.to(dtype) makes such assignments)."""
        if not self.has(value):
            return super().assign(parameter, value)
        reads = self._reads[value]
        self.leave(parameter)
        parameter.data = _raw(value)
        self.enter(parameter, *reads)
        pass_on(value, parameter)
        return None


_values = _DeferredParameters()


def _holders(parameter: nn.Parameter) -> int:
    """Return how many tensors use the storage of the parameter's values."""
    return int(torch._C._storage_Use_Count(parameter.untyped_storage()._cdata))


def _raw(parameter: nn.Parameter) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.data


def defer(model: nn.Module, source: Source, device: torch.device) -> None:
    """Defer the parameters of a model. The values of parameters on the meta device are read from `source` when they are
    needed.

    Parameters in memory are deferred, too, and keep their values in memory.

    Args:
        model: the model whose parameters become deferred.
        source: function that returns the value of a parameter, given its name.
        device: device on which the model will compute; the parameters report this device as theirs.
    """
    names: dict[nn.Parameter, str] = {}
    for name, named in model.named_parameters():
        names[named] = name
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in placed:
                placed[parameter] = _placeholder(parameter, parameter.dtype, device)
                _values.enter(placed[parameter], names[parameter], ValueReader(source, names[parameter]))
                pass_on(parameter, placed[parameter])
            module._parameters[key] = placed[parameter]
    defer_in_memory(model)


def defer_in_memory(model: nn.Module) -> None:
    """Defer the parameters of a model that is in memory.

    The parameters keep their present values until the model is offloaded, even if the model is converted to another
    dtype in between. These values become the fp32 master.
    """
    for name, parameter in model.named_parameters():
        if not _values.has(parameter):
            _forget_if_changed(parameter)
            _values.enter(parameter, name, _ConstantReader(_raw(parameter)))


def _forget_if_changed(parameter: nn.Parameter) -> None:
    """Forget the encoded form of an ordinary parameter if the parameter's values differ from the encoded values."""
    known = encoded_form(parameter)
    if known is None or parameter.is_meta:
        return
    value = decode(known.read(), known.codec, parameter.shape, parameter.dtype)
    if not torch.equal(value, parameter.detach().cpu()):
        forget(parameter)


class _ConstantReader:
    """Reader of values that are in memory."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value

    def __call__(self) -> torch.Tensor:
        return self._value


def defer_again(parameter: nn.Parameter, name: str, value: Read | torch.Tensor) -> None:
    """Defer a parameter whose values have been replaced by a placeholder.

    `value` is the parameter's value, or the function that reads the value.
    """
    if isinstance(value, torch.Tensor):
        forget(parameter)
    _values.enter(parameter, name, _ConstantReader(value) if isinstance(value, torch.Tensor) else value)


def _placeholder(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    value = nan_placeholder(parameter.shape, dtype, device)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


@runtime_checkable
class RereadableSource(Protocol):
    """A source whose values can be read again later."""

    def unchanged(self) -> bool:
        """Return whether the source still has the values that it had at first."""


class ValueReader:
    """Reader of one value from a source, by the name of the value in the source."""

    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name

    def __call__(self) -> torch.Tensor:
        return self.source(self.name)


class RowsReader(ValueReader):
    """Reader of rows [begin, end) of a value."""

    def __init__(self, source: Source, name: str, begin: int, end: int) -> None:
        super().__init__(source, name)
        self._begin, self._end = begin, end

    def __call__(self) -> torch.Tensor:
        if isinstance(self.source, RowsSource):
            return self.source.rows(self.name, self._begin, self._end)
        return super().__call__()[self._begin : self._end]


def _rows(read: Read, begin: int, end: int) -> Read:
    """Return the reader of rows [begin, end) of a value that is in memory or in a source."""
    if isinstance(read, RowsReader):
        raise AssertionError("a tile cannot be cut again")
    if isinstance(read, ValueReader):
        return RowsReader(read.source, read.name, begin, end)
    return _ConstantReader(read()[begin:end].clone())


def rows_of_deferred(parameter: nn.Parameter, name: str, begin: int, end: int) -> nn.Parameter:
    """Return a new deferred parameter for rows [begin, end) of this parameter.

    Messages use `name` as the name of the new parameter.
    """
    return _values.rows(parameter, name, begin, end)


def name_of_deferred(parameter: nn.Parameter) -> str:
    """Return the name of a deferred parameter in messages."""
    return _values.name_of(parameter)


def is_deferred(model: nn.Module) -> bool:
    """Return whether any parameter of the model is deferred."""
    return any(_values.has(parameter) for parameter in model.parameters())


def is_a_deferred(parameter: nn.Parameter) -> bool:
    """Return whether this one parameter is deferred."""
    return _values.has(parameter)


class ParameterValues:
    """Source of the values of a model's parameters, by name.

    Args:
        named: every parameter of the model; a tied parameter is in the dict under each of its names.
        left: name and reader of each parameter that was deferred.

    Attributes:
        deferred: whether any parameter was deferred.
    """

    def __init__(self, named: dict[str, nn.Parameter], left: dict[nn.Parameter, tuple[str, Read]]) -> None:
        self._named = named
        self._left = left
        self.deferred = bool(left)

    @property
    def readers(self) -> dict[str, ValueReader]:
        """Readers of the parameters whose values are not in memory, by name; a tied parameter is in the dict under each
        of its names."""
        found = {name: self._left[parameter][1] for name, parameter in self._named.items() if parameter in self._left}
        return {name: read for name, read in found.items() if isinstance(read, ValueReader)}

    def in_memory(self, name: str) -> bool:
        """Return whether the value of a parameter is in memory, so that no file is read for it."""
        parameter = self._named[name]
        return parameter not in self._left or isinstance(self._left[parameter][1], _ConstantReader)

    def __call__(self, name: str) -> torch.Tensor:
        parameter = self._named[name]
        return self._left[parameter][1]() if parameter in self._left else parameter.detach()


@contextmanager
def values_of(model: nn.Module) -> Iterator[ParameterValues]:
    """Yield a source of a model's values, which reads the values of deferred parameters from their files.

    In this context the deferred parameters are ordinary placeholders. If the context ends with an exception, these
    parameters are deferred again.
    """
    left: dict[nn.Parameter, tuple[str, Read]] = {}
    named: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named[name] = parameter
        if _values.has(parameter):
            left[parameter] = _values.name_of(parameter), _values.leave(parameter)
        elif parameter not in left and not isinstance(parameter, ReleasedParameter):
            _forget_if_changed(parameter)

    try:
        yield ParameterValues(named, left)
    except BaseException:
        for parameter, (name, reader) in left.items():
            _values.enter(parameter, name, reader)
        raise
