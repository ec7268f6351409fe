"""The plan: where each state of the model rests, and how many bytes a step moves. The plan is made once, before any
state is moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.budgets import Budgets
from infinity.plan.layout import StorageLayout, SwapBytes
from infinity.plan.link_traffic import LinkBytes, link_bytes
from infinity.plan.nvme_traffic import traffic
from infinity.plan.placement import StatePlacement
from infinity.plan.plan_input import NO_PEERS, PeerFacts, PlanInput
from infinity.sizes import format_bytes
from infinity.state.codec import name_of
from infinity.state.discover import HookedModule
from infinity.state.shard import RankPartition

_RESTS = {"keep": "device", "host": "host", "nvme": "nvme"}
_OVERLAP = {
    "auto": "during backward while that works out, otherwise before the next forward",
    "during_backward": "during backward, redone if the step decides otherwise",
    "before_forward": "after the step, before each unit's next use",
    "off": "in the step",
}


@dataclass(frozen=True)
class TrafficForecast:
    """Forecast of the bytes that one step moves. `moved` counts all links; the other numbers count NVMe only.

    The forecast assumes that the previous step had the same number of micro-batches, and that all moments are in use.
    The number of bytes read is an upper bound: gradients that are still in the window when the next pass adds to them
    are not read. The bound does not hold if a pass needs a weight more than twice (a tied weight, for example). The
    bytes that a commit writes of the states in RAM are divided by `commit_every`.

    Attributes:
        passes: planned number of backward passes before the step.
        read_bytes, written_bytes: bytes of one step, including the step's share of a commit.
        commit_bytes: bytes of the states in RAM, all of which a commit writes; 0 if there are no commits.
        rate: bytes per second of all disks together, half reads and half writes, measured by infinity-bench; None if
            the disks were not measured, or if nothing is on NVMe.
        saves_bytes: bytes that a step would save with accumulation_steps=1; 0 if the caller gave accumulation_steps.
        moved: bytes that a step is expected to move, less the savings from slots.
        moved_clipping: bytes that a step is expected to move if gradients are clipped in most steps.
    """

    passes: int
    read_bytes: int
    written_bytes: int
    commit_bytes: int
    rate: float | None
    saves_bytes: int
    moved: LinkBytes
    moved_clipping: LinkBytes

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads and writes."""
        return self.read_bytes + self.written_bytes

    @property
    def io_s(self) -> float | None:
        """Seconds of I/O per step; None if the disks were not measured."""
        return None if self.rate is None else self.step_bytes / self.rate


