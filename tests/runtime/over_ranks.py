"""A model that several ranks train, compared with one process that has all their batches."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.runtime import micro_batches
from infinity.sharded import rank_agreement
from infinity.tiers import activations
from tests.mixture import Mixture
from tests.ranks.workers import run

WIDTH, DEPTH, TOKENS = 96, 3, 8
DEVICE = "cpu"
"""Device of the model and of its batches."""


class Block(nn.Module):
    """A block. With `times` = 8, the block has more than two slices of the smallest slice size for which partial sums
    are complete.

    Args:
        times: inner width, in multiples of the outer width.
        experts: number of experts of a mixture; 0: no mixture.
    """

    def __init__(self, dtype: torch.dtype, times: int, *, recomputed: bool, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, times * WIDTH, dtype=dtype)
        self.down = nn.Linear(times * WIDTH, WIDTH, dtype=dtype)
        self.mixture = Mixture(WIDTH, inner=WIDTH, experts=experts, shared=True).to(dtype) if experts else nn.Identity()
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self._mix, x, use_reentrant=False) if self.recomputed else self._mix(x))

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(self.mixture(x)))))


class Blocks(nn.Module):
    """Blocks, an input layer of the first block's width, and a second head, which only some batches use.

    Args:
        times: argument `times` of each Block; empty: some blocks of the same size.
        frozen: whether the first block is frozen.
        norms: whether the matrices of all blocks are frozen, so that of a block only the norm is trained.
        twice: whether the second block is used once more at the end.
        experts: number of experts of the mixture in each block, which are apart; 0: no mixtures.

    Attributes:
        skips: index of a block that is skipped.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        times: Sequence[int] = (),
        recomputed: bool = False,
        frozen: bool = False,
        norms: bool = False,
        twice: bool = False,
        seed: int = 0,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.twice, self.skips = twice, -1
        torch.manual_seed(seed)
        widths = times or (8,) * DEPTH
        self.blocks = nn.ModuleList(Block(dtype, each, recomputed=recomputed, experts=experts) for each in widths)
        self.head = nn.Linear(WIDTH, 1, dtype=dtype)
        self.other = nn.Linear(WIDTH, 1, dtype=dtype)
        if frozen:
            self.blocks[0].requires_grad_(False)
        for block in self.blocks if norms else ():
            block.requires_grad_(False)
            block.norm.requires_grad_(True)

    def forward(self, x: torch.Tensor, *, both: bool = False) -> torch.Tensor:
        for index, block in enumerate((*self.blocks, self.blocks[1]) if self.twice else self.blocks):
            x = x if index == self.skips else block(x)
        y = self.head(x) + self.other(x) if both else self.head(x)
        return y.float().square().mean()


def batch(step: int, index: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(TOKENS, WIDTH, generator=made).to(dtype).to(DEVICE)


def digest(parameter: torch.Tensor) -> str:
    return hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def offloaded(folder: str, config: dict[str, Any], dtype: torch.dtype = torch.float32, **model: Any) -> nn.Module:
    memory = {"memory": {"host": "256MiB", "device": "64MiB"}}
    paths = {"nvme": {"paths": [folder]}} if "nvme" in config.values() else {}
    return infinity.offload(Blocks(dtype, **model), {"commit_every": 0, **memory, **paths, **config}, device=DEVICE)


def train(
    folder: str,
    config: dict[str, Any],
    micro: int,
    ranks: int,
    *,
    steps: int = 3,
    dtype: str = "float32",
    some: bool = False,
    disturbed: bool = False,
    cleared: bool = False,
    vertical: bool = False,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[float], list[float], dict[str, str]]:
    """Return the losses of this process, the norms, and the final weights. A process without other ranks uses the
    batches of all ranks.

    Args:
        folder: swap directory.
        config: swap config.
        micro: micro-batches of a step on each rank.
        ranks: number of ranks whose batches are trained on.
        steps: number of steps.
        dtype: torch's name for the dtype of the model.
        model: arguments of Blocks.
        some: the second head is used only by some batches, drawn at random, and by none in the second step.
        cleared: after each step there is a backward pass whose gradients are set to None by hand.
        vertical: with several ranks, infinity.backward takes all micro-batches of a rank.
        disturbed: before each step there is an evaluation, and a backward pass whose gradients are discarded.
        **options: options of the optimizer.
    """
    several = dist.is_initialized()
    rank = dist.get_rank() if several else 0
    kind = getattr(torch, dtype)
    trained = offloaded(folder, config, kind, **(model or {}))
    optim = infinity.AdamW(trained.parameters(), lr=1e-2, **options)
    losses, norms = [], []
    for step in range(steps):
        if disturbed:
            with torch.no_grad():
                losses.append(trained(batch(step, 77, kind)).item())
            trained(batch(step, 78, kind)).backward()
            optim.zero_grad()
        indices = range(rank, micro * ranks, ranks) if several else range(micro * ranks)

        def loss_of(index: int, step: int = step) -> torch.Tensor:
            drawn = random.Random(100 * step + index).random() < 0.4
            loss: torch.Tensor = trained(batch(step, index, kind), both=some and drawn and step != 1)
            return loss

        if vertical and several:
            losses += [loss.item() for loss in infinity.backward(trained, loss_of, indices)]
        else:
            for index in indices:
                loss = loss_of(index)
                loss.backward()
                losses.append(loss.item())
        if not several:
            optim.grad_scale = torch.tensor(float(ranks))  # ranks average gradients, micro-batches are summed
        optim.step()
        vars(optim).pop("grad_scale", None)
        optim.zero_grad()
        norms.append(optim.last_grad_norm)
        if cleared:  # clears gradients by hand: the pass must not affect the next step
            trained(batch(step, 79, kind), both=step % 2 == 0).backward()
            for parameter in trained.parameters():
                parameter.grad = None
    assert (micro_batches._known[trained].chain is not None) == (vertical and several)
    with infinity.gathered(trained, trained):
        weights = {name: digest(parameter) for name, parameter in trained.named_parameters()}
    infinity.close(trained)
    return losses, norms, weights


def on_rank(folder: str, config: dict[str, Any], micro: int, ranks: int, options: dict[str, Any]) -> Any:
    activations.PIECE_BYTES_MIN = 256  # the process of this rank trains nothing else
    return train(folder, config, micro, ranks, **options)


def require_equal(tmp_path: Path, config: dict[str, Any], micro: int, ranks: int, **options: Any) -> None:
    losses, norms, weights = train(str(tmp_path / "one"), config, micro, ranks, **options)
    for rank, (mine, same, found) in enumerate(
        run(ranks, on_rank, str(tmp_path / "all"), config, micro, ranks, options)
    ):
        assert mine == losses[rank::ranks]
        assert same == norms
        assert found == weights


def alone(folder: str, config: dict[str, Any], micro: int, options: dict[str, Any]) -> Any:
    rank_agreement.Ranks.of_world = functools.partial(rank_agreement.Ranks.of_world, even_alone=True)  # type: ignore[method-assign]
    return train(folder, config, micro, 1, **options)


TIERS = [
    {"weights": "host", "optimizer": "host"},
    {"weights": "host", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "host"},
    {"weights": "nvme", "optimizer": "nvme"},
    {"weights": "host", "optimizer": "nvme", "activations": "nvme"},
    {"weights": "host", "optimizer": "nvme", "ranks": {"wire": "gloo"}},
]
