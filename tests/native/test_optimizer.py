"""The arithmetic: the same bits however it is cut, and the numbers torch and float64 give."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from infinity import _native
from tests import sampling

ISAS = _native.supported_isas()
FORMATS = [("fp32", "weight"), ("bf16", "split16"), ("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "none")]
MOMENTS = ["fp32", "bf16", "int8"]
RULES: dict[str, dict[str, float]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    "lion": {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01},
    "adagrad": {"eps": 1e-10, "weight_decay": 0.01, "lr_decay": 0.1, "initial_accumulator": 0.5},
    "sgd": {"beta1": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "sgd without momentum": {"weight_decay": 0.01},
}
USES = {"lion": (True, False), "adagrad": (False, True), "sgd": (True, False), "sgd without momentum": (False, False)}
GRADS = ["fp32", "bf16", "fp16"]
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


class State:
    """Random states of one format."""

    def __init__(self, numel: int, weight: str, master: str, grad: str, moments: str = "fp32", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        full = torch.randn(numel, generator=generator)
        self.names = (weight, master, grad, moments)
        self.weight = torch.empty(numel, dtype=TORCH[weight])
        self.residual: torch.Tensor | None = None
        if master == "split16":
            self.residual = torch.empty(numel, dtype=torch.int16)
            _native.encode_split16(full.numpy(), raw(self.weight), self.residual.numpy())
        else:
            _native.round_weights(full.numpy(), raw(self.weight), weight)
            self.residual = full.clone() if master == "fp32" else None
        self.exp_avg = self._moment(torch.randn(numel, generator=generator) * 0.1, signed=True)
        self.exp_avg_sq = self._moment(torch.rand(numel, generator=generator) * 0.01, signed=False)
        self.grad = torch.randn(numel, generator=generator).to(TORCH[grad])

    def _moment(self, values: torch.Tensor, *, signed: bool) -> torch.Tensor:
        """Return a moment in its stored form: float32 [numel], or uint8 of the format's bytes."""
        if self.names[3] == "fp32":
            return values
        data = torch.zeros(_native.moment_bytes(self.names[3], len(values)), dtype=torch.uint8)
        _native.encode_moments(values.numpy(), self.names[3], is_signed=signed, data=data.numpy())
        return data

    def update(
        self,
        segments: list[_native.Segment],
        threads: int = 1,
        isa: str | None = None,
        uses: tuple[bool, bool] = (True, True),
    ) -> bool:
        weight, master, grad, moments = self.names
        return _native.optimizer_update(
            raw(self.weight),
            None if self.residual is None else raw(self.residual),
            raw(self.exp_avg) if uses[0] else None,
            raw(self.exp_avg_sq) if uses[1] else None,
            raw(self.grad),
            weight_dtype=weight,
            master=master,
            grad_dtype=grad,
            moments=moments,
            segments=segments,
            pool=_native.ThreadPool(threads),
            isa=isa,
        )

    def part(self, begin: int, end: int) -> State:
        """Elements [begin, end); int8 moments only from a multiple of a chunk to another, or to the end."""
        other = State.__new__(State)
        other.names = self.names
        for name in ("weight", "residual", "exp_avg", "exp_avg_sq", "grad"):
            tensor = getattr(self, name)
            stored = name.startswith("exp_avg") and self.names[3] != "fp32"
            first, last = (_native.moment_bytes(self.names[3], at) if stored else at for at in (begin, end))
            setattr(other, name, None if tensor is None else tensor[first:last])
        return other

    def copy(self, numel: int | None = None) -> State:
        """Return a copy of the first elements, or of all."""
        other = State.__new__(State)
        other.names = self.names
        for name in ("weight", "residual", "exp_avg", "exp_avg_sq", "grad"):
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else tensor[:numel].clone())
        return other

    def bits(self) -> list[bytes]:
        tensors = [self.weight, self.residual, self.exp_avg, self.exp_avg_sq]
        return [raw(tensor).tobytes() for tensor in tensors if tensor is not None]

    def master(self) -> torch.Tensor:
        if self.names[1] == "weight":
            return self.weight
        if self.names[1] == "fp32":
            assert self.residual is not None
            return self.residual
        result = torch.empty(self.weight.numel())
        assert self.residual is not None
        _native.decode_split16(raw(self.weight), self.residual.numpy(), result.numpy())
        return result


