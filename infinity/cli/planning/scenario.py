"""A scenario: a model, a swap config and a machine. From a scenario follow a plan and the times of a step."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import yaml

from infinity.base.host_limits import budgets_in_ram
from infinity.config import SwapConfig, load_config
from infinity.errors import ConfigError, DeviceRoomError, PlanError, printable
from infinity.plan.disk import DiskLimits
from infinity.plan.plan import Plan
from infinity.plan.plan_input import DECODING_SCRATCH_BYTES, NO_PEERS, PeerFacts, Sharing
from infinity.plan.planner import DEVICE_SHARE, HOST_SHARE, make_plan, require_shared
from infinity.plan.step_time import StepTimePrediction, predict
from infinity.quoting import quoted
from infinity.sizes import enough_bytes, format_bytes
from infinity.state.discover import DiscoveredUnits, discover
from infinity.state.machine_rates import MachineRates
from infinity.state.model_shape import ModelShape, shape_of
from infinity.state.moments import OptimizerName
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import RankPartition
from infinity.state.training_step import BatchShape, StepFacts, StepWork, TrainingStep, work_of

if TYPE_CHECKING:
    from infinity.runtime.auto_tile_tokens import BlockPeak

GAIN_MIN = 0.02
"""An alternative is shown only if it saves at least this share of the step's time."""
_ALTERNATIVES = 3
_TOKENS_MAX = 1 << 24


@dataclass(frozen=True)
class PlanOutcome:
    """The plan and the predicted times for one swap config.

    Attributes:
        prediction: the predicted time of a step.
        activation_room: bytes of memory that the plan leaves for activations.
    """

    config: SwapConfig
    plan: Plan
    work: StepWork
    prediction: StepTimePrediction
    activation_room: int

    @property
    def written_bytes(self) -> int:
        """Bytes of states and activations that a step of one rank writes to the drives."""
        kept = self.work.moved_bytes if self.plan.placement.activations == "nvme" else 0
        return self.prediction.moved.written_bytes + kept

    @property
    def activations_fit(self) -> bool:
        return self.work.peak_bytes <= self.activation_room


class AlternativeConfig(NamedTuple):
    """Another swap config and its outcome.

    `changes` has the keys that differ from the original swap config, with their values.
    """

    changes: Mapping[str, Any]
    outcome: PlanOutcome


def in_token_tiles(work: StepWork, peaks: Sequence[BlockPeak], batch: BatchShape, tiles: int) -> StepWork:
    """Return a step's computation if norms and MLPs run in tiles of tokens, and therefore once more in the backward."""
    block = max(work.loss_bytes, *(peak.nbytes(batch.tokens, tiles) for peak in peaks))
    weights = {weight for peak in peaks for each in peak.modules for weight in each.module.parameters()}
    return replace(
        work,
        flops=work.flops + 2.0 * sum(weight.numel() for weight in weights) * work.tokens,
        peak_bytes=work.peak_bytes - work.block_bytes + block,
        block_bytes=block,
        token_tiles=tiles,
    )


