"""Copies of weights for reading and writing between steps.

[Note: gathering]
A gathered parameter has its values in a copy outside of the unit's slot. So the unit can be evicted and fetched as
usual. A model larger than the planned memory for weights can be gathered if the machine has enough memory for the
copies. Changes of a copy are written to the states only if the caller passed write=True. Only parameters whose bits
changed are written. The master of each changed weight is set to exactly the new weight. If the script restores old
weights before the next step, their old masters are restored, too (coordinator/masters_before_write.py). Moments do not
change. The new values are written to places in the store that no generation uses (tiers/destination.py). So existing
generations stay complete, and the next commit includes the new values.

Several ranks enter and leave the context together, and must make the same changes. Each rank copies all new values to
the unit's slot, and writes its own slice of the values to the states.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch

from infinity.access.ingest import residual_of
from infinity.access.lent_gradients import GatheredGradients
from infinity.base.interrupt import interrupts_deferred, uninterruptible
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import InfinityError, ModelError, PlanError
from infinity.plan.machine_resources import available_device_bytes
from infinity.sizes import format_bytes
from infinity.state.dtypes import residual_itemsize
from infinity.state.values import sum_of_bits
from infinity.units.unit import OffloadedUnit

logger = logging.getLogger(__name__)

Named = Mapping[int, Sequence[str]]
"""Names of parameters, by the index of their unit."""


class Gathering:
    """Context of infinity.gathered. Ctrl-C is deferred while the context is entered or left.

    So an interrupt never leaves some parameters gathered and others not. After the context, every parameter shows the
    values of its unit again.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        wanted: Named,
        saved: AbstractContextManager[None] | None,
        *,
        write: bool,
        grads: bool,
    ) -> None:
        """Prepare the context.

        Args:
            coordinator: coordinator of the model.
            wanted: parameters to gather.
            saved: pair of saved-tensor hooks for computations in the context; None inside a forward, because the
                forward has its own pair.
            write: whether changed values are written to the states at the end.
            grads: whether the gradients are gathered, too.
        """
        self._coordinator = coordinator
        self._wanted = wanted
        self._write = write
        self._lent = GatheredGradients(coordinator, wanted) if grads else None
        self._saved = saved
        self._fresh: dict[int, list[str]] = {}
        self._marks: dict[int, int] = {}
        self._undo = ExitStack()
        self._entered = False

    def __enter__(self) -> None:
        try:
            self._enter()
        except BaseException:
            self._leave()  # a deferred Ctrl-C is raised when _enter ends
            raise

    @uninterruptible
    def _enter(self) -> None:
        coordinator = self._coordinator
        self._entered = True
        with coordinator.locked():
            self._fresh = _not_gathered(coordinator, self._wanted, write=self._write)
            _require_memory(coordinator, self._fresh, 0 if self._lent is None else self._lent.nbytes)
            self._undo.enter_context(coordinator.gathering(grads=self._lent is not None))
            if self._lent is not None:
                # put_back runs last, when all parameters have their original shapes again
                self._undo.callback(self._lent.put_back)
            for index, names in self._fresh.items():
                unit = coordinator.units[index]
                with coordinator.taking([index]), torch.inference_mode(False), torch.no_grad():
                    copies = {name: unit.parameters[name].detach().clone() for name in names}
                    self._undo.callback(unit.scatter, names)
                    unit.gather(copies)
                if not self._write:
                    self._marks |= {id(unit.parameters[name]): sum_of_bits(unit.parameters[name]) for name in names}
            if self._lent is not None:
                self._lent.lend()
            if self._saved is not None:
                self._undo.enter_context(self._saved)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None and self._write:
                _write_back(self._coordinator, self._fresh)
            elif kind is None:
                for index, names in self._fresh.items():
                    _require_shapes(self._coordinator.units[index], names)
                _tell_of_changes(self._coordinator, self._fresh, self._marks)
            if kind is None and self._lent is not None:
                self._lent.write_back()
        finally:
            self._coordinator.write_ended()
            self._leave()

    def __del__(self) -> None:
        """Leave the context if Ctrl-C came between the last line of the block and the first line of __exit__."""
        if getattr(self, "_entered", False):
            self._leave()

    @uninterruptible
    def _leave(self) -> None:
        with self._coordinator.locked():
            self._undo.close()
            self._entered = False


