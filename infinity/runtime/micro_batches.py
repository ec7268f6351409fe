"""infinity.backward: the gradients of several micro-batches, for which each unit's weights are fetched once in the
forward and once in the backward.

[Note: the order of micro-batches]
Ordinary accumulation runs one micro-batch after the other, and reads all weights for each micro-batch.
infinity.backward runs all micro-batches through one stage (stage_chain.py) before the next stage begins:

    forward     stage 0: m0 m1 m2 │ stage 1: m2 m1 m0 │ …          to and fro: the newest output is used first
    last stage  m0 forward, m0 backward, m1 forward, m1 backward, …  so that one micro-batch's logits exist at a time
    backward    … │ stage 1: m0 m1 m2 │ stage 0: m0 m1 m2

Each parameter's gradients arrive in the order of the micro-batches and are added in fp32, as in ordinary order. Each
micro-batch draws the same random numbers in both orders (random_streams.py). Both orders therefore give the same bits,
except for

    a parameter that several stages use (tied weights)     in ordinary order, autograd adds the gradients of the stages
                                                           in the parameter's dtype; here they are added in fp32
    a tensor that is an input of several units (the        the gradients of each unit are added first, and their sums
    output of an encoder)                                  are added in fp32
    units that some micro-batches skip                     a micro-batch may run such a unit in another stage, so the
                                                           gradients may be added in another order

If the micro-batches go through the stages in several groups, the sums in the first two rows are made for each group
first.

To learn the stages, the first call computes an additional forward of the first micro-batch, before all other forwards.
The additional forward has no effect on the result. A resumed run learns the stages again, and still ends in the same
bits as a run that never stopped.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.coordinator import registry
from infinity.errors import ConfigError
from infinity.runtime.backward_ends import BackwardEnds
from infinity.runtime.graph_cuts import CuttableModule, watched
from infinity.runtime.hooks import RootForward
from infinity.runtime.random_streams import RandomStreams
from infinity.runtime.saved_tensors import is_hooked
from infinity.runtime.stage_chain import AttributeSnapshot, BufferSnapshot, StageChain, StageRecorder
from infinity.runtime.vertical_micro_batches import VerticalBackward
from infinity.sizes import format_bytes
from infinity.state.discover import HookedModule

logger = logging.getLogger(__name__)

MicroBatch = TypeVar("MicroBatch")
LossOf = Callable[[MicroBatch], torch.Tensor]


def backward(
    model: nn.Module, loss_fn: LossOf[MicroBatch], micro_batches: Sequence[MicroBatch], *, vertical: bool = True
) -> list[torch.Tensor]:
    """Compute the sum of the gradients of several micro-batches. The result is the same as after one backward pass for
    each micro-batch. No optimizer step is made.

        losses = infinity.backward(model, lambda batch: model(**batch).loss / len(batches), batches)
        optim.step()

    If the units of the model form a chain, as in a transformer, each unit's weights are fetched once for the forward
    and once for the backward of all micro-batches. See [Note: the order of micro-batches] in runtime/micro_batches.py.
    Otherwise the micro-batches are computed one after the other, and one line of the log says why.

    A forward keeps tensors for the backward, and the tensors of all micro-batches are kept at the same time. Without
    activation checkpointing, they take as much memory as one batch of all micro-batches would take. With activation
    checkpointing, only the tensors between units are kept.

    Each micro-batch draws its own random numbers (of torch, numpy and Python), which are the same in both orders. The
    forwards run in threads, one at a time. To learn the order of the model's units, the first call computes an
    additional forward of the first micro-batch. The first call after train() or eval() also computes an additional
    forward.

    Args:
        model: an offloaded model, or a module that contains an offloaded model.
        loss_fn: function that calls the model once with a micro-batch and returns the scalar to call `.backward()` on.
            `loss_fn` must also divide the loss by the number of micro-batches, or scale it, if the training needs this.
        micro_batches: micro-batches, each of which is the argument of one call of `loss_fn`; they may differ in size.
        vertical: whether the micro-batches may go through the units together; False: ordinary accumulation, one
            micro-batch after the other.

    Returns:
        The result of `loss_fn` for each micro-batch, detached.

    Raises:
        ModelError: the model was never offloaded.
        ConfigError: there is no micro-batch; the loss function did not return a scalar tensor.
        others: errors that `loss_fn`, or a forward or backward pass of the model, raises. Some micro-batches may
            already have added their gradients, so call zero_grad() before the next backward.
    """
    coordinator = registry.coordinator_of(model)
    if isinstance(micro_batches, Mapping | torch.Tensor) or not isinstance(micro_batches, Iterable):
        raise ConfigError(f"infinity.backward needs a list of micro-batches, not a {type(micro_batches).__name__}")
    micro_batches = list(micro_batches)
    if not micro_batches:
        raise ConfigError("infinity.backward needs at least one micro-batch, and the list is empty")
    offloaded = registry.model_of(coordinator)
    assert offloaded is not None  # `offloaded` is a part of `model`
    return _known[offloaded].backward(loss_fn, micro_batches, vertical=vertical)


def remember(
    model: nn.Module, root_forward: RootForward, ends: BackwardEnds, sites: Sequence[HookedModule]
) -> MicroBatchBackward:
    """Register the hooks of an offloaded model. The returned object's `remove` forgets these hooks."""
    _known[model] = MicroBatchBackward(model, root_forward, ends, sites)
    return _known[model]


