"""The class that a parameter has while its values must not be read.

[Note: never a silent NaN]
The storage of a released parameter has one NaN. torch would compute with this NaN without an error. The `__class__` of
a released parameter is therefore a subclass of `nn.Parameter` with a `__torch_function__`. torch calls this function
for every use of the parameter from Python:

    metadata (shape, dtype, device, grad, requires_grad, hooks, …)            answered
    `.data`                                                                   raises, because writes to it are not seen
    `torch.equal`                                                             answered, from copies of the values
    anything else, in the model's forward, a backward or infinity.gathered    the values are fetched, then the call runs
    anything else, elsewhere                                                  raises an error that says what to do

Writing to a fetched parameter raises an error, too, because the change would be lost when the unit's slot is freed.

The parameters of a unit get this class after the unit's forward, even if the unit keeps its slot. A script therefore
behaves in the same way whether or not the weights fit the device.

Some functions of torch's C++ code do not check the class of their argument. If such a function writes, or asks for an
address to which it could write (to_dlpack, most C++ extensions), the placeholder's storage makes torch raise an error.
If such a function only reads, it gets NaN. The functions that only read are: the constructors torch.tensor(p),
torch.Tensor(p), torch.FloatTensor(p), x.new(p), x.new_tensor(p), and torch.as_tensor and torch.asarray to another
dtype; p.as_subclass and torch.Tensor._make_subclass; transforms of torch.func and torch.vmap with p as their argument;
`other.data = p` and other.set_(p); p as a gradient argument of backward() or autograd.grad;
torch.nested.nested_tensor([p]); C++ extensions that ask for a constant address.

If a module writes through `.data` of its own weight in its own forward, infinity does not notice the write either. The
write is lost if the weights are kept in the store.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._guards import CompileContext
from torch.utils._pytree import tree_leaves

from infinity.errors import ModelError, ReleasedParameterError

USE_GATHERED = (
    "Read it inside the model's forward, or in `with infinity.gathered(model, module):`, which loads the weights "
    "of a module; infinity.state_dict(model) reads all weights one by one, and "
    "infinity.save_pretrained(model, directory) writes them."
)
_CONVERSIONS = ("to", "type", "float", "half", "bfloat16", "cpu", "cuda")


def way_out(use: str) -> str:
    """Return advice for a user whose operation `use` needs the values of a released parameter.

    If the operation writes, it is often a step of one of torch's optimizers.
    """
    if use in _CONVERSIONS:
        return (
            "Convert the model before infinity.offload, or load it with infinity.load_pretrained(path, dtype=...). "
            f"{USE_GATHERED}"
        )
    if use.endswith("_") and not use.endswith("__"):
        return (
            "Train it with an optimizer of infinity, such as infinity.AdamW(model.parameters()), or change it in `with "
            "infinity.gathered(model, module, write=True):`."
        )
    return USE_GATHERED


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class ParameterLender(ABC):
    """Object that can fetch the values of released parameters."""

    @abstractmethod
    def lend(self, parameters: Sequence[nn.Parameter], use: str) -> AbstractContextManager[None]:
        """Return a context in which released parameters have their values and their original class.

        Args:
            parameters: released parameters.
            use: name of the attempted operation, for the message.

        Raises:
            ReleasedParameterError: the parameters must not be read now.
        """

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a copy of a parameter's values in RAM. torch.equal compares such copies.

        Raises:
            ReleasedParameterError: the parameter must not be read now.
        """
        with torch.no_grad(), self.lend([parameter], "equal"):
            return parameter.detach().to("cpu", copy=True)

    @abstractmethod
    def name_of(self, parameter: nn.Parameter) -> str: ...

    def keep(self, parameter: nn.Parameter) -> None:
        """Restore a parameter's values and its original class permanently, because its `.data` is used.

        Raises:
            ReleasedParameterError: the parameter cannot keep its values.
        """
        raise ReleasedParameterError(
            f"`.data` of parameter '{self.name_of(parameter)}' cannot be used: its values are in the store, and "
            "infinity would not notice writes through `.data`. Inside the forward use the parameter itself (or "
            "`.detach()`); elsewhere use `with infinity.gathered(model, module):`, with write=True to change it."
        )

    def assign(self, parameter: nn.Parameter, value: nn.Parameter) -> None:
        """Set `parameter.data = value`; `value` is also a released parameter.

        Raises:
            ReleasedParameterError: a parameter cannot keep its values.
        """
        for each in (value, parameter):
            if isinstance(each, ReleasedParameter):
                lender_of(each).keep(each)
        parameter.data = value.data

    def written(self, parameter: nn.Parameter, use: str) -> None:
        """React to an operation `use` that wrote to a fetched parameter.

        Raises:
            ModelError: the change would be lost.
        """
        raise ModelError(
            f"{use} writes to parameter '{self.name_of(parameter)}' in a forward or backward pass; the change would be "
            "lost, because the values are in the store. Change it in `with infinity.gathered(model, module, "
            "write=True):` or before infinity.offload."
        )

    def copied(self, parameter: nn.Parameter, what: str) -> nn.Parameter:
        """Return another parameter with the same values.

        Args:
            parameter: released parameter.
            what: name of the copying operation, for the message.

        Raises:
            ReleasedParameterError: the copy would have the values of a placeholder.
        """
        raise ReleasedParameterError(
            f"{what} of parameter '{self.name_of(parameter)}' would copy a placeholder: its values are in the store. "
            f"Copy them into another plain model with other.load_state_dict(model.state_dict()). {USE_GATHERED}"
        )

    def converted(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
        """Return a released parameter with the converted values, in `dtype` and on `device`; None if the conversion
        must read the values now."""
        return None


class ReleasedParameter(nn.Parameter):
    """Parameter whose values must not be read: see [Note: never a silent NaN].

    `released_class` makes the subclasses. A subclass is assigned to `__class__` of a parameter and never instantiated.
    """

    _lender: weakref.ref[ParameterLender]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # nn.Parameter.__deepcopy__ reads `.data`
        if id(self) not in memo:
            memo[id(self)] = lender_of(self).copied(self, "deepcopy")
        return memo[id(self)]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or CompileContext.try_get() is not None:  # torch.compile reads no values
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        answer: Callable[..., Any]
        if func in (torch.autograd.grad, torch.autograd.backward):
            answer = _differentiate
        elif func in _COMPARISONS:
            answer = _equal
        elif args and isinstance(args[0], ReleasedParameter):
            answer = _ANSWERS.get(func, _with_values)
        else:
            answer = _as_pattern if func in _PATTERN_USES else _with_values
        return answer(func, *args, **kwargs)


def ordinary_tensors() -> AbstractContextManager[object]:
    """Return a context in which new tensors are not inference tensors, because autograd never accepts an inference
    tensor."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def nan_placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the data of a released parameter: one NaN of the true dtype, expanded to the true shape.

    If the installed torch supports this, the storage raises an error when code asks for an address to which it could
    write.
    """
    with torch.inference_mode(False):
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        if hasattr(torch._C, "_set_throw_on_mutable_data_ptr"):
            torch._C._set_throw_on_mutable_data_ptr(nan)
        return nan.expand(shape)


def released_class(lender: ParameterLender) -> type[ReleasedParameter]:
    """Return the class for the released parameters of one offloaded model. This class does not keep the model alive."""

    class BoundReleasedParameter(ReleasedParameter):
        _lender = weakref.ref(lender)

    return BoundReleasedParameter


def lender_of(parameter: ReleasedParameter) -> ParameterLender:
    """Return the lender of a released parameter.

    Raises:
        ReleasedParameterError: the offloaded model no longer exists.
    """
    lender = type(parameter)._lender()
    if lender is None:
        raise ReleasedParameterError("the values of this parameter are gone: its offloaded model no longer exists")
    return lender


def _with_values(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    by_lender: dict[ParameterLender, list[nn.Parameter]] = {}
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, ReleasedParameter):
            by_lender.setdefault(lender_of(leaf), []).append(leaf)
    with ExitStack() as lent:
        for lender, parameters in by_lender.items():
            lent.enter_context(lender.lend(parameters, _name(func)))
        brought = [(lender, parameter) for lender, parameters in by_lender.items() for parameter in parameters]
        versions = [parameter._version for _, parameter in brought]
        result = func(*args, **kwargs)
        for (lender, parameter), version in zip(brought, versions, strict=True):
            if parameter._version != version:
                lender.written(parameter, _name(func))
        return result


def _name(func: Callable[..., Any]) -> str:
    """Return the name of a function in the user's code. For the getter or setter of an attribute, return the
    attribute's name."""
    name = str(getattr(func, "__name__", func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return f".{attribute}" if attribute and name in ("__get__", "__set__") else name


# -- answers without values -------------------------------------------------------------------------------------------


def _data(func: Callable[..., Any], parameter: ReleasedParameter, *value: Any) -> Any:
    if value and value[0] is parameter:
        return None  # Module.to() assigns the parameter's own data when it changes nothing
    lender = lender_of(parameter)
    if value and isinstance(value[0], ReleasedParameter):
        return lender.assign(parameter, value[0])
    lender.keep(parameter)
    return func(parameter, *value)


def _equal(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Answer torch.equal, which Lightning's BaseFinetuning calls between steps.

    If the identity or the shapes of the operands decide the result, no values are fetched.
    """
    one, other = [*args, *kwargs.values()]
    with torch._C.DisableTorchFunctionSubclass():
        if one is other or one.shape != other.shape:
            return one is other
    pair = (one, other)
    return func(*(lender_of(p).copy_of(p) if isinstance(p, ReleasedParameter) else p.detach().cpu() for p in pair))


def _pickle(func: Callable[..., Any], parameter: ReleasedParameter, *args: Any, **kwargs: Any) -> Any:
    lender = lender_of(parameter)
    lender.copied(parameter, "pickling")
    lender.keep(parameter)
    return func(parameter, *args, **kwargs)


def _convert(func: Callable[..., Any], parameter: ReleasedParameter, *args: Any, **kwargs: Any) -> Any:
    """Answer `.to()` and similar functions. If the conversion would change nothing, return the parameter itself."""
    args, kwargs = tuple(map(_without_number, args)), {key: _without_number(value) for key, value in kwargs.items()}
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        converted = func(probe, *args, **kwargs)
    if converted is probe:
        return parameter
    if isinstance(converted, str):  # type() without a type
        return converted
    other = lender_of(parameter).converted(parameter, converted.dtype, converted.device)
    return _with_values(func, parameter, *args, **kwargs) if other is None else other


def _without_number(argument: Any) -> Any:
    """Replace `cpu:0` by `cpu`.

    accelerate places a rank on `cpu:0`. torch copies a tensor in `.to("cpu:0")`, even if the tensor is on the CPU.
    """
    device = torch.device(argument) if isinstance(argument, str) and argument.startswith("cpu:") else argument
    numbered = isinstance(device, torch.device) and device.type == "cpu" and device.index is not None
    return torch.device("cpu") if numbered else argument


def _differentiate(func: Callable[..., Any], outputs: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """Answer torch.autograd.grad and torch.autograd.backward, where a released parameter may be one of `inputs`."""
    given = kwargs.get("grad_outputs"), kwargs.get("grad_tensors")
    if any(isinstance(leaf, ReleasedParameter) for leaf in tree_leaves((outputs, given))):
        return _with_values(func, outputs, inputs=inputs, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(outputs, inputs=inputs, **kwargs)


def _like(func: Callable[..., Any], parameter: ReleasedParameter, *args: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("memory_format", torch.contiguous_format)  # a placeholder's strides are not the values' strides
    with torch._C.DisableTorchFunctionSubclass():
        return func(parameter, *args, **kwargs)


def _layout(func: Callable[..., Any], parameter: ReleasedParameter, *args: Any, **kwargs: Any) -> Any:
    """Answer with the layout that the values have, not with the layout of the placeholder."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), *args, **kwargs)


def _as_pattern(func: Callable[..., Any], tensor: torch.Tensor, parameter: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer `x.to(parameter)` and similar functions, which use only the parameter's dtype, device or shape."""
    if not isinstance(parameter, ReleasedParameter):
        return _with_values(func, tensor, parameter, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        return func(tensor, empty, *args, **kwargs)


def _describe(func: Callable[..., Any], parameter: ReleasedParameter, *args: Any, **kwargs: Any) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        facts = f"{tuple(parameter.shape)}, {parameter.dtype}, {parameter.device}"
        name = lender_of(parameter).name_of(parameter)
        return f"Parameter '{name}' ({facts}, requires_grad={parameter.requires_grad}), values in the store"


def _found(names: str, *owners: Any) -> list[Callable[..., Any]]:
    """Return the functions with these names that the installed torch has."""
    return [getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)]


def _accessors(names: str, *kinds: str) -> list[Callable[..., Any]]:
    found = _found(names, torch.Tensor)
    return [getattr(attribute, kind) for attribute in found for kind in kinds if hasattr(attribute, kind)]


_METADATA = frozenset(
    [
        *_accessors(
            "shape dtype device layout is_leaf grad_fn _version name names ndim itemsize nbytes output_nr retains_grad "
            "_backward_hooks _post_accumulate_grad_hooks is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized "
            "is_mkldnn is_nested is_xpu is_mps is_hpu is_xla is_ipu is_maia is_mtia is_vulkan is_ort grad_dtype",
            "__get__",
        ),
        *_accessors("requires_grad grad _grad _backward_hooks _post_accumulate_grad_hooks", "__get__", "__set__"),
        *_accessors("grad", "__delete__"),
        *_found(
            "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed "
            "is_inference is_same_size is_conj is_neg is_distributed __len__ __hash__ __dir__ requires_grad_ "
            "register_hook register_post_accumulate_grad_hook retain_grad _has_compatible_shallow_copy_type "
            "has_names new_empty new_zeros new_ones new_full new_empty_strided",
            torch.Tensor,
        ),
        *_found(
            "numel is_floating_point is_complex is_same_size is_tensor is_inference is_conj is_neg get_device "
            "result_type",
            torch,
        ),
        torch._has_compatible_shallow_copy_type,
    ]
)
"""Functions that do not read a parameter's values."""

_COMPARISONS = frozenset(_found("equal", torch, torch.Tensor))

_PATTERN_USES = frozenset(_found("to type_as expand_as view_as reshape_as", torch.Tensor))

_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(_accessors("data", "__get__", "__set__"), _data),
    **dict.fromkeys(_found("__reduce_ex__ __reduce__ __setstate__ share_memory_", torch.Tensor), _pickle),
    **dict.fromkeys(_found("to type float double half bfloat16 cpu cuda", torch.Tensor), _convert),
    **dict.fromkeys(
        _found("empty_like zeros_like ones_like full_like rand_like randn_like randint_like", torch), _like
    ),
    **dict.fromkeys(_found("stride is_contiguous", torch.Tensor), _layout),
    **dict.fromkeys(_found("__repr__ __format__", torch.Tensor), _describe),
}