def _not_gathered(coordinator: Coordinator, wanted: Named, *, write: bool) -> dict[int, list[str]]:
    """Return the parameters that no outer context has gathered.

    A parameter that an outer context has gathered keeps the copy of the outer context.

    Raises:
        ModelError: with `write`, an outer context has gathered one of the parameters.
    """
    fresh = {}
    for index, names in wanted.items():
        gathered = set(coordinator.units[index].gathered)
        if write and not gathered.isdisjoint(names):
            raise ModelError(
                f"parameter '{min(gathered & set(names))}' is gathered already by an outer infinity.gathered. The copy "
                "of the outer context would not get a change that is made here. Use one context with write=True, "
                "grads=True, or leave the outer context first."
            )
        fresh[index] = [name for name in names if name not in gathered]
    return {index: names for index, names in fresh.items() if names}


def _require_memory(coordinator: Coordinator, wanted: Named, nbytes: int) -> None:
    """Check that the device has memory for the copies.

    Args:
        coordinator: coordinator of the model.
        wanted: parameters to copy.
        nbytes: bytes of other copies that are made at the same time.

    Raises:
        PlanError: there is too little free memory.
    """
    device = coordinator.torch_device
    for index, names in wanted.items():
        unit = coordinator.units[index].full
        nbytes += sum(spec.numel * group.dtype.itemsize for group, spec in map(unit.find, names))
    free = available_device_bytes(device)
    if nbytes > free:
        raise PlanError(
            f"infinity.gathered needs {format_bytes(nbytes)} for copies on {device}, and only {format_bytes(free)} are "
            "free. Gather one module at a time, or iterate over infinity.state_dict(model), which keeps one tensor in "
            "memory at a time."
        )


def _tell_of_changes(coordinator: Coordinator, wanted: Named, marks: Mapping[int, int]) -> None:
    changed = [
        name
        for index, names in wanted.items()
        for name in names
        if sum_of_bits(parameter := coordinator.units[index].parameters[name]) != marks[id(parameter)]
    ]
    if changed:
        logger.warning(
            "infinity.gathered: '%s'%s changed, and the change is lost when the context ends; write=True keeps it",
            changed[0],
            f" and {len(changed) - 1} other parameters were" if len(changed) > 1 else " was",
        )


# -- new values -------------------------------------------------------------------------------------------------------


def _write_back(coordinator: Coordinator, wanted: Named) -> None:
    """Write the changed values. All checks run before the first write, so a failed check leaves every state
    unchanged."""
    with interrupts_deferred(), coordinator.writing():
        _require_same_everywhere(coordinator, wanted)
        for index, names in wanted.items():
            _require_not_encoded(coordinator, coordinator.units[index], names)
            _require_not_shared(coordinator, coordinator.units[index], names)
        try:
            for index, names in wanted.items():
                unit = coordinator.units[index]
                with coordinator.taking([index]), torch.inference_mode(False), torch.no_grad():
                    _write(coordinator, unit, _changed(unit, names))
        except BaseException as error:
            coordinator.fail(InfinityError(f"only a part of the weights was written: {error}"))
            raise


def _require_same_everywhere(coordinator: Coordinator, wanted: Named) -> None:
    """Check that shapes have not changed, and that values are the same on all ranks.

    Raises:
        ModelError: a check failed; raised on all ranks.
    """

    def given() -> list[list[int]]:
        for index, names in wanted.items():
            _require_shapes(coordinator.units[index], names)
        parameters = [[coordinator.units[index].parameters[name] for name in names] for index, names in wanted.items()]
        return [[sum_of_bits(parameter) for parameter in of_unit] for of_unit in parameters]

    told = coordinator.world.each("writing weights", given)
    for rank, theirs in enumerate(told):
        if theirs == told[0]:
            continue
        of_unit, at = next(
            (names, [first == other for first, other in zip(*both, strict=True)].index(False))
            for names, *both in zip(wanted.values(), told[0], theirs, strict=True)
            if both[0] != both[1]
        )
        raise ModelError(
            f"parameter '{of_unit[at]}' has other values on rank {rank} than on rank 0 at the end of "
            "infinity.gathered(..., write=True). Nothing was written; change the parameter in the same way on all "
            "ranks."
        )


def _changed(unit: OffloadedUnit, names: Sequence[str]) -> list[str]:
    return [name for name in names if not _same_bits(unit, name)]


def _require_shapes(unit: OffloadedUnit, names: Sequence[str]) -> None:
    for name in names:
        group, spec = unit.full.find(name)
        now = unit.parameters[name]
        if now.shape != spec.shape or now.dtype != group.dtype:
            raise ModelError(
                f"'{name}' has shape {tuple(now.shape)} and dtype {now.dtype} at the end of infinity.gathered; in the "
                f"store it has shape {tuple(spec.shape)} and dtype {group.dtype}. Nothing was written; change values "
                "only. model.resize_token_embeddings() needs no infinity.gathered around it."
            )