_known: weakref.WeakKeyDictionary[nn.Module, MicroBatchBackward] = weakref.WeakKeyDictionary()


class MicroBatchBackward:
    """infinity.backward for one offloaded model. This object does not keep the model alive.

    Attributes:
        chain: the learned stages; None: nothing was learned yet, or the model cannot run vertically.
        why_ordinary: reason why the micro-batches are computed one after the other; "" if they go through the stages
            together, or if nothing was learned yet.
        fit: number of micro-batches that fit memory.device at a time, if each keeps as many bytes as the first
            micro-batch kept.
    """

    def __init__(
        self, model: nn.Module, root_forward: RootForward, ends: BackwardEnds, sites: Sequence[HookedModule]
    ) -> None:
        self._model = weakref.ref(model)
        self._coordinator = root_forward.coordinator
        self._root_forward = root_forward
        self._ends = ends
        self._sites = [
            CuttableModule(weakref.ref(site.module), site.units, not self._coordinator.staying.issuperset(site.units))
            for site in sites
        ]
        self.chain: StageChain | None = None
        self.why_ordinary = ""
        self.fit = 1
        self._modes: set[tuple[bool, ...]] = set()
        self._said = 0

    def remove(self) -> None:
        """Forget the model, which is no longer offloaded."""
        model = self._model()
        if model is not None:
            _known.pop(model, None)

    def backward(self, loss_fn: LossOf[Any], micro_batches: list[Any], *, vertical: bool) -> list[torch.Tensor]:
        """Compute the gradients and return the losses (see the function `backward` of this module)."""
        streams = RandomStreams(len(micro_batches), self._coordinator.torch_device)
        vertical = vertical and len(micro_batches) > 1 and torch.is_grad_enabled()
        if vertical and is_hooked():
            logger.warning(
                "infinity.backward computes one micro-batch after the other, because it is called in a context of "
                "saved-tensor hooks"
            )
            vertical = False
        if vertical and self._mode_now() not in self._modes:
            with streams.unchanged(0):
                self._learn(loss_fn, micro_batches[0])
        if not vertical or self.chain is None:
            return self._one_by_one(loss_fn, micro_batches, streams)
        losses = list[torch.Tensor]()
        for group in self._groups(self.chain, len(micro_batches)):
            vertically = VerticalBackward(self._root_forward, self._ends, self.chain, streams, group)
            is_last = group.stop == len(micro_batches)
            with nullcontext() if is_last else self._coordinator.accumulating():
                chosen = micro_batches[group.start : group.stop]
                losses += vertically.run(lambda each: _scalar(loss_fn(each)), chosen, self._sites)
        return losses

    def _groups(self, chain: StageChain, count: int) -> list[range]:
        """Divide the micro-batches into groups that go through the units together. memory.device limits the size of a
        group."""
        groups = -(-count // self.fit)
        if groups > 1 and self._said < count:
            self._said = count
            logger.warning(
                "%d micro-batches go through the units in %d groups, and each group fetches the weights once per "
                "direction: one micro-batch keeps %s between forward and backward, and memory has room for %s besides "
                "the weights, enough for %d micro-batches. Recompute activations, or raise memory.device by %s.",
                count,
                groups,
                format_bytes(chain.kept_bytes),
                format_bytes(self._room_bytes()),
                self.fit,
                format_bytes(max(count * chain.kept_bytes - self._room_bytes(), 0)),
            )
        return [range(count * at // groups, count * (at + 1) // groups) for at in range(groups)]

    def _room_bytes(self) -> int:
        """Return the bytes of memory.device that the plan leaves for activations.

        If the device's memory is RAM, the bytes of memory.host that the plan does not use are added. With activations:
        host, the RAM for activations is added.
        """
        plan = self._coordinator.plan
        limits = plan.budgets.limits
        room = limits.device - plan.device_bytes
        if plan.placement.activations == "host":
            room += plan.budgets.activation_bytes
        return max(room + (limits.host - plan.host_bytes if limits.in_place else 0), 0)

    def _mode_now(self) -> tuple[bool, ...]:
        """Return the training flag of every module.

        The stages may depend on these flags: in training, BatchNorm sets buffers.
        """
        model = self._model()
        return () if model is None else tuple(module.training for module in model.modules())

    # -- ordinary order -----------------------------------------------------------------------------------------------

    def _one_by_one(self, loss_fn: LossOf[Any], micro_batches: list[Any], streams: RandomStreams) -> list[torch.Tensor]:
        losses = []
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with streams.of(index), nullcontext() if is_last else self._coordinator.accumulating():
                loss = _scalar(loss_fn(micro_batch))
                torch.autograd.backward(loss)
                losses.append(loss.detach())
                del loss
        return losses

    # -- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, loss_fn: LossOf[Any], micro_batch: Any) -> None:
        """Learn the stages from a forward that has no effect on the result.

        If the forward changes attributes of modules, learn from a second forward, because some attributes are set only
        once.
        """
        model, said = self._model(), self.why_ordinary
        assert model is not None
        for _ in range(2):
            mode, attributes = self._mode_now(), AttributeSnapshot(model)
            chain, why = self._recorded(model, attributes, lambda: _scalar(loss_fn(micro_batch)), _tensors(micro_batch))
            if not attributes.changed():
                break
        ran = self._mode_now()  # the loss function may have set the mode (the loss function of a Trainer does)
        self._modes = {mode, ran} | (self._modes if ran in self._modes else set())
        self._agree(chain, why)
        if self.why_ordinary and self.why_ordinary != said:
            logger.warning("micro-batches are computed one after the other: %s", self.why_ordinary)
        elif self.chain is not None:
            logger.info(
                "micro-batches go through %d stages of the model; each keeps %s from forward to backward, and %d fit",
                len(self.chain.stages),
                format_bytes(self.chain.kept_bytes),
                self.fit,
            )

    def _recorded(
        self,
        model: nn.Module,
        attributes: AttributeSnapshot,
        forward: Callable[[], torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> tuple[StageChain | None, str]:
        """Return the stages of a forward, and the reason why micro-batches cannot go through these stages together; ""
        if they can.

        Buffers that the forward changes are restored.
        """
        before, buffers = self._root_forward.begun, BufferSnapshot(model)
        try:
            with self._root_forward.weighing([*model.buffers(), *inputs]) as kept:
                recorder = StageRecorder(kept)
                with watched(self._sites), recorder.running():
                    loss = forward()
            changed = [*buffers.changed(), attributes.changed()][0]
        finally:
            buffers.put_back()
        forwards = self._root_forward.begun - before
        if forwards != 1:
            return None, f"the loss function calls the model {forwards} times for one micro-batch"
        if changed:
            return None, f"the forward changes '{changed}' of the model, so the order of micro-batches matters"
        return recorder.found(loss)

    def _agree(self, chain: StageChain | None, why: str) -> None:
        """Make the same choice on all ranks: use the stages only if every rank can use them, and use the smallest `fit`
        of all ranks."""
        fit = max(self._room_bytes() // max(0 if chain is None else chain.kept_bytes, 1), 1)
        stages = None if chain is None else [[stage.site, *stage.units] for stage in chain.stages]
        told = self._coordinator.world.tell("the stages of the model", [why, stages, fit])
        self.fit = min(fit for *_, fit in told)
        if len(told) > 1:
            why = next((f"{why} (rank {rank})" for rank, (why, *_) in enumerate(told) if why), "")
            if not why and any(unit.full.routed for unit in self._coordinator.units):
                why = "experts are apart, and each rank's tokens use others"
            if not why and any(stages != told[0][1] for _, stages, _ in told):
                why = "the ranks run the units of the model in different orders"
        self.why_ordinary, self.chain = why, None if why else chain


def _scalar(loss: object) -> torch.Tensor:
    """Return the result of a loss function, which must be a scalar tensor. Raises ConfigError for any other result."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise ConfigError(
        f"the loss function of infinity.backward returned {found}: it must return the scalar tensor whose .backward() "
        "a loop would call, such as model(**batch).loss"
    )


def _tensors(micro_batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a micro-batch with ordinary memory."""
    leaves = [each for each in tree_leaves(micro_batch) if isinstance(each, torch.Tensor)]
    return [each for each in leaves if each.layout == torch.strided]
