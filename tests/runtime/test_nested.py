"""Models whose weights are used in other ways than by calls of the blocks of one list: lists of lists, blocks that are
called by a method other than `forward`, weights that another module reads. They train and evaluate like plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.state import discover
from tests import family_search, sampling
from tests.families import FAMILIES
from tests.runtime.alike import assert_trains_and_evaluates_alike, tight

WIDTH = 32
Checkpointing = bool | None
"""Mode of torch.utils.checkpoint: reentrant, non-reentrant, or none."""


class Shape(nn.Module):
    """A model of one shape, from its parts: `build` makes them, `run` uses them."""

    together = 2
    """Units that are needed at once: one whose backward runs, one to fetch, or to recompute, beside it."""

    def __init__(self, reentrant: Checkpointing) -> None:
        super().__init__()
        self._reentrant = reentrant
        self.build()
        self.head = nn.Linear(WIDTH, 4)

    def build(self) -> None:
        raise NotImplementedError

    def run(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def part(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Compute a part of `run`, checkpointed if the model asks for that."""
        if self._reentrant is None or not self.training:
            return function(x)
        return checkpoint(function, x, use_reentrant=self._reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._reentrant and torch.is_grad_enabled():
            x = x.detach().requires_grad_()  # else the reentrant kind has nothing to differentiate
        return self.head(self.run(x)).square().mean()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class ListOfLists(Shape):
    def build(self) -> None:
        self.stages = nn.ModuleList(nn.ModuleList([linear(), linear()]) for _ in range(3))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = x + self.part(lambda y, layer=layer: torch.tanh(layer(y)), x)
        return x


class ThreeDeep(Shape):
    """With an empty list, and blocks of different sizes."""

    def build(self) -> None:
        self.stages = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([linear(), nn.LayerNorm(WIDTH)]), nn.ModuleList()]) for _ in range(6)
        )

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for (inner, norm), _ in self.stages:
            x = x + self.part(lambda y, a=inner, b=norm: torch.tanh(a(b(y))), x)
        return x


class DictInAList(Shape):
    def build(self) -> None:
        self.stages = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": linear()}) for _ in range(5))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = x + self.part(lambda y, s=stage: torch.tanh(s["up"](s["norm"](y))), x)
        return x


class ListInADict(Shape):
    def build(self) -> None:
        self.sides = nn.ModuleDict({side: nn.ModuleList(linear() for _ in range(3)) for side in ("left", "right")})

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for side in ("right", "left"):
            for layer in self.sides[side]:
                x = x + self.part(lambda y, layer=layer: torch.tanh(layer(y)), x)
        return x


class SequentialsInAList(Shape):
    """Their parts are called, the sequential modules themselves are not."""

    def build(self) -> None:
        self.stages = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(6))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = self.part(layer, x)
        return x


class Downs(Shape):
    """A part of a model like diffusion models have it: attention lists beside lists of blocks, and
    one block between."""

    class Level(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleList([linear(), linear()])
            self.attn = nn.ModuleList([nn.LayerNorm(WIDTH)])
            self.downsample = linear()

    def build(self) -> None:
        self.downs = nn.ModuleList(Downs.Level() for _ in range(3))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for level in self.downs:
            for block in level.block:
                x = x + self.part(lambda y, f=block, norm=level.attn[0]: torch.tanh(f(norm(y))), x)
            x = level.downsample(x)
        return x


class MethodBlock(nn.Module):
    """Has a forward that nobody calls, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called by `encode` only")

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x * self.scale))


class CalledByAMethod(Shape):
    def build(self) -> None:
        self.blocks = nn.ModuleList(MethodBlock() for _ in range(6))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.part(block.encode, x)
        return x


class PartsOfABlock(Shape):
    """The model calls the parts of its blocks, and a weight of the block itself it reads."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(MethodBlock() for _ in range(6))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.part(lambda y, b=block: torch.tanh(b.inner(y) * b.scale), x)
        return x


class WeightOfAnother(Shape):
    """Each block multiplies by a weight of the one before it, the last one by that of a large module outside."""

    together = 3

    def build(self) -> None:
        self.blocks = nn.ModuleList(linear() for _ in range(6))
        self.table = nn.Embedding(WIDTH, WIDTH)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block, other in zip(self.blocks, [self.table, *self.blocks][:6], strict=True):
            x = x + self.part(lambda y, b=block, o=other: torch.tanh(F.linear(b(y), o.weight.t())), x)
        return x @ self.table.weight[:, :WIDTH]


class ListOfParameters(Shape):
    together = 6  # the list is the largest unit, and needs its room in one piece

    def build(self) -> None:
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(6))
        self.blocks = nn.ModuleList(linear() for _ in range(6))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for factor, block in zip(self.factors, self.blocks, strict=True):
            x = x + self.part(lambda y, f=factor, b=block: torch.tanh(b(y @ f)), x)
        return x


class ListsOfParameters(Shape):
    """In a list of blocks: containers without a forward."""

    def build(self) -> None:
        self.stages = nn.ModuleList(
            nn.ModuleList([linear(), nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])]) for _ in range(6)
        )
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(WIDTH))})

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block, (factor,) in self.stages:
            x = x + self.part(lambda y, f=factor, b=block: torch.tanh(b(y) * f + self.named["shift"]), x)
        return x


class Pair(nn.ModuleList):
    """A container with a parameter of its own, and no forward."""

    def __init__(self) -> None:
        super().__init__([linear(), linear()])
        self.gate = nn.Parameter(torch.ones(WIDTH))


class ContainersWithParameters(Shape):
    def build(self) -> None:
        self.pairs = nn.ModuleList(Pair() for _ in range(3))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            for layer in pair:
                x = x + self.part(lambda y, f=layer, gate=pair.gate: torch.tanh(f(y)) * gate, x)
        return x


