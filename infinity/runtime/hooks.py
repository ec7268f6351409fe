"""Hooks that fetch and release units while an unchanged training loop runs.

[Note: hooks and checkpointing]
transformers checkpoints `forward`; users of torch often checkpoint `__call__`. Reentrant checkpointing runs a second
backward inside the first. Recomputation may therefore run all forward hooks of infinity, none of them, or (if it stops
early) a pre-hook without its post-hook. Therefore:

* in a backward pass a forward hook only fetches the unit and counts no use;
* a hook on every output tensor of a unit announces the unit's backward before this backward begins;
* a unit that is still absent is fetched when autograd unpacks a view of its weights.

If a forward ends without its post-hooks, the uses of units that it counted are forgotten when the next forward begins.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from infinity.base.interrupt import uninterruptible
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.gradient_handle import GradientFactors, GradientHandle
from infinity.coordinator.structure import ModelStructure
from infinity.errors import ModelError
from infinity.runtime.backward_ends import BackwardEnds
from infinity.runtime.caller_frame import CallerFrame
from infinity.runtime.guards import UncopyableHook, not_compiled
from infinity.runtime.recomputed_weights import free_recomputed
from infinity.runtime.saved_tensors import SavedBytesCounter, SavedTensors
from infinity.state.discover import HookedModule
from infinity.state.layer_tiles import ExpertTile
from infinity.state.unit import ParameterPlace
from infinity.units.released_parameters import in_backward


class _OutermostForward:
    """An outermost forward and its pair of saved-tensor hooks.

    torch has a stack of such hooks for each thread. If an exception ends a forward, its pair stays on the stack of its
    thread until this thread begins its next forward.

    Attributes:
        depth: number of modules of DiscoveredUnits.root_candidates whose call is in progress; 0: no forward is in
            progress.
        begun: number of outermost forwards so far.
    """

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        self._pushed = threading.local()
        self.depth = 0
        self.begun = 0

    def push(self) -> None:
        self.begun += 1
        self.pop()
        if torch.is_grad_enabled():
            torch._C._autograd._push_saved_tensors_default_hooks(self._saved.pack, self._saved.unpack)
            self._pushed.here = True

    def pop(self) -> None:
        """Pop the pair of hooks if this thread has pushed it."""
        if getattr(self._pushed, "here", False):
            self._pushed.here = False
            torch._C._autograd._pop_saved_tensors_default_hooks()


class RootForward:
    """The outermost forward in progress, which owns the pair of saved-tensor hooks.

    With vertical micro-batches (micro_batches.py), each micro-batch has a forward in a separate thread, called a lane.
    The coordinator sees all these forwards as one forward.

    Invariant: the pair is pushed by the outermost module's pre-hook and popped by its post-hook, also on an exception.
    Ctrl-C skips post-hooks. In this case the next outermost forward, step, infinity.gathered or infinity.close finds
    that the call is no longer in progress, and cleans up. While the call is in progress, forwards in other threads
    raise ModelError.
    """

    def __init__(self, coordinator: Coordinator, structure: ModelStructure, ends: BackwardEnds) -> None:
        self.coordinator = coordinator
        self._ends = ends
        self._structure = structure
        self._saved = SavedTensors(coordinator)
        free_recomputed(self._saved)
        self._own = _OutermostForward(self._saved)
        self._lanes: dict[int, _OutermostForward] = {}  # by thread
        self._call: CallerFrame | None = None
        self._refused: set[int] = set()  # threads whose current call was refused by its pre-hook
        self._staying = [unit.index for unit in coordinator.units if unit.full.stays]

    @property
    def begun(self) -> int:
        """Number of outermost forwards so far, without the forwards of lanes."""
        return self._own.begun

    def enter(self) -> None:
        """Enter one of DiscoveredUnits.root_candidates. Raises ModelError if another thread's forward is in
        progress."""
        if in_backward():
            return
        forward = self._lanes.get(threading.get_ident())
        if forward is not None:
            if forward.depth == 0:
                forward.push()
            forward.depth += 1
            return
        with self.coordinator.locked():
            self._refused.add(threading.get_ident())
            self._require_no_other()
            self._refused.discard(threading.get_ident())
            if self._own.depth == 0 or not self._runs_in_this_thread():
                self._begin()
            self._own.depth += 1

    def leave(self) -> None:
        thread = threading.get_ident()
        forward = self._lanes.get(thread, self._own)
        if self.was_refused:
            self._refused.discard(thread)
        elif forward.depth and not in_backward():
            with self.coordinator.locked():
                forward.depth -= 1
                if forward.depth == 0:
                    forward.pop()
                    if forward is self._own:
                        self._close()

    @property
    def was_refused(self) -> bool:
        """Whether the pre-hook has refused the call whose post-hooks now run in this thread. Such a call was not
        entered."""
        return threading.get_ident() in self._refused

    def _require_no_other(self) -> None:
        if self._call is None or self._call.of_this_thread or not self._call.runs:
            return
        raise ModelError(
            "a forward of this model is running in another thread, and two forwards at a time would release each "
            "other's weights. Call the model in one thread at a time: put one threading.Lock around all its forward "
            "passes."
        )

    def abandon(self) -> None:
        """Forget a forward that an exception ended before its post-hooks could run."""
        self._own.depth = 0
        self._own.pop()
        self._close()
        self.coordinator.forget_uses()

    @contextmanager
    def weighing(self, staying: Iterable[torch.Tensor]) -> Iterator[SavedBytesCounter]:
        """Count the bytes of tensors that forwards in this context keep for the backward. Yields the counter.

        Args:
            staying: tensors that exist before the forward and after it, which do not count.
        """
        self._saved.kept = kept = SavedBytesCounter(staying)
        try:
            yield kept
        finally:
            self._saved.kept = None

    @contextmanager
    def lanes(self) -> Iterator[None]:
        """In this context, allow forwards only in threads that are in the context `lane`. These forwards are training
        forwards."""
        with self.coordinator.locked():
            self._require_no_other()
            if self._own.depth:
                self.abandon()
        try:
            self._open(training=True)
            yield
        finally:
            self._close()

    @contextmanager
    def lane(self) -> Iterator[None]:
        """In this context, the forwards of this thread are forwards of a lane."""
        thread = threading.get_ident()
        self._lanes[thread] = forward = _OutermostForward(self._saved)
        try:
            yield
        finally:
            del self._lanes[thread]
            forward.pop()

    def _begin(self) -> None:
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise ModelError(
                "a transform of torch.func (grad, vmap, jacrev, jvp) calls an offloaded model, and hides which weights "
                "the backward needs. For gradients of inputs use torch.autograd.grad(outputs, inputs) or "
                "torch.autograd.functional (jacobian, hvp); for gradients of single examples run one backward pass for "
                "each example."
            )
        if self._own.depth:
            self.abandon()
        try:
            self._open(training=torch.is_grad_enabled())
            self._own.push()
        except BaseException:
            self._own.pop()
            self._close()
            raise

    def _open(self, *, training: bool) -> None:
        self._structure.require_unchanged()
        self.coordinator.forget_uses()
        self._ends.forget()
        self.coordinator.timeline.forget("forward", "backward")
        self.coordinator.begin_root_forward(training=training, graph=self._saved.forward_begins())
        self._call = CallerFrame()
        self.coordinator.begin_reading(self._end_if_dead)
        for index in self._staying:
            self.coordinator.begin_use(index)

    def _close(self) -> None:
        self._call = None
        self._saved.forward_ends()
        for index in self._staying:
            self.coordinator.end_use(index)
        self.coordinator.end_reading()

    def _runs_in_this_thread(self) -> bool:
        return self._call is not None and self._call.of_this_thread and self._call.runs

    def _end_if_dead(self) -> None:
        if self._own.depth and self._call is not None and not self._call.runs:
            self.abandon()


@not_compiled
class RootPreForward(UncopyableHook):
    def __init__(self, root_forward: RootForward) -> None:
        self._root_forward = root_forward

    @uninterruptible
    def __call__(self, module: nn.Module, args: Any) -> None:
        if not _was_taken_back(self._root_forward.coordinator):
            self._root_forward.enter()


@not_compiled
class RootPostForward(UncopyableHook):
    def __init__(self, root_forward: RootForward) -> None:
        self._root_forward = root_forward

    @uninterruptible
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._root_forward.leave()


def _was_taken_back(coordinator: Coordinator) -> bool:
    """Return whether the model is no longer offloaded because it will be offloaded again (reoffload.py).

    A call that was in progress at that time still runs the hooks.
    """
    return coordinator.closed and coordinator not in registry.coordinators()


@not_compiled
class UnitPreForward(UncopyableHook):
    """Pre-forward hook of a module that owns parameters: it fetches the module's units."""

    def __init__(self, coordinator: Coordinator, site: HookedModule) -> None:
        self._coordinator = coordinator
        self._units = site.units
        self._device_kind = torch.device(coordinator.plan.device).type
        self._would_copy = _autocast_would_copy(site.module)

    @uninterruptible
    def __call__(self, module: nn.Module, args: Any) -> None:
        if _was_taken_back(self._coordinator):
            return
        if self._would_copy and torch.is_autocast_enabled(self._device_kind):
            raise ModelError(
                "autocast with fp32 weights keeps a second, 16-bit copy of every weight on the device until backward, "
                f"which would undo the offloading; autocast is on in the forward of {type(module).__name__}. Load the "
                "model with dtype=torch.bfloat16, or call model.to(torch.bfloat16) before infinity.offload (under "
                "infinity run: before its optimizer is made): infinity keeps an exact fp32 master, and autocast then "
                "does nothing."
            )
        for position, index in enumerate(self._units):
            try:
                self._coordinator.begin_use(index)
            except BaseException:
                for taken in self._units[:position]:
                    self._coordinator.end_use(taken)
                raise
        if in_backward():  # no post-hook may run that would release the units ([Note: hooks and checkpointing])
            for index in self._units:
                self._coordinator.end_use(index)
            return
        for index in self._units:
            self._coordinator.timeline.begin("forward", self._coordinator.units[index].name)


