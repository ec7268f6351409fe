"""The arithmetic: the same bits however it is cut, and the numbers torch and float64 give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from infinity import _native

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

    def __init__(self, numel: int, weight: str, master: str, grad: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        full = torch.randn(numel, generator=generator)
        self.names = (weight, master, grad)
        self.weight = torch.empty(numel, dtype=TORCH[weight])
        self.residual: torch.Tensor | None = None
        if master == "split16":
            self.residual = torch.empty(numel, dtype=torch.int16)
            _native.encode_split16(full.numpy(), raw(self.weight), self.residual.numpy())
        else:
            _native.round_weights(full.numpy(), raw(self.weight), weight)
            self.residual = full.clone() if master == "fp32" else None
        self.exp_avg = torch.randn(numel, generator=generator) * 0.1
        self.exp_avg_sq = torch.rand(numel, generator=generator) * 0.01
        self.grad = torch.randn(numel, generator=generator).to(TORCH[grad])

    def update(
        self, segments: list[_native.Segment], threads: int = 1, isa: str | None = None, scale: float = 1.0
    ) -> None:
        weight, master, grad = self.names
        _native.optimizer_update(
            raw(self.weight),
            None if self.residual is None else raw(self.residual),
            self.exp_avg.numpy(),
            self.exp_avg_sq.numpy(),
            raw(self.grad),
            weight_dtype=weight,
            master=master,
            grad_dtype=grad,
            segments=segments,
            grad_scale=scale,
            pool=_native.ThreadPool(threads),
            isa=isa,
        )

    def part(self, begin: int, end: int) -> State:
        other = State.__new__(State)
        other.names = self.names
        for name in ("weight", "residual", "exp_avg", "exp_avg_sq", "grad"):
            tensor = getattr(self, name)
            setattr(other, name, None if tensor is None else tensor[begin:end])
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


def segment(begin: int, end: int, step: int = 3, **options: float) -> _native.Segment:
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01} | options
    return _native.Segment(begin, end, step=step, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize(("weight", "master"), FORMATS)
def test_every_isa_thread_count_and_cut_gives_the_same_bits(weight: str, master: str, grad: str) -> None:
    numel = 200_003
    expected = State(numel, weight, master, grad)
    expected.update([segment(0, numel)], isa="baseline")
    for isa, threads in itertools.product(ISAS, (1, 2, 7)):
        state = State(numel, weight, master, grad)
        cuts = np.sort(np.random.default_rng(threads).integers(0, numel, 9)).tolist()
        for begin, end in itertools.pairwise([0, *cuts, numel]):
            if begin < end:
                state.part(begin, end).update([segment(0, end - begin)], threads, isa)
        assert state.bits() == expected.bits(), (isa, threads)


@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 17, 63, 64, 65, 1000, 4095, 4096, 4097, 4099])
@pytest.mark.parametrize(("weight", "master"), FORMATS)
def test_small_sizes_are_right_on_every_isa(numel: int, weight: str, master: str) -> None:
    states = [State(numel + 3, weight, master, "bf16") for _ in ISAS]
    for state, isa in zip(states, ISAS, strict=True):
        state.part(1, numel + 1).update([segment(0, numel)], isa=isa)  # off the vectors' alignment, too
    assert all(state.bits() == states[0].bits() for state in states)
    untouched = State(numel + 3, weight, master, "bf16")
    assert torch.equal(states[0].exp_avg[numel + 1 :], untouched.exp_avg[numel + 1 :])


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
    numel, steps = 5000, 200
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
    scaled.update([segment(0, 100)], scale=0.25)
    plain.update([segment(0, 100)])
    assert scaled.bits() == plain.bits()


@pytest.mark.parametrize("dtype", GRADS)
def test_sum_squares_is_the_same_everywhere_and_right(dtype: str) -> None:
    data = torch.randn(300_007, generator=torch.Generator().manual_seed(0)).to(TORCH[dtype])
    pools = [_native.ThreadPool(threads) for threads in (1, 2, 7)]
    sums = {_native.sum_squares(raw(data), dtype, pool, isa) for isa in ISAS for pool in pools}
    assert len(sums) == 1
    torch.testing.assert_close(sums.pop(), data.double().square().sum().item(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_sum_squares_is_not_finite_when_an_element_is_not(bad: float) -> None:
    data = torch.ones(100_000)
    data[77_777] = bad
    assert not np.isfinite(_native.sum_squares(raw(data), "fp32", _native.ThreadPool(2)))


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