class SharedAmongLists(Shape):
    """One module in two lists, and one weight in two modules."""

    def build(self) -> None:
        shared, first, second = linear(), linear(), linear()
        second.weight = first.weight
        stages = [[shared, first], [linear(), shared], [second, linear()], [linear(), linear()]]
        self.stages = nn.ModuleList(nn.ModuleList(stage) for stage in stages)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = x + self.part(lambda y, layer=layer: torch.tanh(layer(y)), x)
        return x


SHAPES = [
    ListOfLists,
    ThreeDeep,
    DictInAList,
    ListInADict,
    SequentialsInAList,
    Downs,
    CalledByAMethod,
    PartsOfABlock,
    WeightOfAnother,
    ListOfParameters,
    ListsOfParameters,
    ContainersWithParameters,
    SharedAmongLists,
]


def made(shape: type[Shape], reentrant: Checkpointing = None) -> Shape:
    torch.manual_seed(0)
    return shape(reentrant)


@pytest.fixture(autouse=True)
def _small_modules_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the blocks, too, as in a model of real size: what is in the unit that stays is always there."""
    monkeypatch.setattr(discover, "_OWN_UNIT_BYTES", 1)


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.covering(strength=1, most=5)
def test_every_shape_trains_and_evaluates_like_torch(
    shape: type[Shape], reentrant: Checkpointing, offload: Any
) -> None:
    batch = {"x": torch.randn(4, WIDTH)}
    assert_trains_and_evaluates_alike(lambda: made(shape, reentrant), batch, offload, together=shape.together)


WITHOUT_CHECKPOINTING = {
    "bridgetower",
    "chameleon",
    "dac",
    "emu3",
    "encodec",
    "funnel",
    "glpn",
    "jetmoe",
    "layoutlmv3",
    "mask2former",
    "perceiver",
    "poolformer",
    "pvt",
    "qwen2_5_omni",
    "reformer",
    "xcodec",
}
"""transformers has none for them."""
NOT_REENTRANT = {"evolla", "deberta_v2"}
"""Nor has plain torch: each checkpointed part would run the backward of one part outside again."""

KEPT = [(family, None) for family in FAMILIES]
RECOMPUTED = [
    (family, reentrant)
    for family in FAMILIES
    for reentrant in (True, False)
    if family not in WITHOUT_CHECKPOINTING and not (reentrant and family in NOT_REENTRANT)
]
SAMPLE = [("pvt", None), ("prophetnet", None), ("florence2", False), ("deberta", True)]
CASES = [*SAMPLE, *sampling.some([case for case in KEPT + RECOMPUTED if case not in SAMPLE])]


@pytest.mark.covering(most=2)
@pytest.mark.parametrize(("family", "reentrant"), CASES)
def test_every_family_trains_and_evaluates_like_torch(family: str, reentrant: Checkpointing, offload: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model, _ = FAMILIES[family]()
        if reentrant is not None:
            getattr(model, "inner", model).gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    _, batch = FAMILIES[family]()
    assert_trains_and_evaluates_alike(build, batch, offload)


class Clamped(ListOfLists):
    """Writes to a weight before it is used, as RWKV does when it evaluates."""

    clamps = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.clamps:
                self.stages[2][1].weight.clamp_(-0.01, 0.01)
        return super().forward(x)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_forward_that_writes_to_a_released_weight_is_refused(mode: Callable[[], Any], offload: Any) -> None:
    """The change would be gone with the slot, and what was computed before it would differ from what comes after. As
    the error says, it is made between the passes."""
    model, plain = made(Clamped), made(Clamped)
    model = offload(model, memory=tight(model))
    with (
        mode(),
        pytest.raises(infinity.ModelError, match="clamp_ writes to parameter 'stages.2.1.weight' in a forward"),
    ):
        model(torch.randn(4, WIDTH))
    infinity.close(model)
    model = made(Clamped)
    model.clamps = False
    model = offload(model, memory=tight(model))
    with infinity.gathered(model, model.stages[2][1], write=True), torch.no_grad():
        model.stages[2][1].weight.clamp_(-0.01, 0.01)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(4, WIDTH)), plain(torch.ones(4, WIDTH)))


class ClampedLater(ListOfLists):
    """Writes to a weight that its own module has just used."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages[0][0](x)
        with torch.no_grad():
            self.stages[0][0].weight.clamp_(-0.01, 0.01)
        return super().run(x)


def test_a_write_to_a_weight_that_is_there_is_noticed_before_it_is_given_up(offload: Any, computes_on: Any) -> None:
    """On a device, where what was used rests, by the write itself."""
    found = "was changed outside" if computes_on is None else "the change would be lost"
    model = made(ClampedLater)
    model = offload(model, memory=tight(model))
    for _ in range(2):
        with torch.no_grad(), pytest.raises(infinity.ModelError, match=f"'stages.0.0.weight'.*{found}"):
            model(torch.randn(4, WIDTH))


ELSEWHERE = {
    "higgs_audio_v2_tokenizer": "a codec like xcodec, with the same quantizers",
    "layoutlmv2": "needs detectron2",
    "sam3_lite_text": "the class without a forward is a base of others, which have one",
}
"""Families that the search finds and that are not trained here."""


@pytest.mark.skipif(not sampling.SHARE, reason="reads every modeling file: make test-all")
def test_the_families_that_a_search_finds_are_here() -> None:
    found = set().union(*family_search.search().values())
    assert found <= FAMILIES.keys() | ELSEWHERE.keys()
    assert ELSEWHERE.keys() <= found - FAMILIES.keys()
