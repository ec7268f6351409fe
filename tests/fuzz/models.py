"""Random modules, made from a seed. A seed gives the same modules on every machine.

A net is a stem, blocks and a head. The unusual properties of a net are listed in its `traits`.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everywhere
from torch import nn
from torch.nn.utils import parametrizations

from tests.fuzz.parametrized import parametrize_some
from tests.fuzz.recomputed import Around, draw_around
from tests.mixture import Mixture

CLASSES = 5
BATCH, LENGTH = 3, 4


class UserError(Exception):
    """Exception of the user's own code."""


class Mlp(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.norm = rng.choice([nn.LayerNorm, nn.RMSNorm])(width)
        self.up = nn.Linear(width, rng.choice([1, 2, 3]) * width, bias=rng.random() < 0.7)
        self.down = nn.Linear(self.up.out_features, width)
        self.dropout = nn.Dropout(rng.choice([0.0, 0.2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=rng.choice([1, 2]))
        self.norm = rng.choice([nn.BatchNorm1d(width), nn.GroupNorm(2, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.rnn = rng.choice([nn.GRU, nn.LSTM, nn.RNN])(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rnn(x)[0]


class Mixed(nn.Module):
    """An fp32 norm and bf16 matrices."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width).bfloat16()
        self.down = nn.Linear(width, width).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        return x + self.down(torch.relu(self.up(y))).to(x.dtype)


class Direct(nn.Module):
    """Block that reads its child's weights without calling the child, and counts its calls in a buffer."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(F.linear(x, self.inner.weight, self.inner.bias)) * self.scale


class Experts(nn.Module):
    """Experts, one of which is selected by the data."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = int(weights.detach().float().sum((0, 1)).argmax())
        return x + torch.tanh(self.experts[chosen](x)) * weights[..., chosen : chosen + 1]


class Normed(nn.Module):
    """Block with a weight that is computed from two others each time it is read."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Encoder(nn.Module):
    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        norm_first = rng.random() < 0.5
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True, norm_first=norm_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Borrowing(nn.Module):
    """Block that reads the weight of another block."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.lender: list[nn.Linear] = []  # in a list, so that it is not a child module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(torch.tanh(self.own(x)), self.lender[0].weight)


class OtherMethod(Mlp):
    """Block that is called as `block.run(x)`."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return Mlp.forward(self, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("this block is called by another method")


def _linear(rng: random.Random, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def _mixture(rng: random.Random, width: int) -> nn.Module:
    experts, chosen, each = rng.choice([3, 5, 8]), rng.choice([1, 2]), rng.choice([1, 2])
    inner, shared = rng.choice([8, 16]), rng.random() < 0.4
    return Mixture(width, inner=inner, experts=experts, chosen=chosen, each=each, shared=shared)


KINDS: dict[str, Any] = {
    "mlp": Mlp,
    "linear": _linear,
    "attention": Attention,
    "convolution": Convolution,
    "recurrent": Recurrent,
    "mixed": Mixed,
    "direct": Direct,
    "experts": Experts,
    "normed": Normed,
    "encoder": Encoder,
}
NOT_CALLED: dict[str, Any] = {
    "list": lambda rng, width: nn.ModuleList(_linear(rng, width) for _ in range(2)),
    "dict": lambda rng, width: nn.ModuleDict({"a": _linear(rng, width), "b": Mlp(rng, width)}),
    "other method": OtherMethod,
    "borrowing": Borrowing,
}


class Net(nn.Module):
    """A random model.

    Attributes:
        traits: descriptions of the net's parts.
        gates: whether each visit of a block takes place; set from outside.
        around: checkpoints around blocks.
        trained: names of the parameters that are not frozen at the beginning.
        in_pieces: whether one backward pass may deliver the gradient of a parameter in several pieces.
    """

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width = rng.choice([8, 16, 32])
        self.traits: list[str] = []
        self.tokens = rng.random() < 0.5
        self.embed = nn.Embedding(11, width, padding_idx=rng.choice([None, 0])) if self.tokens else nn.Linear(6, width)
        kinds = KINDS | NOT_CALLED
        names = [rng.choice(list(kinds)) for _ in range(rng.randint(1, 5))]
        mixing = random.Random(f"mixture {width} {names}")  # other numbers, so that nets without mixtures stay the same
        if mixing.random() < 0.3:
            names[mixing.randrange(len(names))] = "mixture"
        self.traits += names
        kinds["mixture"] = _mixture
        self.blocks = self._contain(rng, [kinds[name](rng, width) for name in names])
        self.scale = nn.Parameter(torch.ones(width)) if rng.random() < 0.5 else None
        self.norm = nn.LayerNorm(width) if rng.random() < 0.5 else nn.Identity()
        self.head = nn.Linear(width, 11 if self.tokens else CLASSES, bias=rng.random() < 0.5)
        self.visits = list(range(len(names)))
        if rng.random() < 0.25:
            self.visits += [rng.randrange(len(names)) for _ in range(rng.randint(1, 2))]
            self.traits.append(f"visits {self.visits}")
        reentrant = rng.choice([True, False])
        spans = self._spans(rng)
        self.gates = [True] * len(self.visits)
        self._convert(rng, dtype)
        self._tie(rng)
        self._lend(rng)
        self._freeze(rng)
        self.around = draw_around(rng, len(self.visits)) or Around(spans, reentrant)
        shared = len(set(self.visits)) < len(self.visits) or any("tied" in trait for trait in self.traits)
        self.in_pieces = shared and self.around.in_pieces
        self.traits += [str(self.around), *parametrize_some(rng, self)]
        self.trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def _contain(self, rng: random.Random, blocks: list[nn.Module]) -> nn.Module:
        container = rng.choice(["list", "list", "list", "sequential", "attributes"])
        self.traits.append(f"in a {container}" if container != "attributes" else "as attributes")
        if container == "list" or any(isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks):
            return nn.ModuleList(blocks)
        if container == "sequential":
            return nn.Sequential(*blocks)
        holder = nn.Module()  # only the children of the holder are called
        for index, block in enumerate(blocks):
            holder.add_module(f"block{index}", block)
        return holder

    def _spans(self, rng: random.Random) -> list[tuple[int, int, bool]]:
        """Return spans [begin, end) of visits, and for each span whether it is recomputed in the backward."""
        spans, begin, recomputed = [], 0, rng.random() < 0.4
        while begin < len(self.visits):
            end = min(begin + rng.choice([1, 1, 2]), len(self.visits))
            spans.append((begin, end, recomputed and rng.random() < 0.7))
            begin = end
        return spans

    def _tie(self, rng: random.Random) -> None:
        if self.tokens and rng.random() < 0.4:
            self.head.weight = self.embed.weight
            self.traits.append("head tied")
        linears = [module for module in self.blocks.modules() if type(module) is nn.Linear]
        linears = [module for module in linears if "weight" in module._parameters]  # without computed weights
        pairs = [
            (a, b)
            for a in linears
            for b in linears
            if a is not b and (a.weight.shape, a.weight.dtype) == (b.weight.shape, b.weight.dtype)
        ]
        if pairs and rng.random() < 0.3:
            one, other = rng.choice(pairs)
            other.weight = one.weight
            self.traits.append("blocks tied")

    def _lend(self, rng: random.Random) -> None:
        own = [module for module in self.blocks.modules() if isinstance(module, Borrowing)]
        for block in own:
            like = [other.own for other in own if other.own.weight.dtype == block.own.weight.dtype]
            block.lender.append(rng.choice(like))

    def _convert(self, rng: random.Random, dtype: torch.dtype) -> None:
        if rng.random() < 0.3:
            for block in self.blocks.children():
                if rng.random() < 0.5:
                    block.to(torch.bfloat16)
            self.traits.append("mixed dtypes")
        else:
            self.to(dtype)

    def _freeze(self, rng: random.Random) -> None:
        frozen = rng.random() < 0.3
        for name, parameter in self.named_parameters():
            if frozen and not name.startswith("head") and rng.random() < 0.4 and parameter is not self.head.weight:
                parameter.requires_grad_(False)
        if frozen:
            self.traits.append("frozen")

    def batch(self, seed: int) -> torch.Tensor:
        """Return a batch of inputs: ids [batch, length], or numbers [batch, length, 6]."""
        generator = torch.Generator().manual_seed(seed)
        if self.tokens:
            return torch.randint(0, 11, (BATCH, LENGTH), generator=generator)
        return torch.randn(BATCH, LENGTH, 6, generator=generator)

    def _visit(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        blocks = list(self.blocks.children())
        for position in range(begin, end):
            if self.gates[position]:
                x = _call(blocks[self.visits[position]], x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        given = x
        x = self.embed(x) if self.tokens else self.embed(x.to(self.embed.weight.dtype))
        x = self.around.run(self._visit, x)
        x = self.norm(x.to(self.head.weight.dtype))
        if self.scale is not None:
            x = (x * self.scale).to(x.dtype)
        logits = self.head(x).float()
        if self.tokens:
            return F.cross_entropy(logits.flatten(0, 1), given.roll(1, 1).flatten())
        return (logits - given[..., :CLASSES]).square().mean()


def _call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(block, nn.ModuleList | nn.ModuleDict):
        for child in block.children():
            x = _call(child, x)
        return x
    dtype = next(block.parameters()).dtype
    inside = x.to(dtype)
    return (block.run(inside) if isinstance(block, OtherMethod) else block(inside)).to(x.dtype)


def make(seed: int, *, values: int = 0) -> Net:
    """Return a net. `values` is a seed of the weights: with another seed, the same net has other weights."""
    rng = random.Random(f"model {seed}")
    torch.manual_seed(seed * 1000 + values)
    return Net(rng, rng.choice([torch.float32, torch.float32, torch.bfloat16])).train()