@dataclass(frozen=True)
class Plan:
    """All decisions of the planner.

    Attributes:
        device: where the model computes.
        placement: tiers and forms of the states, and the times of updates and commits.
        budgets: the memory that states may take, and the part of this memory that is for moving states.
        layout: every extent of the swap file and every lease of the arena.
        forecast: bytes that a step moves.
        peers: facts about the other ranks. Placement, layout and forecast cover this rank's slices only.
    """

    device: str
    placement: StatePlacement
    budgets: Budgets
    layout: StorageLayout
    forecast: TrafficForecast
    peers: PeerFacts = NO_PEERS

    @property
    def needs_store(self) -> bool:
        """Whether the plan needs a store.

        A rank with empty slices has no states in the store. It still needs the store for the manifests of the
        generations.
        """
        if self.placement.activations == "nvme":
            return True
        return bool(self.layout.swap.nbytes or (self.peers.slice_count and self.placement.commit_every))

    @property
    def device_bytes(self) -> int:
        """Bytes of memory.device that the plan uses.

        If the device has no memory of its own, weights that rest in RAM are used in place and need no slots.
        """
        budgets = self.budgets
        used_at_home = budgets.limits.used_at_home and self.placement.weights.tier == "host" and not budgets.decodes
        if used_at_home:
            return 0
        return budgets.slot_bytes + budgets.ring_bytes + budgets.decoding_bytes + budgets.resident_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of memory.host that the plan uses.

        These are the bytes of the arena and of the swap file's checksums, less the part of the arena that counts for
        memory.device.
        """
        of_device = self.device_bytes if self.budgets.limits.in_place else 0
        return self.layout.arena.nbytes + self.layout.arena.shared - of_device + self.layout.checksum_bytes

    def describe(self) -> str:
        """Return a few lines for the log: every tier, every budget, and the predicted traffic."""
        placement, layout, limits, forecast = self.placement, self.layout, self.budgets.limits, self.forecast
        weights, optimizer, form = placement.weights, placement.optimizer, placement.form
        predicted = "" if forecast.io_s is None else f", {forecast.io_s:.2f} s at the measured rate"
        per_parameter = forecast.step_bytes / max(layout.trainable_numel, 1)
        weights_share = _share(layout.arena.weights, len(weights.in_ram), len(layout.units))
        states_share = _share(layout.arena.states, len(optimizer.in_ram), layout.trained_count)
        return "\n".join(
            [
                f"{layout.numel / 1e6:.1f} M parameters, {layout.trainable_numel / 1e6:.1f} M trained, "
                f"on {self.device}{_rank(self.peers.cut)}",
                f"  weights      {weights.tier:<7}{format_bytes(layout.weight_bytes):>12}"
                f"{weights_share if weights.tier == 'nvme' else ''}{_encoded(layout)}",
                *_experts(layout, self.budgets),
                f"  optimizer    {optimizer.tier:<7}{format_bytes(layout.state_bytes):>12}  (master {form.master}, "
                f"{form.moments} {' and '.join(form.stored) or 'no moments'})"
                f"{states_share if optimizer.tier == 'nvme' else ''}",
                *_resident(placement, self.budgets, layout),
                f"  gradients    {_gradients(placement, self.budgets, layout)}",
                *_saving(forecast),
                f"  activations  {_activations(placement, self.budgets)}",
                *_between_ranks(self.peers, layout),
                f"  memory.device {format_bytes(self.device_bytes)} of {format_bytes(limits.device)} "
                f"{_use(self.budgets)}",
                f"  memory.host   {format_bytes(self.host_bytes)} of {format_bytes(limits.host)}",
                f"  swap file     {_swap(layout.swap, placement)}; one step moves about "
                f"{format_bytes(forecast.step_bytes)} ({per_parameter:.1f} B per trained parameter{predicted})",
                f"  commits       {_commits(placement)}",
                f"  updates       {_updates(placement, self.budgets)}",
            ]
        )


def _experts(layout: StorageLayout, budgets: Budgets) -> list[str]:
    """Return the log's line about experts that are units; [] without such experts."""
    sizes = [unit.full.weight_bytes for unit in layout.units if unit.full.routed]
    if not sizes:
        return []
    slots = f"; {budgets.slot_bytes // max(sizes)} of them in slots" if budgets.slot_bytes else ""
    return [f"  experts      {len(sizes)} units of {format_bytes(max(sizes))}: only routed ones are fetched{slots}"]


def _use(budgets: Budgets) -> str:
    """Return the log's words about the use of memory.device."""
    if budgets.limits.in_place:
        return "of RAM, for weights; activations take further RAM"
    return f"for weights{' and gradients under way' if budgets.ring_bytes else ''}, the rest for activations"


# -- traffic of a step -------------------------------------------------------------------------------------------------


def forecast(
    inputs: PlanInput,
    placement: StatePlacement,
    budgets: Budgets,
    layout: StorageLayout,
    sites: Sequence[HookedModule],
    *,
    saves_bytes: int,
) -> TrafficForecast:
    """Forecast the traffic of a step.

    `sites` are the units that each module needs. For `saves_bytes` see TrafficForecast.
    """
    in_ram = (placement.weights.in_ram, placement.optimizer.in_ram, placement.gradients.in_ram)
    moved, usual = traffic(inputs, *in_ram), link_bytes(inputs, placement, budgets, sites)
    return TrafficForecast(
        passes=inputs.passes,
        read_bytes=moved.read_bytes,
        written_bytes=moved.written_bytes + moved.commit_share_bytes,
        commit_bytes=moved.commit_bytes,
        rate=inputs.disks.rate if layout.swap.nbytes else None,
        saves_bytes=saves_bytes,
        moved=usual,
        moved_clipping=link_bytes(inputs, placement, budgets, sites, clips=True),
    )


# -- description for the log -------------------------------------------------------------------------------------------


def _rank(cut: RankPartition) -> str:
    return "" if cut.whole else f": what rank {cut.index} of {cut.count} keeps"


def _between_ranks(peers: PeerFacts, layout: StorageLayout) -> list[str]:
    """Return the log's line about the ranks from which weights are gathered; empty if there is one rank."""
    if peers.cut.whole:
        return []
    if peers.sharing == "transfers":
        each = format_bytes(layout.arena.shared)
        return [
            f"  ranks        {peers.cut.count} on this machine; slices pass through RAM that they share ({each} each)"
        ]
    if peers.sharing == "weights":
        every = format_bytes(sum(unit.full.home_bytes for unit in layout.units))
        return [f"  ranks        {peers.cut.count} on this machine; one copy of the weights in RAM ({every} for all)"]
    if peers.near is None:
        return [f"  ranks        weights come from all {peers.cut.count} (ZeRO-3)"]
    near = 1 if peers.near is None else peers.near.count
    said = f"then from {near} of them (hpZ)" if near > 1 else "then from the rank itself (ZeRO-2)"
    kept = format_bytes(layout.arena.secondary)
    return [f"  ranks        weights come from all {peers.cut.count} once a step, {said}: {kept} of copies in RAM"]


