"""A model, a swap config and a machine, and the plan and the times that follow."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import yaml

from infinity.base.machine import budgets_in_ram
from infinity.cli.planning.model import Batch, Shape, shape_of, work_of
from infinity.cli.planning.prediction import Prediction, Work, predict
from infinity.cli.planning.rates import Machine
from infinity.config import SwapConfig, load_config
from infinity.echo import quoted
from infinity.errors import ConfigError, DeviceRoomError, PlanError, printable
from infinity.plan.disk import Disks
from infinity.plan.plan import Plan
from infinity.plan.planner import DEVICE_SHARE, HOST_SHARE, make_plan
from infinity.plan.problem import ALONE, Peers
from infinity.sizes import enough_bytes, format_bytes
from infinity.state.discover import Discovery, discover
from infinity.state.moments import OptimizerName
from infinity.state.shard import Cut
from infinity.state.terms import Terms
from infinity.tiers.decoding import DEVICE_SCRATCH_BYTES

GAIN_MIN = 0.02
"""What an alternative must save of the step's time to be worth a line."""
_ALTERNATIVES = 3
_TOKENS_MAX = 1 << 24


@dataclass(frozen=True)
class Outcome:
    """What came of a config.

    Attributes:
        activation_room: device memory beside slots and gradients.
    """

    config: SwapConfig
    plan: Plan
    work: Work
    prediction: Prediction
    activation_room: int

    @property
    def activations_fit(self) -> bool:
        return self.work.peak_bytes <= self.activation_room


class Alternative(NamedTuple):
    """Another config. Attributes: changes: keys of the swap config, and their values."""

    changes: Mapping[str, Any]
    outcome: Outcome