def _autocast_would_copy(module: nn.Module) -> bool:
    """Return whether most of a module's weights are fp32 weights of matrix products, which autocast copies.

    A few fp32 weights among 16-bit weights, for example the weights of PEFT adapters, do no harm. Autocast does not
    copy embeddings and norms.
    """
    numel = dict.fromkeys((True, False), 0)
    for owner in module.modules():
        if not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            for parameter in owner.parameters(recurse=False):
                numel[parameter.dtype == torch.float32 and parameter.dim() > 1] += parameter.numel()
    return numel[True] > numel[False]


@not_compiled
class UnitPostForward(UncopyableHook):
    """Post-forward hook of a module that owns parameters: it releases the units, and sets hooks on the outputs.

    The hook on an output announces the backward of the units that made the output, and keeps the units beside them. An
    input that the module returns unchanged gets no second hook: the module's units did not make this tensor.
    """

    def __init__(self, coordinator: Coordinator, site: HookedModule, root_forward: RootForward) -> None:
        self._coordinator = coordinator
        self._units = site.units
        routed = isinstance(site.module, ExpertTile)
        self._backward_units = (*site.units, *(site.beside if routed else ()))
        self._root_forward = root_forward

    @uninterruptible
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not (in_backward() or self._root_forward.was_refused):
            for index in self._units:
                self._coordinator.timeline.end("forward", self._coordinator.units[index].name)
                self._coordinator.end_use(index)
            self._coordinator.module_call_ended()
        if output is None:
            return None
        output, leaves = self._without_aliases(output)
        announce = _PreBackwardHook(self._coordinator, self._backward_units)
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))} if len(leaves) > 1 else set[int]()
        for leaf in leaves:
            if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
                continue
            with torch._C.DisableTorchFunctionSubclass():  # a subclass of Tensor may raise for unknown operations
                version = -1 if leaf.is_inference() else leaf._version  # inference tensors have no version
            if id(leaf) in given and _announcing.get(leaf) == version:
                continue
            leaf.register_hook(announce)
            _announcing[leaf] = version
        return output

    def _without_aliases(self, output: Any) -> tuple[Any, list[Any]]:
        """Clone outputs that are views of a slot, because another unit will use the slot.

        Return the output and its leaves.
        """
        storages = {self._coordinator.units[index].storage for index in self._units}

        def aliases(leaf: Any) -> bool:
            return (
                isinstance(leaf, torch.Tensor)
                and leaf.layout == torch.strided
                and leaf.device.type != "meta"
                and leaf.untyped_storage()._cdata in storages
            )

        leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
        if any(aliases(leaf) for leaf in leaves):
            output = tree_map(lambda leaf: leaf.clone() if aliases(leaf) else leaf, output)
            leaves = tree_leaves(output)
        return output, leaves