def _share(held_bytes: int, held: int, count: int) -> str:
    """Return the log's words about the units that have a state in RAM, if other units have it on NVMe; '' if none."""
    return f", {format_bytes(held_bytes)} of it in RAM ({held} of {count} units)" if held else ""


def _resident(placement: StatePlacement, budgets: Budgets, layout: StorageLayout) -> list[str]:
    """Return the log's line about the units that are kept and updated on the device; empty if there are none."""
    count = len(placement.optimizer.resident)
    units, nbytes = f"{count} of {layout.trained_count} units", format_bytes(budgets.resident_bytes)
    if not count:
        return []
    if placement.weights.resident:
        return [f"    {units} stay on the device and are updated there: {nbytes} with their gradients"]
    return [f"    the states of {units} stay on the device and are updated there: {nbytes} with memory for updates"]


def _gradients(placement: StatePlacement, budgets: Budgets, layout: StorageLayout) -> str:
    accumulation = "any number of micro-batches" if placement.accumulates else "one backward pass per step"
    if placement.gradients.tier == "nvme":
        passes = "" if placement.form.gradient_fp32 else "of one backward pass "
        held = f"{passes}those of {len(placement.gradients.in_ram)} of {layout.trained_count} units in RAM"
        accumulation += f"; {held}, and a window of {format_bytes(budgets.landing_bytes)}"
    size = format_bytes(layout.arena.gradients + budgets.landing_bytes)
    fp32 = "fp32, " if placement.form.gradient_fp32 else ""
    return f"{placement.gradients.tier:<7}{size:>12}  ({fp32}{accumulation})"


def _encoded(layout: StorageLayout) -> str:
    """Return the log's words about encoded weights: their number and their form; '' if no weights are encoded at
    home."""
    groups = [group.group for unit in layout.units for group in unit.groups if group.group.codec]
    if not groups:
        return ""
    codecs = " and ".join(sorted({name_of(group.codec) for group in groups if group.codec}))
    numel = sum(group.values_numel for group in groups)
    return f", {numel / 1e6:.1f} M frozen weights as {codecs} in {format_bytes(layout.encoded_bytes)}"


def _saving(forecast: TrafficForecast) -> list[str]:
    """Return the log's line about the bytes that a step would save if its number of passes were known."""
    saved = forecast.saves_bytes
    return [f"    with accumulation_steps=1 a step would move {format_bytes(saved)} less"] if saved > 0 else []


def _swap(swap: SwapBytes, placement: StatePlacement) -> str:
    """Return the size of the swap file and the sizes of its parts, as words for the log."""
    others = {
        (False, False): "",
        (True, False): " and earlier generations",
        (False, True): " and pinned generations",
        (True, True): ", earlier and pinned generations",
    }
    parts = {
        "of states": swap.states,
        f"of free copies{others[placement.keep > 1, placement.pins > 0]}": swap.further_copies,
        "for gradients": swap.scratch,
    }
    said = " + ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)
    return f"{format_bytes(swap.nbytes)}{f' = {said}' if said else ''}"


def _commits(placement: StatePlacement) -> str:
    if not placement.commit_every:
        return f"{placement.commits}: a run that is killed must start again from a saved model"
    pins = f" and {placement.pins} pinned at most" if placement.pins else ""
    copies = placement.keep + placement.pins + 1
    kept = f"{placement.keep} kept{pins}"
    return f"{placement.commits}, {kept}, each state in {copies} copies: all of it reserved now"


def _activations(placement: StatePlacement, budgets: Budgets) -> str:
    kept = "the inputs of blocks, which are recomputed" if placement.recompute else "all that a forward keeps"
    if budgets.activation_bytes:
        kept += f", through {format_bytes(budgets.activation_bytes)} of RAM"
    if placement.activations == "nvme" and budgets.limits.away:
        kept += f"; each pass writes {format_bytes(budgets.limits.away)}, which wears the drives"
    return f"{_RESTS[placement.activations]:<8}{kept}"


def _updates(placement: StatePlacement, budgets: Budgets) -> str:
    updates = placement.updates
    text = f"{_OVERLAP[updates.overlap]} (overlap: {updates.overlap})"
    if budgets.staging.ahead_bytes:
        text += f", {format_bytes(budgets.staging.ahead_bytes)} to read states ahead"
    if budgets.shadow_bytes:
        text += f", {format_bytes(budgets.shadow_bytes)} for that or for new values"
    return f"{text}; {updates.reason}" if updates.reason else text