@dataclass(frozen=True)
class Scenario:
    """What is to be planned for.

    Attributes:
        model: on the meta device. Its layers are cut into tiles where memory.device has no room for them, as
            infinity.offload does.
        machine: its rates; memory and disks are those of the config and of `disks`.
        ranks: processes on this machine that train together.
        clips: gradients are clipped in most steps.
    """

    model: Any
    config: SwapConfig
    machine: Machine
    disks: Disks
    device: torch.device
    batch: Batch
    optimizer: OptimizerName = "adamw"
    ranks: int = 1
    clips: bool = False

    def outcome(self, config: SwapConfig | None = None) -> Outcome:
        """Raises PlanError, ConfigError: it does not fit, or cannot be."""
        config = self.config if config is None else config
        try:
            plan = self._plan(config, self._found(config))
        except DeviceRoomError as error:
            if config is not self.config:  # which is only tried: the model stays as it is
                return replace(self, model=copy.deepcopy(self.model), config=config).outcome()
            if not self._tile(error, config):
                raise
            plan = self._plan(config, self._found(config))
        self._require_memory(plan)
        self._require_disks(plan, config)
        work = self._work(plan, config, self._batch(config))
        room = plan.budgets.limits.device - plan.device_bytes
        if plan.budgets.decoding_bytes:
            room -= DEVICE_SCRATCH_BYTES
        if self._in_ram:  # where nothing keeps them within memory.device
            room = self.machine.host_bytes // self.ranks - self._ram_bytes(plan)
        prediction = predict(plan, work, self.machine, clips=self.clips, checksums=config.nvme.checksums)
        return Outcome(config, plan, work, prediction, room)

    @property
    def _in_ram(self) -> bool:
        """Models compute in host memory."""
        return self.device.type == "cpu"

    def _ram_bytes(self, plan: Plan) -> int:
        return plan.host_bytes + (plan.device_bytes if self._in_ram else 0)

    def _require_memory(self, plan: Plan) -> None:
        """Raises PlanError: the budgets are larger than the machine."""
        taken, limits = self.ranks * self._ram_bytes(plan), plan.budgets.limits
        if taken > self.machine.host_bytes:
            beside = f" and memory.device {format_bytes(limits.device * self.ranks)}" if self._in_ram else ""
            raise PlanError(
                f"the plan takes {format_bytes(taken)} of RAM, as memory.host is "
                f"{format_bytes(limits.host * self.ranks)}{beside}, and {self.machine.name} has "
                f"{format_bytes(self.machine.host_bytes)}. Lower {'them' if beside else 'it'}, or leave `memory` out "
                "of the swap config: it is measured then."
            )

    def _require_disks(self, plan: Plan, config: SwapConfig) -> None:
        """Raises PlanError: the disks have no room for the swap file."""
        if not self.config.nvme.paths:
            return  # those of the config are only proposed
        free = self.disks.room_bytes if self.disks.free_bytes is None else self.disks.free_bytes
        if (needed := plan.layout.swap.nbytes) > free:
            each = f" of each of the {self.ranks} ranks" if self.ranks > 1 else ""
            where = " and ".join(map(printable, config.nvme.paths))
            has = "has" if len(config.nvme.paths) == 1 else "have"
            raise PlanError(
                f"the swap file{each} takes {format_bytes(needed)}, and {where} {has} room for {format_bytes(free)}. "
                "Free space, name more disks in nvme.paths, or let less rest there."
            )

    def _plan(self, config: SwapConfig, found: Discovery) -> Plan:
        peers = ALONE
        if self.ranks > 1:
            near = Cut(1, 0) if config.ranks.gather == "none" else None
            peers = Peers(Cut(self.ranks, 0), self.ranks, near=near)
        return make_plan(
            found.units,
            Terms(config, self.device, self.optimizer, self._passes(config)),
            can_recompute=bool(getattr(self.model, "supports_gradient_checkpointing", False)),
            sites=found.sites,
            peers=peers,
            disks=self.disks,
        )

    def _tile(self, error: DeviceRoomError, config: SwapConfig) -> bool:
        """Cut the layers that memory.device has no room for into tiles. False where it still has none then."""
        from infinity.runtime.tiles_to_fit import tile_to_fit

        def plan(model: Any) -> Plan:
            return self._plan(config, discover(model, config.moments, config.frozen))

        tiled = tile_to_fit(self.model, error, plan)
        self._discoveries.clear()
        vars(self).pop("_shape", None)
        return tiled

    @property
    def tiled(self) -> Mapping[str, int]:
        """The layers that run in tiles, and in how many."""
        layers = {name: getattr(module, "tiles", None) for name, module in self.model.named_modules()}
        return {name: len(tiles) for name, tiles in layers.items() if isinstance(tiles, list)}

    def _batch(self, config: SwapConfig) -> Batch:
        """With `vertical` all micro-batches of a step are in one pass, where the scenario is not asked for another
        division."""
        if config.vertical and not self.config.vertical:
            return replace(self.batch, micro_batches=self.batch.count, passes=1)
        return self.batch

    def _passes(self, config: SwapConfig) -> int:
        batch = self._batch(config)
        return batch.passes if config.vertical else batch.count

    def _work(self, plan: Plan, config: SwapConfig, batch: Batch) -> Work:
        return work_of(
            self._shape, batch, recompute=plan.placement.activations == "recompute", vertical=config.vertical
        )

    @cached_property
    def _shape(self) -> Shape:
        return shape_of(self.model)

    @cached_property
    def _discoveries(self) -> dict[tuple[str, str], Discovery]:
        return {}

    def _found(self, config: SwapConfig) -> Discovery:
        key = config.moments, config.frozen
        if key not in self._discoveries:
            self._discoveries[key] = discover(self.model, *key)
        return self._discoveries[key]

    def largest_batch(self, outcome: Outcome) -> int:
        """Sequences of a micro-batch whose activations have room; 0: none has."""
        return self.most_tokens(outcome) // self.batch.length

    def most_tokens(self, outcome: Outcome) -> int:
        """Tokens of a micro-batch whose activations have room."""

        def fits(tokens: int) -> bool:
            batch = replace(self.batch, sequences=1, length=tokens)
            return self._work(outcome.plan, outcome.config, batch).peak_bytes <= outcome.activation_room

        low, high = 0, 1
        while fits(high) and high < _TOKENS_MAX:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def roomier(self, outcome: Outcome) -> Iterator[Mapping[str, Any]]:
        """Changes of the config with each of which the activations fit: a larger memory.device that the device has, and
        recomputing them."""
        most = 0 if self._in_ram else int(self.machine.device_bytes * DEVICE_SHARE)
        sizes = (outcome.plan.budgets.limits.device * tenths // 10 for tenths in (11, 13, 16, 20, 30, 40, 60, 80, 160))
        larger = ({"memory.device": enough_bytes(nbytes)} for nbytes in sizes if nbytes <= most)
        recomputed = () if outcome.plan.placement.activations == "recompute" else ({"activations": "recompute"},)
        for each in (larger, recomputed):
            found = ((changes, self._with(changes)) for changes in each)
            fits = (changes for changes, outcome in found if outcome is not None and outcome.activations_fit)
            yield from itertools.islice(fits, 1)

    def _with(self, changes: Mapping[str, Any]) -> Outcome | None:
        """None: that does not fit, or cannot be."""
        try:
            return self.outcome(with_changes(self.config, changes))
        except (PlanError, ConfigError):
            return None

    def fits_if(self) -> Alternative | None:
        """The first change of a plan that does not fit with which it does, activations included: of those that change
        nothing that is computed, then of the others."""
        memory = self._memory_within()
        for changes in ({**memory, **more} for more in ({}, *self._changes_to_fit())):
            found = self._with(changes) if changes else None
            if found is not None and found.activations_fit:
                return Alternative(changes, found)
        return None

    def _memory_within(self) -> Mapping[str, Any]:
        """Budgets that the machine has, where those of the config are larger."""
        given, there = self.config.memory, self.machine.host_bytes
        if (given.host or 0) + ((given.device or 0) if self._in_ram else 0) <= there:
            return {}
        if not self._in_ram:
            return {"memory.host": f"{int(there * HOST_SHARE) >> 20}MiB"}
        return {f"memory.{name}": nbytes for name, nbytes in budgets_in_ram(there).items()}

    def _changes_to_fit(self) -> Iterator[Mapping[str, Any]]:
        paths = {} if self.config.nvme.paths else {"nvme.paths": ["/a/directory/on/an/ssd"]}
        auto = {"weights": "auto", "optimizer": "auto", "gradients": "auto"} | paths
        yield auto
        yield {"weights": "nvme", "optimizer": "nvme", "gradients": "auto"} | paths
        yield auto | {"activations": "recompute"}
        yield auto | {"moments": "int8"}

    def alternatives(self, outcome: Outcome) -> list[Alternative]:
        """The configs of `choices` with the shortest steps, if they are shorter than this one's, at most three; of two
        that are equally fast the one with fewer changes."""
        before = outcome.prediction.seconds
        found = []
        for changes in self.choices():
            other = self._with(changes)
            if other and other.prediction.seconds <= (1 - GAIN_MIN) * before and other.activations_fit:
                found.append(Alternative(changes, other))
        found.sort(key=lambda each: (round(each.outcome.prediction.seconds, 6), len(each.changes)))
        return _without_idle_changes(found)[:_ALTERNATIVES]

    def choices(self) -> Iterator[Mapping[str, Any]]:
        """Changes of the config that might help, in every combination."""
        config, trained = self.config, any(unit.trainable_groups for unit in self._found(self.config).units)
        options: list[list[Mapping[str, Any]]] = [[{}]]
        if config.weights != "auto" or config.optimizer != "auto":
            options.append([{}, {"weights": "auto", "optimizer": "auto"}])
        if trained:
            options.append([{}, *({"moments": form} for form in ("bf16", "int8") if form != config.moments)])
        if config.commit_every != 0 and config.nvme.paths:
            options.append([{}, {"commit_every": 0}])
        if self.batch.count > 1 and not config.vertical:
            options.append([{}, {"vertical": True}])
        if self._has_frozen and config.frozen != "nf4" and self.ranks == 1:
            options.append([{}, *({"frozen": form} for form in ("int8", "nf4") if form != config.frozen)])
        for chosen in itertools.product(*options):
            changes: dict[str, Any] = {}
            for each in chosen:
                changes |= each
            if changes:
                yield changes

    @property
    def _has_frozen(self) -> bool:
        return any(not parameter.requires_grad and parameter.dim() > 1 for parameter in self.model.parameters())


def _without_idle_changes(found: list[Alternative]) -> list[Alternative]:
    """Without those that have the changes of a faster one, or of one as fast, and further ones."""
    kept: list[Alternative] = []
    for each in found:
        if not any(other.changes.items() <= each.changes.items() for other in kept):
            kept.append(each)
    return kept


def as_yaml(changes: Mapping[str, Any]) -> str:
    """Changes of a config as they are written there, in one line. Args: changes: as of with_changes."""
    text: str = yaml.safe_dump(_nested(changes, {}), default_flow_style=True, sort_keys=False, width=10_000)
    return text.strip()[1:-1]


def with_changes(config: SwapConfig, changes: Mapping[str, Any]) -> SwapConfig:
    """The config with other values.

    Args:
        changes: by key; 'memory.host' is `host` in `memory`.

    Raises:
        ConfigError: there is no such key, or it cannot have that value.
    """
    return load_config(_nested(changes, config.model_dump(exclude_unset=True)))


def _nested(changes: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the changes in its sections."""
    for key, value in changes.items():
        *sections, last = key.split(".")
        into = values
        for section in sections:
            into = into.setdefault(section, {})
            if not isinstance(into, dict):
                raise ConfigError(f"{quoted(key)}: {section} is no section of the swap config")
        into[last] = value
    return values


def compute_tokens(outcome: Outcome) -> float | None:
    """Tokens per step from which computing takes longer than anything else; None where that is so for no number."""
    busy, compute = outcome.prediction.busy, outcome.prediction.compute_s
    if not compute:
        return None
    others = max((seconds for name, seconds in busy.items() if name not in ("compute", "processor")), default=0.0)
    processor = busy.get("processor", 0.0)
    # Without a device the processor computes beside what else it has to do.
    others = max(others, processor) if "compute" in busy else max(others - (processor - compute), 0.0)
    return others / compute * outcome.work.tokens