def _same_bits(unit: OffloadedUnit, name: str) -> bool:
    """Return whether a gathered copy and the unit's own value have the same bits (NaN included)."""
    own = unit.own_value(name).reshape(-1)
    mine = unit.parameters[name].detach().to(own.device).contiguous().reshape(-1)
    return torch.equal(mine.view(torch.uint8), own.view(torch.uint8))


def _first_changed(coordinator: Coordinator, unit: OffloadedUnit, names: Sequence[str]) -> str | None:
    """Return the first of these parameters whose copy differs from the unit's own value; None if no copy differs.

    The unit is fetched only if `names` is not empty.
    """
    if not names:
        return None
    with coordinator.taking([unit.index]):
        return next(iter(_changed(unit, names)), None)


def _require_not_encoded(coordinator: Coordinator, unit: OffloadedUnit, names: Sequence[str]) -> None:
    """Raise ModelError if weights that are kept in 4 or 8 bits were changed, because such weights are encoded only
    once."""
    encoded = [name for name in names if unit.full.find(name)[0].codec is not None]
    changed = _first_changed(coordinator, unit, encoded)
    if changed is not None:
        raise ModelError(
            f"parameter '{changed}' of unit '{unit.name}' is stored as {unit.full.find(changed)[0].codec}, and was "
            "changed in infinity.gathered(..., write=True). Change it before infinity.offload, or set frozen: bf16. "
            "Nothing was written."
        )


def _require_not_shared(coordinator: Coordinator, unit: OffloadedUnit, names: Sequence[str]) -> None:
    """Raise ModelError if frozen weights were changed, because all generations of a run share one copy of frozen
    weights."""
    generations = coordinator.generations
    frozen = [name for name in names if not unit.full.find(name)[0].trainable]
    if generations is None or generations.newest is None:
        return
    changed = _first_changed(coordinator, unit, frozen)
    if changed is not None:
        raise ModelError(
            f"parameter '{changed}' of unit '{unit.name}' is frozen, and was changed in infinity.gathered(..., "
            "write=True): the generations of this run share one copy of the parameter. Change it before the first "
            "step, or set commit_every: 0. Nothing was written."
        )


def _write(coordinator: Coordinator, unit: OffloadedUnit, changed: Sequence[str]) -> None:
    """Write new values to the slot, and from there to the homes of weights and residuals.

    The slot may be memory that all ranks share. No rank writes to it while another rank still compares the old values.
    """
    fresh = _residuals(coordinator, unit, changed)
    coordinator.synchronize_uploads()
    coordinator.world.tell("comparing weights", None)
    for name in changed:
        unit.own_value(name).copy_(unit.parameters[name])
    touched = {unit.full.groups.index(unit.full.find(name)[0]) for name in changed}
    for index in sorted(touched):
        weights = unit.own_slice(index)
        if not weights.numel():
            continue  # this rank has no part of the group
        coordinator.write_parts(unit.weights_home.groups[index], {0: weights.cpu()})
        states = unit.states_of(index)
        if states is not None and states.residual is not None and fresh.get(index):
            coordinator.write_parts(states.residual, fresh[index])
    if changed:
        coordinator.rewrote(unit.index, changed)


def _residuals(
    coordinator: Coordinator, unit: OffloadedUnit, changed: Sequence[str]
) -> dict[int, dict[int, torch.Tensor]]:
    """Return the new residuals of this rank's pieces of changed parameters. The slot must still contain the old
    weights.

    Returns:
        The residuals, uint8, by group index and by byte offset in the residual of the group.
    """
    fresh: dict[int, dict[int, torch.Tensor]] = {}
    for name in changed:
        group, spec = unit.full.find(name)
        index = unit.full.groups.index(group)
        states, piece = unit.states_of(index), unit.shard.piece(spec, index)
        if states is None or states.residual is None or piece is None:
            continue
        begin, itemsize = piece.index - spec.index, residual_itemsize(states.master)
        old, new = (
            value.detach().cpu().contiguous().reshape(-1)[begin : begin + piece.numel]
            for value in (unit.own_value(name), unit.parameters[name])
        )
        at = piece.offset * itemsize
        residual = coordinator.read_part(states.residual, at, piece.numel * itemsize)
        given = residual_of(new, states.master)
        fresh.setdefault(index, {})[at] = coordinator.residual_after_write(name, old, new, residual, given)
    return fresh