def segment(begin: int, end: int, step: int = 3, **options: Any) -> _native.Segment:
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01} | options
    return _native.Segment(begin, end, step=step, **values)


def rule_segment(name: str, begin: int, end: int, step: int = 3, **options: Any) -> _native.Segment:
    values: dict[str, Any] = {"lr": 1e-3, "seed": 5} | RULES[name] | options
    return _native.Segment(begin, end, step=step, rule=name.split()[0], **values)


@pytest.mark.covering
@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize(("weight", "master"), FORMATS)
def test_every_isa_thread_count_and_cut_gives_the_same_bits(weight: str, master: str, moments: str, grad: str) -> None:
    numel = 300_003 if moments != "int8" else 2 * _native.CHUNK_NUMEL + 7003
    before = State(numel, weight, master, grad, moments)
    expected = before.copy()
    expected.update([segment(0, numel)], isa="baseline" if "baseline" in ISAS else None)
    for isa, threads in itertools.product(ISAS, (1, 2, 7)):
        state = before.copy()
        cuts = np.sort(np.random.default_rng(threads).integers(0, numel, 9)).tolist()
        if moments == "int8":  # a scale belongs to a whole block, and a tile to whole chunks
            cuts = [_native.CHUNK_NUMEL] if threads == 1 else []
        elif moments == "bf16" or master == "none":  # the index of a cut is that of a block
            cuts = sorted({cut // 256 * 256 for cut in cuts})
        for begin, end in itertools.pairwise([0, *cuts, numel]):
            if begin < end:
                index = begin if moments != "fp32" or master == "none" else 0
                state.part(begin, end).update([segment(0, end - begin, index=index)], threads, isa)
        assert state.bits() == expected.bits(), (isa, threads)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_the_same_bits_on_every_isa_and_leaves_what_it_does_not_use(rule: str, moments: str) -> None:
    numel, uses = 70_001, USES.get(rule, (True, True))
    before = State(numel, "bf16", "split16", "bf16", moments)
    states = [before.copy() for _ in ISAS]
    for state, isa in zip(states, ISAS, strict=True):
        for step in (1, 2, 3):
            assert state.update([rule_segment(rule, 0, numel, step)], 2, isa, uses=uses)
    assert all(state.bits() == states[0].bits() for state in states)
    assert not torch.equal(states[0].weight, before.weight)
    for used, name in zip(uses, ("exp_avg", "exp_avg_sq"), strict=True):
        assert torch.equal(getattr(states[0], name), getattr(before, name)) != used


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize(("weight", "master"), FORMATS)
def test_small_sizes_are_right_on_every_isa(weight: str, master: str, moments: str) -> None:
    for numel in [*range(0, 70), 255, 256, 257, 511, 1000, 4095, 4096, 4097, 4099]:
        before = State(numel, weight, master, "bf16", moments)
        states = [before.copy() for _ in ISAS]
        whole = State(numel + 300, weight, master, "bf16", moments)
        for state, isa in zip(states, ISAS, strict=True):
            state.update([segment(0, numel)], isa=isa)
        assert all(state.bits() == states[0].bits() for state in states), numel
        if moments != "fp32":
            continue
        inside = whole.part(1, numel + 1)  # off the vectors' alignment
        alone = inside.copy()
        rest = whole.part(numel + 1, numel + 300).bits()
        inside.update([segment(0, numel)])
        alone.update([segment(0, numel)])
        assert inside.bits() == alone.bits()
        assert whole.part(numel + 1, numel + 300).bits() == rest


def test_every_size_up_to_4099_is_the_start_of_a_longer_one() -> None:
    sizes = [*range(300), *random.Random(sampling.SEED).sample(range(300, 4100), sampling.number(200, 3800))]
    longest = State(4099, "fp32", "weight", "fp32")
    results = {isa: State(4099, "fp32", "weight", "fp32") for isa in ISAS}
    for isa, state in results.items():
        state.update([segment(0, 4099)], isa=isa)
        for numel in sizes:
            part = longest.copy(numel)
            part.update([segment(0, numel)], isa=isa)
            assert part.bits() == state.part(0, numel).bits(), (isa, numel)


def torch_rule(name: str, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    c = RULES[name]
    decay = c["weight_decay"]
    if name == "adam":
        return torch.optim.Adam([parameter], lr=1e-3, weight_decay=decay, foreach=False)
    if name == "adagrad":
        return torch.optim.Adagrad(
            [parameter], lr=1e-3, lr_decay=0.1, weight_decay=decay, initial_accumulator_value=0.5, foreach=False
        )
    momentum, dampening = (0.9, 0.1) if name == "sgd" else (0.0, 0.0)
    return torch.optim.SGD(
        [parameter], lr=1e-3, momentum=momentum, dampening=dampening, weight_decay=decay, foreach=False
    )


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("rule", ["adam", "adagrad", "sgd", "sgd without momentum"])
def test_rules_match_torch(rule: str, maximize: bool) -> None:
    numel, uses = 3000, USES.get(rule, (True, True))
    state = State(numel, "fp32", "weight", "fp32")
    parameter = torch.nn.Parameter(state.weight.clone())
    optim = torch_rule(rule, parameter)
    optim.param_groups[0]["maximize"] = maximize
    for step in range(1, 101):
        state.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        parameter.grad = state.grad.clone()
        optim.step()
        state.update([rule_segment(rule, 0, numel, step, maximize=maximize)], uses=uses)
    assert ((state.weight - parameter.detach()).abs().max() / 1e-3).item() < 1e-2
    assert (state.weight - State(numel, "fp32", "weight", "fp32").weight).abs().max() > 1e-3


@pytest.mark.parametrize("nesterov", [False, True])
def test_nesterov_matches_torch(nesterov: bool) -> None:
    state = State(1000, "fp32", "weight", "fp32")
    parameter = torch.nn.Parameter(state.weight.clone())
    optim = torch.optim.SGD([parameter], lr=1e-2, momentum=0.9, nesterov=nesterov, foreach=False)
    for step in range(1, 21):
        state.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        parameter.grad = state.grad.clone()
        optim.step()
        update = _native.Segment(0, 1000, rule="sgd", lr=1e-2, beta1=0.9, nesterov=nesterov, step=step)
        state.update([update], uses=(True, False))
    torch.testing.assert_close(state.weight, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_lion_is_the_published_algorithm() -> None:
    numel, lr, (beta1, beta2), decay = 2000, 1e-3, (0.9, 0.99), 0.01
    state = State(numel, "fp32", "weight", "fp32")
    p, m = state.weight.clone(), torch.zeros(numel)
    for step in range(1, 51):
        g = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        state.grad = g
        state.update([rule_segment("lion", 0, numel, step)], uses=(True, False))
        p = p * (1 - lr * decay) - lr * torch.sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
    torch.testing.assert_close(state.weight, p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.exp_avg, m, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("moments", MOMENTS)
def test_the_first_step_does_not_read_the_moments(moments: str) -> None:
    states = [State(70_003, "bf16", "split16", "bf16", moments) for _ in range(2)]
    for state, value in zip(states, (0, 255), strict=True):
        raw(state.exp_avg)[:] = value
        raw(state.exp_avg_sq)[:] = value
        assert state.update([segment(0, 70_003, step=1)])
        assert state.update([segment(0, 70_003, step=2)])
    assert torch.equal(states[0].weight, states[1].weight)
    assert torch.equal(states[0].residual, states[1].residual)


def test_a_thread_that_flushes_denormals_gets_the_same_bits() -> None:
    tiny = torch.full((300_000,), 1e-40)
    pools = [_native.ThreadPool(1), _native.ThreadPool(2)]

    states = [State(1000, "fp32", "weight", "fp32") for _ in range(2)]
    for state in states:
        state.grad = torch.full((1000,), 1e-38)

    def results() -> tuple[set[float], list[bytes]]:
        state = states.pop()
        state.update([segment(0, 1000, step=1)])
        return {math.fsum(_native.sums_of_squares(raw(tiny), "fp32", pool)) for pool in pools}, state.bits()

    expected = results()
    assert len(expected[0]) == 1
    assert min(expected[0]) > 0
    try:
        torch.set_flush_denormal(True)
        assert results() == expected
        assert torch.tensor(1e-39) * 1 == 0  # the mode is still what it was set to
    finally:
        torch.set_flush_denormal(False)


def test_constants_are_computed_in_double_and_rounded_once() -> None:
    given = _native.Segment(0, 1, lr=0.3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7, maximize=True)
    found, bias1, bias2 = given.constants, 1 - 0.9**7, 1 - 0.999**7
    expected = {
        "beta1": 0.9,
        "one_minus_beta1": 1 - 0.9,
        "decay": 1 - 0.3 * 0.1,
        "step_size": 0.3 / bias1,
        "inverse_bc2_sqrt": 1 / math.sqrt(bias2),
        "eps": 1e-8,
        "grad_scale": -1.0,
        "l2": 0.0,
    }
    assert {name: getattr(found, name) for name in expected} == {
        key: np.float32(each) for key, each in expected.items()
    }
    assert (found.rule, found.fresh, given.skip) == ("adamw", False, False)
    moment = [_native.Segment(0, 1, rule="sgd", lr=0.1, beta1=beta, step=1).constants for beta in (0.0, 0.9)]
    assert [(each.uses_exp_avg, each.uses_exp_avg_sq, each.fresh) for each in moment] == [
        (False, False, True),
        (True, False, True),
    ]


def test_moments_may_begin_later_than_the_first_step() -> None:
    late, fresh = State(1000, "fp32", "weight", "fp32"), State(1000, "fp32", "weight", "fp32")
    late.exp_avg.fill_(float("nan"))
    for state, step in ((late, 7), (fresh, 1)):
        state.update([_native.Segment(0, 1000, rule="sgd", lr=0.1, beta1=0.9, dampening=0.5, step=step, fresh=True)])
    assert late.bits() == fresh.bits()


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_result_that_is_not_finite_is_reported(moments: str) -> None:
    for bad in (float("nan"), float("inf")):
        state = State(1000, "bf16", "split16", "bf16", moments)
        assert state.update([segment(0, 1000)])
        state.grad[999] = bad
        assert not state.update([segment(0, 1000, step=4)])
        assert state.update([segment(0, 999, step=4)]) or moments == "int8"  # its block shares the scale


@pytest.mark.parametrize("moments", MOMENTS)
def test_compressed_moments_follow_fp32_ones(moments: str) -> None:
    """Over 300 steps towards a minimum, not bit for bit but to the same place."""
    numel = 20_000
    target = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    state = State(numel, "fp32", "weight", "fp32", moments)
    start = (state.weight - target).square().mean()
    for step in range(1, 301):
        state.grad = state.weight - target + 0.1 * torch.randn(numel, generator=torch.Generator().manual_seed(step))
        state.update([segment(0, numel, step, lr=2e-2, weight_decay=0.0)])
    assert (state.weight - target).square().mean() < 5e-3 * start


@pytest.mark.parametrize(("weight", "master"), [("bf16", "split16"), ("bf16", "fp32"), ("fp16", "fp32")])
def test_sixteen_bit_weights_train_as_their_fp32_master(weight: str, master: str) -> None:
    numel, wide, narrow = 10_000, State(10_000, "fp32", "weight", "fp32"), State(10_000, weight, master, "fp32")
    for step in range(1, 30):
        generator = torch.Generator().manual_seed(step)
        wide.grad = narrow.grad = torch.randn(numel, generator=generator)
        for state in (wide, narrow):
            state.update([segment(0, numel, step)])
    assert torch.equal(narrow.master(), wide.weight)
    assert torch.equal(narrow.exp_avg_sq, wide.exp_avg_sq)
    rounded = torch.empty(numel, dtype=TORCH[weight])
    _native.round_weights(wide.weight.numpy(), raw(rounded), weight)
    assert torch.equal(narrow.weight, rounded)


def test_it_matches_torch_over_many_steps() -> None:
    numel, steps = 5000, 1000
    state = State(numel, "fp32", "weight", "fp32")
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    parameter = torch.nn.Parameter(state.weight.clone())
    optim = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, fused=True)
    for step in range(1, steps + 1):
        state.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        parameter.grad = state.grad.clone()
        optim.step()
        state.update([segment(0, numel, step)])
    assert ((state.weight - parameter.detach()).abs().max() / 1e-3).item() < 1e-3


def test_each_step_is_near_float64() -> None:
    numel = 20_000
    state = State(numel, "fp32", "weight", "fp32")
    m, v, g, p = (t.double() for t in (state.exp_avg, state.exp_avg_sq, state.grad, state.weight))
    beta1, beta2 = (float(np.float32(b)) for b in (0.9, 0.999))
    rest1, rest2 = (float(np.float32(1 - b)) for b in (0.9, 0.999))
    m_next, v_next = beta1 * m + rest1 * g, beta2 * v + rest2 * g * g
    p_next = p * (1 - 1e-5) - 1e-3 / (1 - 0.9**3) * m_next / (v_next.sqrt() / (1 - 0.999**3) ** 0.5 + 1e-8)
    state.update([segment(0, numel)])
    assert ((state.exp_avg.double() - m_next).abs() <= 2**-23 * ((beta1 * m).abs() + (rest1 * g).abs())).all()
    assert ((state.exp_avg_sq.double() - v_next).abs() <= 3 * 2**-24 * 2 * v_next).all()
    assert ((state.weight.double() - p_next).abs() <= 4 * 2**-24 * p_next.abs().clamp(min=1e-3)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_special_values_do_what_ieee_says(isa: str) -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-22, float("inf"), float("nan"), 3e38])
    state = State(8, "fp32", "weight", "fp32")
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    state.grad = values
    state.update([segment(0, 8, 1)], isa=isa)
    assert state.weight[:5].isfinite().all()
    assert state.exp_avg[2] == values[2] * np.float32(1 - 0.9)
    assert state.exp_avg[3] != 0  # denormals are kept
    assert state.exp_avg_sq[4] == 0  # 1e-47 is below the smallest denormal
    assert state.exp_avg[5] == float("inf")
    assert state.exp_avg[6].isnan()
    assert state.exp_avg_sq[7] == float("inf")


def test_segments_have_their_own_hyperparameters_and_gaps_are_left_alone() -> None:
    state, before = State(1000, "bf16", "split16", "bf16"), State(1000, "bf16", "split16", "bf16")
    skipped = _native.Segment(500, 700, lr=1, beta1=0, beta2=0, eps=1, weight_decay=1, step=0, skip=True)
    state.update([segment(0, 100), segment(200, 500, step=9, lr=0.1, weight_decay=0.0), skipped])
    for begin, end in ((100, 200), (500, 1000)):
        assert state.part(begin, end).bits() == before.part(begin, end).bits()
    alone = State(1000, "bf16", "split16", "bf16").part(200, 500)
    alone.update([segment(0, 300, step=9, lr=0.1, weight_decay=0.0)])
    assert state.part(200, 500).bits() == alone.bits()


def test_the_gradient_is_scaled_first() -> None:
    scaled, plain = State(100, "fp32", "weight", "fp32"), State(100, "fp32", "weight", "fp32")
    plain.grad = plain.grad * 0.25
    scaled.update([segment(0, 100, grad_scale=0.25)])
    plain.update([segment(0, 100)])
    assert scaled.bits() == plain.bits()


@pytest.mark.parametrize("dtype", GRADS)
def test_sums_of_squares_are_the_same_everywhere_and_right(dtype: str) -> None:
    data = torch.randn(300_007, generator=torch.Generator().manual_seed(0)).to(TORCH[dtype])
    pools = [_native.ThreadPool(threads) for threads in (1, 2, 7)]
    sums = {tuple(_native.sums_of_squares(raw(data), dtype, pool, isa)) for isa in ISAS for pool in pools}
    assert len(sums) == 1
    expected = [part.double().square().sum().item() for part in data.split(65_536)]
    torch.testing.assert_close(list(sums.pop()), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize("first", [0, 256, 65_536, 131_071])
def test_parts_that_are_cut_on_the_grid_have_the_partials_of_the_whole(dtype: str, first: int) -> None:
    data = torch.randn(300_007, generator=torch.Generator().manual_seed(0)).to(TORCH[dtype])
    pool, cut = _native.ThreadPool(2), 3 * 65_536 - first
    parts = [
        *_native.sums_of_squares(raw(data[:cut]), dtype, pool, first=first),
        *_native.sums_of_squares(raw(data[cut:].clone()), dtype, pool, first=first + cut),
    ]
    assert parts == _native.sums_of_squares(raw(data), dtype, pool, first=first)
    lands = torch.empty_like(data)
    assert parts == _native.land_gradient(raw(lands), dtype, raw(data), dtype, add=False, pool=pool, first=first)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_sum_of_squares_is_not_finite_when_an_element_is_not(bad: float) -> None:
    data = torch.ones(100_000)
    data[77_777] = bad
    assert list(np.isfinite(_native.sums_of_squares(raw(data), "fp32", _native.ThreadPool(2)))) == [True, False]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("src", "dst"), [(d, d) for d in GRADS] + [("bf16", "fp32"), ("fp16", "fp32")])
def test_landing_takes_the_sum_of_squares_of_what_has_landed(src: str, dst: str, add: bool) -> None:
    numel = 200_007
    there = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(TORCH[dst])
    lands = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(TORCH[src])
    expected = there + lands.float() if add else lands.to(TORCH[dst])
    for isa, threads in itertools.product(ISAS, (1, 2, 7)):
        into, pool = there.clone(), _native.ThreadPool(threads)
        if add and dst != "fp32":
            with pytest.raises(ValueError, match="added up in fp32"):
                _native.land_gradient(raw(into), dst, raw(lands), src, add=True, pool=pool, isa=isa)
            continue
        sums = _native.land_gradient(raw(into), dst, raw(lands), src, add=add, pool=pool, isa=isa)
        assert torch.equal(into, expected)
        assert sums == _native.sums_of_squares(raw(into), dst, pool, isa)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_widening_in_place_keeps_every_value(dtype: str) -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(TORCH[dtype])
    buffer = torch.zeros(65536 * 2, dtype=torch.int16)
    buffer[:65536] = values.view(torch.int16)
    _native.widen_in_place(raw(buffer), dtype, 65536)
    wide = buffer.view(torch.float32)
    finite = ~values.isnan()
    assert torch.equal(wide[finite], values.float()[finite])
    assert wide[~finite].isnan().all()


def test_wrong_buffers_are_refused() -> None:
    state = State(64, "bf16", "split16", "bf16")
    with pytest.raises(ValueError, match="outside|within|sorted"):
        state.update([segment(0, 65)])
    with pytest.raises(ValueError, match="sorted"):
        state.update([segment(10, 20), segment(15, 30)])
    state.grad = state.grad[:10]
    with pytest.raises(ValueError, match="grad holds 20 bytes; 128 are needed"):
        state.update([segment(0, 64)])
    with pytest.raises(ValueError, match="unknown instruction set"):
        State(64, "bf16", "split16", "bf16").update([segment(0, 64)], isa="sse9")