_announcing: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Outputs that announce a backward, with their versions at registration.

If an output is changed in place afterwards, another backward has to be announced for it.
"""


class _PreBackwardHook:
    """Tensor hook that runs as soon as the gradient of an output is known, before the backward of the units that made
    the output."""

    def __init__(self, coordinator: Coordinator, units: tuple[int, ...]) -> None:
        self._coordinator = coordinator
        self._units = units

    @uninterruptible
    def __call__(self, gradient: torch.Tensor) -> None:
        timeline = self._coordinator.timeline
        timeline.end_all("backward")
        self._coordinator.begin_units_backward(self._units)
        for index in self._units:
            timeline.begin("backward", self._coordinator.units[index].name)


class ParameterHooks(UncopyableHook):
    """Hooks that move a parameter's gradient to host memory as soon as autograd has computed the gradient."""

    def __init__(
        self, coordinator: Coordinator, parameter: nn.Parameter, place: ParameterPlace, ends: BackwardEnds
    ) -> None:
        self._coordinator = coordinator
        self._parameter = parameter
        self._place = place
        self._ends = ends
        self._before: GradientHandle | None = None
        self._handle = coordinator.handle(parameter, place)

    @uninterruptible
    def before(self, gradient: torch.Tensor) -> None:
        """Remove the gradient handle from `.grad` before autograd adds to `.grad`. The handle is remembered."""
        parameter = self._parameter
        self._ends.watch()
        before = parameter.grad
        if isinstance(before, GradientHandle):
            parameter.grad = None
            self._before = before
            self._ends.taken.append((parameter, self._place, before))
        else:
            self._before = None

    @uninterruptible
    def after(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        before, self._before = self._before, None
        if gradient is None:
            return
        if before is not None:
            self._require_as_it_came(before)
        self._coordinator.land_gradient(parameter, self._place, gradient, self._handle, accumulate=before is not None)

    def _require_as_it_came(self, before: GradientHandle) -> None:
        """Raise ModelError if a backward pass adds to a gradient that still has to be multiplied by a factor (of
        clipping or unscaling).

        The part that the backward pass adds would be multiplied by the factor, too.
        """
        if before.factors == GradientFactors():
            return
        self._parameter.grad = before
        call = "clip_grad_norm_()" if before.factors.inverse_scale == 1.0 else "scaler.unscale_()"
        raise ModelError(
            f"a backward pass after {call} adds to the gradient of '{self._place.spec.name}', which was multiplied by "
            f"a factor already. Call {call} after the last backward pass before the step."
        )