@dataclass(frozen=True)
class PlanScenario:
    """The inputs of a plan.

    Attributes:
        model: the model, on the meta device. Layers for which memory.device has no room are divided into tiles, as in
            infinity.offload.
        machine: rates and memory sizes of the machine. The budgets come from the swap config, and the free space on the
            disks comes from `disks`.
        disks: free space on the disks of one rank.
        ranks: processes on this machine that train together.
        clips: whether gradients are clipped in most steps.
        warnings: reasons why a run on this machine may fail although the model fits.
    """

    model: Any
    config: SwapConfig
    machine: MachineRates
    disks: DiskLimits
    device: torch.device
    batch: BatchShape
    optimizer: OptimizerName = "adamw"
    ranks: int = 1
    clips: bool = False
    warnings: Sequence[str] = ()

    def outcome(self, config: SwapConfig | None = None) -> PlanOutcome:
        """Return the outcome for a swap config. The default is the scenario's own swap config.

        Raises:
            PlanError: the model does not fit.
            ConfigError: the swap config is invalid.
        """
        config = self.config if config is None else config
        try:
            plan = self._plan(config, self._found(config))
        except DeviceRoomError as error:
            if config is not self.config:  # the other swap config is only tried, so the model must not change
                from infinity.runtime.auto_tile import tiles_to_fit

                if not tiles_to_fit(self.model, error, self._plan_of(config)):
                    raise
                return replace(self, model=copy.deepcopy(self.model), config=config).outcome()
            if not self._tile(error, config):
                raise
            plan = self._plan(config, self._found(config))
        self._require_memory(plan)
        self._require_disks(plan, config)
        room = self._activation_room(plan)
        work = self._fitted_work(plan, config, self._batch(config), room)
        prediction = predict(plan, work, self.machine, clips=self.clips, checksums=config.nvme.checksums)
        return PlanOutcome(config, plan, work, prediction, room)

    def _activation_room(self, plan: Plan) -> int:
        """Return the bytes of memory that a plan leaves for activations."""
        if self._in_ram:  # memory.device does not limit activations that are kept in RAM
            return self.machine.host_bytes // self.ranks - self._ram_bytes(plan)
        room = plan.budgets.limits.device - plan.device_bytes
        return room - DECODING_SCRATCH_BYTES if plan.budgets.decoding_bytes else room

    @property
    def _in_ram(self) -> bool:
        """Whether the model computes in host memory."""
        return self.device.type == "cpu"

    def _ram_bytes(self, plan: Plan) -> int:
        return plan.host_bytes + (plan.device_bytes if self._in_ram else 0)

    def _require_memory(self, plan: Plan) -> None:
        """Raise PlanError if the budgets are larger than the machine's memory."""
        taken, limits = self.ranks * self._ram_bytes(plan), plan.budgets.limits
        if taken > self.machine.host_bytes:
            beside = f" and memory.device {format_bytes(limits.device * self.ranks)}" if self._in_ram else ""
            raise PlanError(
                f"the plan takes {format_bytes(taken)} of RAM, because memory.host is "
                f"{format_bytes(limits.host * self.ranks)}{beside}, and {self.machine.name} has "
                f"{format_bytes(self.machine.host_bytes)}. Lower {'them' if beside else 'it'}, or leave `memory` out "
                "of the swap config: the memory is measured then."
            )

    def _require_disks(self, plan: Plan, config: SwapConfig) -> None:
        """Raise PlanError if the disks have no room for the swap file."""
        if not self.config.nvme.paths:
            return  # the paths are an example in a proposal, and do not exist
        free = self.disks.room_bytes if self.disks.free_bytes is None else self.disks.free_bytes
        if (needed := plan.layout.swap.nbytes) > free:
            each = f" of each of the {self.ranks} ranks" if self.ranks > 1 else ""
            where = " and ".join(map(printable, config.nvme.paths))
            has = "has" if len(config.nvme.paths) == 1 else "have"
            raise PlanError(
                f"the swap file{each} takes {format_bytes(needed)}, and {where} {has} room for {format_bytes(free)}. "
                "Free space, name more disks in nvme.paths, or keep less there."
            )

    def _plan(self, config: SwapConfig, found: DiscoveredUnits, batch: BatchShape | None = None) -> Plan:
        """Return the plan. Args: batch: another batch than that of `config`."""
        peers = NO_PEERS
        if self.ranks > 1:
            near = RankPartition(1, 0) if config.ranks.gather == "none" else None
            sharing: Sharing = "nothing" if config.ranks.wire == "gloo" else "weights"
            peers = PeerFacts(RankPartition(self.ranks, 0), self.ranks, near=near, sharing=sharing)
        facts = StepFacts(batch or self._batch(config), self.machine, self.clips)
        plan = make_plan(
            found.units,
            OffloadArguments(
                config,
                self.device,
                self.optimizer,
                self._passes(config),
                step=TrainingStep(self._shape, facts),
            ),
            can_recompute=bool(getattr(self.model, "supports_gradient_checkpointing", False)),
            sites=found.sites,
            peers=peers,
            disks=self.disks,
        )
        require_shared(plan, config)
        return plan

    def _plan_of(self, config: SwapConfig) -> Callable[[Any], Plan]:
        """Return a function that makes the plan of a model like this one."""
        return lambda model: self._plan(config, discover(model, config.moments, config.frozen))

    def _tile(self, error: DeviceRoomError, config: SwapConfig) -> bool:
        """Divide the layers for which memory.device has no room into tiles. Return whether the layers then fit."""
        from infinity.runtime.auto_tile import tile_to_fit

        tiled = tile_to_fit(self.model, error, self._plan_of(config))
        self._discoveries.clear()
        vars(self).pop("_shape", None)
        vars(self).pop("_block_peaks", None)
        return tiled

    @property
    def tiled(self) -> Mapping[str, int]:
        """The layers that run in tiles, by name, each with its number of tiles."""
        layers = {name: getattr(module, "tiles", None) for name, module in self.model.named_modules()}
        return {name: len(tiles) for name, tiles in layers.items() if isinstance(tiles, list)}

    def _batch(self, config: SwapConfig) -> BatchShape:
        """Return the batch of a step for a swap config.

        If `config` says `vertical: true` and the scenario's own swap config does not, all micro-batches of a step are
        in one pass.
        """
        if config.vertical and not self.config.vertical:
            return replace(self.batch, micro_batches=self.batch.count, passes=1)
        return self.batch

    def _passes(self, config: SwapConfig) -> int:
        batch = self._batch(config)
        return batch.passes if config.vertical else batch.count

    def _work(self, plan: Plan, config: SwapConfig, batch: BatchShape) -> StepWork:
        placement = plan.placement
        return work_of(
            self._shape,
            batch,
            recompute=placement.recompute,
            vertical=config.vertical,
            away={"keep": 0.0, "host": plan.budgets.activation_bytes, "nvme": math.inf}[placement.activations],
        )

    def _fitted_work(self, plan: Plan, config: SwapConfig, batch: BatchShape, room: int) -> StepWork:
        """Return the computation of a step, in tiles of tokens if a block does not fit otherwise."""
        from infinity.runtime.auto_tile_tokens import tiles_for

        work = self._work(plan, config, batch)
        if work.peak_bytes <= room or not plan.placement.recompute or self._in_ram or not self._block_peaks:
            return work
        tiles = tiles_for(self._block_peaks, batch.tokens, room - work.peak_bytes + work.block_bytes, least=2)
        if tiles == 1:
            return work
        return min(work, in_token_tiles(work, self._block_peaks, batch, tiles), key=lambda each: each.peak_bytes)

    def why_too_large(self, outcome: PlanOutcome) -> str:
        """Return what takes the memory if a block does not fit in tiles of tokens; "" if it does not run in tiles."""
        from infinity.runtime.auto_tile_tokens import why_too_large

        tokens, tiles = self.batch.tokens, outcome.work.token_tiles
        if tiles == 1:
            return ""
        largest = max(self._block_peaks, key=lambda peak: peak.nbytes(tokens, tiles))
        room = outcome.activation_room - outcome.work.peak_bytes + outcome.work.block_bytes
        return why_too_large(largest, tokens, tiles, max(room, 0))

    @cached_property
    def _block_peaks(self) -> list[BlockPeak]:
        from infinity.runtime.auto_tile_tokens import block_peaks

        return list(block_peaks(self.model))

    @cached_property
    def _shape(self) -> ModelShape:
        return shape_of(self.model, self.batch.sequences, self.batch.length)

    @cached_property
    def _discoveries(self) -> dict[tuple[str, str], DiscoveredUnits]:
        return {}

    def _found(self, config: SwapConfig) -> DiscoveredUnits:
        key = config.moments, config.frozen
        if key not in self._discoveries:
            self._discoveries[key] = discover(self.model, *key)
        return self._discoveries[key]

    def largest_batch(self, outcome: PlanOutcome) -> int:
        """Return the maximum number of sequences in a micro-batch whose activations fit. This may be 0."""
        return self.most_tokens(outcome) // self.batch.length

    def most_tokens(self, outcome: PlanOutcome) -> int:
        """Return the maximum number of tokens in a micro-batch whose activations fit beside the smallest slots; in
        tiles of tokens if the outcome has tiles."""
        plan, config, room = outcome.plan, outcome.config, outcome.activation_room
        if not self._in_ram:
            smallest = self._plan(config, self._found(config), BatchShape(1, _TOKENS_MAX))
            room = max(room, self._activation_room(smallest))

        def fits(tokens: int) -> bool:
            batch = replace(self.batch, sequences=1, length=tokens)
            tiled = outcome.work.token_tiles > 1
            work = self._fitted_work(plan, config, batch, room) if tiled else self._work(plan, config, batch)
            return work.peak_bytes <= room

        low, high = 0, 1
        while fits(high) and high < _TOKENS_MAX:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def roomier(self, outcome: PlanOutcome) -> Iterator[Mapping[str, Any]]:
        """Yield changes of one key of the swap config after which the activations fit.

        The possible changes are a larger memory.device, up to the device's memory, recomputation of activations, and
        activations in RAM or on NVMe.
        """
        most = 0 if self._in_ram else int(self.machine.device_bytes * DEVICE_SHARE)
        sizes = (outcome.plan.budgets.limits.device * tenths // 10 for tenths in (11, 13, 16, 20, 30, 40, 60, 80, 160))
        larger = ({"memory.device": enough_bytes(nbytes)} for nbytes in sizes if nbytes <= most)
        recomputed = () if outcome.plan.placement.recompute else ({"recompute": "blocks"},)
        stay = outcome.plan.placement.activations == "keep" and not self._in_ram
        moved = ({"activations": tier} for tier in ("host", "nvme") if stay)
        for each in (larger, recomputed, moved):
            found = ((changes, self._with(changes)) for changes in each)
            fits = (changes for changes, outcome in found if outcome is not None and outcome.activations_fit)
            yield from itertools.islice(fits, 1)

    def _with(self, changes: Mapping[str, Any]) -> PlanOutcome | None:
        """Return the outcome with these changes.

        If the model does not fit or the changed swap config is invalid, return None.
        """
        try:
            return self.outcome(with_changes(self.config, changes))
        except (PlanError, ConfigError):
            return None

    def fits_if(self) -> AlternativeConfig | None:
        """Return the first change with which the model and its activations fit; None if no change helps.

        Changes that do not affect the computation are tried first.
        """
        memory = self._memory_within()
        for changes in ({**memory, **more} for more in ({}, *self._changes_to_fit())):
            found = self._with(changes) if changes else None
            if found is not None and found.activations_fit:
                return AlternativeConfig(changes, found)
        return None

    def _memory_within(self) -> Mapping[str, Any]:
        """Return budgets that fit in the machine's memory.

        If the swap config's budgets already fit, return an empty mapping.
        """
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
        yield auto | {"recompute": "blocks"}
        yield auto | {"moments": "int8"}

    def alternatives(self, outcome: PlanOutcome) -> list[AlternativeConfig]:
        """Return at most three swap configs of `choices` that are faster than this swap config.

        The fastest comes first.

        If two swap configs are equally fast, the one with fewer changes comes first.
        """
        before = outcome.prediction.seconds
        found = []
        for changes in self.choices():
            other = self._with(changes)
            if other and other.prediction.seconds <= (1 - GAIN_MIN) * before and other.activations_fit:
                found.append(AlternativeConfig(changes, other))
        found.sort(key=lambda each: (round(each.outcome.prediction.seconds, 6), len(each.changes)))
        return _without_idle_changes(found)[:_ALTERNATIVES]

    def choices(self) -> Iterator[Mapping[str, Any]]:
        """Yield all combinations of changes of the swap config that might make a step faster."""
        config, units = self.config, self._found(self.config).units
        trained = any(unit.trainable_groups for unit in units)
        published = config.frozen == "auto" and any(unit.encoded_bytes for unit in units)  # a base in FP8, for example
        options: list[list[Mapping[str, Any]]] = [[{}]]
        if config.weights != "auto" or config.optimizer != "auto":
            options.append([{}, {"weights": "auto", "optimizer": "auto"}])
        elif self.machine.is_gpu and trained:
            options.append([{}, *({"optimizer": tier} for tier in ("device", "host"))])
        if trained:
            options.append([{}, *({"moments": form} for form in ("bf16", "int8") if form != config.moments)])
        if config.commit_every != 0 and config.nvme.paths:
            options.append([{}, {"commit_every": 0}])
        if self.batch.count > 1 and not config.vertical:
            options.append([{}, {"vertical": True}])
        if self._has_frozen and config.frozen != "nf4" and not published:
            options.append([{}, *({"frozen": form} for form in ("int8", "nf4") if form != config.frozen)])
        if (config.recompute, config.activations) != ("auto", "auto") and not self._in_ram:
            options.append([{}, {"recompute": "auto", "activations": "auto"}])
        for chosen in itertools.product(*options):
            changes: dict[str, Any] = {}
            for each in chosen:
                changes |= each
            if changes:
                yield changes

    def other_recomputation(self, outcome: PlanOutcome) -> AlternativeConfig | None:
        """Return the outcome of recomputing blocks if the plan keeps all activations, or of keeping them if it
        recomputes blocks; None if the memory for the states does not suffice then."""
        changes = {"recompute": "none" if outcome.plan.placement.recompute else "blocks", "activations": "auto"}
        other = self._with(changes)
        return None if other is None else AlternativeConfig({"recompute": changes["recompute"]}, other)

    @property
    def _has_frozen(self) -> bool:
        return any(not parameter.requires_grad and parameter.dim() > 1 for parameter in self.model.parameters())


def _without_idle_changes(found: list[AlternativeConfig]) -> list[AlternativeConfig]:
    """Leave out the alternatives that have unnecessary changes, and return all others.

    An alternative has unnecessary changes if it has all changes of an earlier alternative, and further changes.
    """
    kept: list[AlternativeConfig] = []
    for each in found:
        if not any(other.changes.items() <= each.changes.items() for other in kept):
            kept.append(each)
    return kept


def as_yaml(changes: Mapping[str, Any]) -> str:
    """Return changes of a swap config as YAML in one line.

    `changes` has the form of the argument `changes` of with_changes.
    """
    text: str = yaml.safe_dump(_nested(changes, {}), default_flow_style=True, sort_keys=False, width=10_000)
    return text.strip()[1:-1]


def with_changes(config: SwapConfig, changes: Mapping[str, Any]) -> SwapConfig:
    """Return the swap config with some values changed.

    Args:
        config: the config.
        changes: new values by key. The key 'memory.host' means `host` in the section `memory`.

    Raises:
        ConfigError: a key does not exist, or a value is invalid.
    """
    return load_config(_nested(changes, config.model_dump(exclude_unset=True)))


def _nested(changes: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Put the changes into their sections of `values`, and return `values`."""
    for key, value in changes.items():
        *sections, last = key.split(".")
        into = values
        for section in sections:
            into = into.setdefault(section, {})
            if not isinstance(into, dict):
                raise ConfigError(f"{quoted(key)}: {section} is not a section of the swap config")
        into[last] = value
    return values


def compute_tokens(outcome: PlanOutcome) -> float | None:
    """Return the number of tokens per step above which computing is the bottleneck. If it never is, return None."""
    busy, compute = outcome.prediction.busy, outcome.prediction.compute_s
    if not compute:
        return None
    others = max((seconds for name, seconds in busy.items() if name not in ("compute", "processor")), default=0.0)
    processor = busy.get("processor", 0.0)
    # Without a device, the processor computes forward and backward in addition to its other work.
    others = max(others, processor) if "compute" in busy else max(others - (processor - compute), 0.0)
    return others / compute * outcome.work.tokens
