"""A step of training, as far as it is known before the plan is made: tokens, computation, and rates of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.errors import ConfigError
from infinity.state.machine_rates import MachineRates
from infinity.state.model_shape import ModelShape

_LOGITS_BYTES = 1 << 30
"""Upper bound of the bytes of memory for a loss that is computed in chunks.

The logits of one chunk are in memory in fp32, with their gradients.
"""
_MOVING_BLOCKS = 3


@dataclass(frozen=True)
class BatchShape:
    """The batch of one step: sequences per micro-batch, their length, micro-batches per pass, and passes per step."""

    sequences: int
    length: int
    micro_batches: int = 1
    passes: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens in a micro-batch."""
        return self.sequences * self.length

    @property
    def count(self) -> int:
        """Number of micro-batches in a step."""
        return self.micro_batches * self.passes


@dataclass(frozen=True)
class StepWork:
    """The computation of a step.

    Attributes:
        flops: FLOPs of forward and backward of all micro-batches.
        forward_flops: FLOPs of the forward of all micro-batches, without recomputation.
        tokens: tokens of all micro-batches of this process.
        landings: number of times that a gradient of each parameter lands in one step.
        peak_bytes: maximum bytes of device memory that a step needs in addition to slots. These include the activations
            that are kept between forward and backward, for all micro-batches of a pass.
        block_bytes: bytes of `peak_bytes` that the backward of one block needs, or the loss if this is more.
        loss_bytes: bytes that the loss needs.
        moved_bytes: bytes that leave the device in the forwards and come back in the backwards; 0 if activations stay.
        away_bytes: bytes of `moved_bytes` that are away at the same time.
        looked_up: names of the parameters by which no activations are multiplied.
        token_tiles: number of tiles of tokens in which the norms and MLPs of the blocks run.
    """

    flops: float
    forward_flops: float
    tokens: int
    landings: int
    peak_bytes: int
    block_bytes: int = 0
    loss_bytes: int = 0
    moved_bytes: int = 0
    away_bytes: int = 0
    looked_up: frozenset[str] = frozenset()
    token_tiles: int = 1


@dataclass(frozen=True)
class StepFacts:
    """Facts about a step that a caller knows.

    Attributes:
        batch: the batch.
        rates: rates of the machine; None: a run on one device measures them (plan/local_rates.py).
        clips: whether gradients are clipped in most steps.
    """

    batch: BatchShape
    rates: MachineRates | None = None
    clips: bool = False


def facts_of(tokens: int | StepFacts | None, passes: int) -> StepFacts | None:
    """Return the facts about a step for the argument `tokens` of infinity.offload.

    Args:
        tokens: number of tokens in a micro-batch, all the facts, or None.
        passes: backward passes before a step.

    Raises:
        ConfigError: the number of tokens is not valid.
    """
    if tokens is None or isinstance(tokens, StepFacts):
        return tokens
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"tokens must be a whole number of at least 1, or None, not {tokens!r}")
    return StepFacts(BatchShape(1, tokens, passes=passes))


@dataclass(frozen=True)
class TrainingStep:
    """A step of a model. Attributes: shape: the sizes of the model; facts: the batch and the machine."""

    shape: ModelShape
    facts: StepFacts

    def work(self, *, recompute: bool, vertical: bool, away: float = 0.0) -> StepWork:
        """Return the computation of a step; the arguments are those of work_of."""
        return work_of(self.shape, self.facts.batch, recompute=recompute, vertical=vertical, away=away)


def work_of(shape: ModelShape, batch: BatchShape, *, recompute: bool, vertical: bool, away: float = 0.0) -> StepWork:
    """Return the computation of a model's step, and the device memory of its activations.

    Args:
        shape: the sizes of the model.
        batch: the batch.
        recompute: whether the backward computes each block again.
        vertical: whether all micro-batches of a pass go through a block before the next block.
        away: bytes of activations for which RAM or NVMe has room. Those of three blocks are on the device all the same:
            one leaves, one comes back and one is used (tiers/activations.py).
    """
    attention = 2.0 * batch.length * shape.attention * shape.blocks
    once = (2 * shape.products + attention) * batch.tokens * batch.count
    again = once if recompute else 0.0
    backward = again + (2 * shape.products + 2 * shape.trained + 2 * attention) * batch.tokens * batch.count
    there = batch.micro_batches if vertical else 1
    block, tokens = shape.block, batch.tokens
    of_block = (block.boundary if recompute else block.kept).of(tokens)
    logits = min(_LOGITS_BYTES, 8 * tokens * shape.words)
    # the backward of the last block runs after the backward of the loss
    kept = of_block * shape.blocks * there
    at_once = max(logits, block.peak.of(tokens) - (0 if recompute else of_block))
    peak = at_once + max(kept - away, min(kept, _MOVING_BLOCKS * of_block))
    return StepWork(
        flops=once + backward,
        forward_flops=once,
        tokens=batch.tokens * batch.count,
        landings=batch.count,
        peak_bytes=round(peak),
        block_bytes=round(at_once),
        loss_bytes=logits,
        moved_bytes=round(min(away, kept) / there * batch.count),
        away_bytes=round(min(away, kept)),
        looked_up=shape.looked_up,
    )
