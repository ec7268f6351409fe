"""The plan: where each state of the model lives and what that costs. Made once, before anything is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infinity import _native
from infinity.sizes import format_bytes

Overlap = Literal["auto", "during_backward", "before_forward", "off"]


@dataclass(frozen=True)
class SwapBytes:
    """Bytes of the swap file.

    Attributes:
        states: one slot of each state that has a place there.
        further_slots: the others, which hold earlier generations or are free for what is written next.
        gradients: that spill.
    """

    states: int
    further_slots: int
    gradients: int

    @property
    def nbytes(self) -> int:
        return self.states + self.further_slots + self.gradients


@dataclass(frozen=True)
class Plan:
    """What was decided.

    Attributes:
        device: where the model computes.
        weights, optimizer: resolved tiers (device | host | nvme); nvme where only some are in RAM.
        weights_in_ram, states_in_ram: the units, by index, whose weights, or optimizer states, are in host memory for
            good.
        gradients: host, or nvme where some spill; `gradients_in_ram` are the units whose wait in RAM.
        activations: resolved (keep | recompute).
        master: of bf16 weights.
        moments: how exp_avg and exp_avg_sq are kept, where they may be.
        stored: which of exp_avg and exp_avg_sq there are.
        commit_every: steps between durable generations; 0: none, states are updated in place.
        keep: generations that stay.
        overlap: when updates run (auto | during_backward | before_forward | off), resolved where it is not possible.
        spare_units: indices of the units that have another slot for early updates although no generations are kept.
        shadow_bytes: host memory for the new weights of early updates, where the weights live in RAM; lent to the
            staging while none begins early.
        gradient_fp32: the host memory reserved for gradients has room for fp32.
        slot_bytes: device memory for fetched weights.
        staging_bytes: host memory for the tiles of the update, `tile_numel` elements in `tile_bytes` each;
            `ahead_bytes` more, so that states are read before the step is decided.
        upload_bytes: host memory that reads land in before they are copied to a GPU.
        unit_count, trained_count: units, and those of them that have optimizer states.
        weight_bytes, state_bytes: of the whole model, in whatever tier. `state_bytes` is the optimizer's: residual and
            moments.
        gradient_bytes: host memory for the gradients that wait there; `landing_bytes` for those that spill, on their
            way.
        weight_ram_bytes, state_ram_bytes: of those in RAM.
        host_bytes: what the plan takes of the host's budget.
        device_budget, host_budget: the budgets.
        swap: what the swap file is made of.
        step_read_bytes, step_written_bytes: predicted NVMe traffic of one step of `accumulation_steps` micro-batches,
            when the step before had as many; every moment there is room for is used. An upper bound of what is read:
            gradients that are still in the window when the next pass adds to them are not. Over `commit_every` steps,
            what a commit writes beside is shared out.
        overlap_reason: why updates do not begin early, or not all, where they might.
        accumulation_steps: backward passes before a step that were planned for.
        swap_rate: bytes per second of the disks together, half reads and half writes, as infinity-bench measured;
            None where it has not.
    """

    device: str
    weights: str
    optimizer: str
    weights_in_ram: frozenset[int]
    states_in_ram: frozenset[int]
    gradients: str
    gradients_in_ram: frozenset[int]
    activations: str
    master: _native.MasterName
    moments: _native.MomentsName
    stored: tuple[str, ...]
    commit_every: int
    keep: int
    overlap: Overlap
    spare_units: frozenset[int]
    shadow_bytes: int
    gradient_fp32: bool
    numel: int
    trainable_numel: int
    unit_count: int
    trained_count: int
    weight_bytes: int
    state_bytes: int
    weight_ram_bytes: int
    state_ram_bytes: int
    gradient_bytes: int
    landing_bytes: int
    slot_bytes: int
    staging_bytes: int
    ahead_bytes: int
    upload_bytes: int
    tile_numel: int
    tile_bytes: int
    threads: int
    host_bytes: int
    device_budget: int
    host_budget: int
    swap: SwapBytes
    step_read_bytes: int
    step_written_bytes: int
    swap_rate: float | None = None
    overlap_reason: str = ""
    accumulation_steps: int = 1

    @property
    def accumulates(self) -> bool:
        """Several backward passes may add up before a step."""
        return self.gradient_fp32 or self.landing_bytes > 0

    @property
    def shares_memory(self) -> bool:
        """Whether the model computes in host memory."""
        return self.device == "cpu"

    @property
    def swap_bytes(self) -> int:
        """Size of the swap file."""
        return self.swap.nbytes

    @property
    def device_bytes(self) -> int:
        """What the plan takes of the device's budget. Weights in RAM are used where they are by a device that shares
        it."""
        return 0 if self.shares_memory and self.weights == "host" else self.slot_bytes

    @property
    def step_bytes(self) -> int:
        """Predicted NVMe traffic of one step, both directions."""
        return self.step_read_bytes + self.step_written_bytes

    @property
    def step_io_s(self) -> float | None:
        """Predicted seconds of I/O per step; None where the disks were not measured."""
        return None if self.swap_rate is None else self.step_bytes / self.swap_rate

    @property
    def arena_bytes(self) -> int:
        """Exact size of the one pinned allocation."""
        on_device = self.slot_bytes if self.shares_memory and self.weights == "nvme" else 0
        held = self.weight_ram_bytes + self.state_ram_bytes
        held += self.shadow_bytes + self.gradient_bytes + self.landing_bytes
        return held + self.staging_bytes + self.ahead_bytes + self.upload_bytes + on_device

    @staticmethod
    def _describe_share(tier: str, held_bytes: int, held: int, count: int) -> str:
        """How much of what is on NVMe is in RAM all the same; '' where that is nothing."""
        if tier != "nvme" or not held:
            return ""
        return f", {format_bytes(held_bytes)} of it in RAM ({held} of {count} units)"

    def _describe_generations(self) -> str:
        if not self.commit_every:
            return "none (commit_every: 0): a run that dies starts again from a saved model"
        when = "every step" if self.commit_every == 1 else f"every {self.commit_every} steps"
        return f"{when}, {self.keep} kept, each state in {self.keep + 1} slots: all of it reserved now"

    def _describe_swap(self) -> str:
        """What the swap file is made of; the parts add up to it."""
        parts = {
            "of states": self.swap.states,
            "of free slots" if self.keep == 1 else "of free slots and earlier generations": self.swap.further_slots,
            "for gradients": self.swap.gradients,
        }
        said = " + ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts.items() if nbytes)
        return f"{format_bytes(self.swap_bytes)}{f' = {said}' if said else ''}"

    def _describe_gradients(self) -> str:
        accumulation = "any number of micro-batches" if self.accumulates else "one backward pass per step"
        if self.gradients == "nvme":
            passes = "" if self.gradient_fp32 else "of one backward pass "
            held = f"{passes}those of {len(self.gradients_in_ram)} of {self.trained_count} units in RAM"
            accumulation += f"; {held}, and a window of {format_bytes(self.landing_bytes)}"
        size = format_bytes(self.gradient_bytes + self.landing_bytes)
        fp32 = "fp32, " if self.gradient_fp32 else ""
        return f"{self.gradients:<7}{size:>12}  ({fp32}{accumulation})"

    def _describe_overlap(self) -> str:
        texts = {
            "auto": "during backward as long as that turns out right, else before the next forward",
            "during_backward": "during backward, redone where the step decides otherwise",
            "before_forward": "from the step on, before each unit's next use",
            "off": "in the step",
        }
        text = f"{texts[self.overlap]} (overlap: {self.overlap})"
        if self.ahead_bytes:
            text += f", {format_bytes(self.ahead_bytes)} to read states ahead"
        if self.shadow_bytes:
            text += f", {format_bytes(self.shadow_bytes)} for that or for new weights"
        return f"{text}; {self.overlap_reason}" if self.overlap_reason else text

    def describe(self) -> str:
        """A few lines for the log: every tier, every budget, and what is predicted."""
        predicted = "" if self.step_io_s is None else f", {self.step_io_s:.2f} s at the measured rate"
        per_parameter = self.step_bytes / max(self.trainable_numel, 1)
        return "\n".join(
            [
                f"{self.numel / 1e6:.1f} M parameters, {self.trainable_numel / 1e6:.1f} M trained, on {self.device}",
                f"  weights      {self.weights:<7}{format_bytes(self.weight_bytes):>12}"
                + self._describe_share(self.weights, self.weight_ram_bytes, len(self.weights_in_ram), self.unit_count),
                f"  optimizer    {self.optimizer:<7}{format_bytes(self.state_bytes):>12}  (master {self.master}, "
                f"{self.moments} {' and '.join(self.stored) or 'no moments'})"
                + self._describe_share(
                    self.optimizer, self.state_ram_bytes, len(self.states_in_ram), self.trained_count
                ),
                f"  gradients    {self._describe_gradients()}",
                f"  activations  {self.activations}",
                f"  memory.device {format_bytes(self.device_bytes)} of {format_bytes(self.device_budget)} for "
                f"weights, the "
                "rest for activations",
                f"  memory.host   {format_bytes(self.host_bytes)} of {format_bytes(self.host_budget)}",
                f"  swap file     {self._describe_swap()}; one step moves about "
                f"{format_bytes(self.step_bytes)} "
                f"({per_parameter:.1f} B per trained parameter{predicted})",
                f"  generations   {self._describe_generations()}",
                f"  updates       {self._describe_overlap()}",
            ]
        )
