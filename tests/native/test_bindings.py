"""Whatever is handed to the arithmetic, the answer is a result or a Python exception."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity import _native
from tests.sampling import number

POOL = _native.ThreadPool(2)
MEMORY = np.zeros(1 << 16, np.uint8)
DTYPES = st.sampled_from(["fp32", "bf16", "fp16", "int8", "", "FP32"])
MASTERS = st.sampled_from(["weight", "split16", "fp32", "none", "fp64"])
MOMENTS = st.sampled_from(["fp32", "bf16", "int8", "int4"])
COUNTS = st.sampled_from([0, 1, 3, 255, 256, 257, 1000, 2048])
NUMBERS = st.sampled_from([0, 1, -1, 1e-8, 0.9, 1.0, float("nan"), float("inf"), -float("inf"), 1e308])
INTEGERS = st.sampled_from([0, 1, 2, 256, 255, 2**40, 2**62, 2**63, 2**64 - 256, 2**64, -1])
FUZZ = settings(
    max_examples=number(250, 1500), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@st.composite
def buffers(draw: st.DrawFn) -> Any:
    """Memory of any length and alignment, read-only or strided, another's, or no memory at all."""
    kind = draw(st.sampled_from(["own", "own", "own", "own", "shared", "read-only", "strided", "none", "text", "list"]))
    nbytes = draw(COUNTS) * draw(st.sampled_from([1, 2, 4, 4])) + draw(st.sampled_from([0, 0, 0, 1]))
    offset = draw(st.sampled_from([0, 0, 0, 0, 1, 2, 4, 64]))
    if kind == "shared":
        return MEMORY[offset : offset + nbytes]
    own = np.zeros(offset + nbytes + 8192, np.uint8)[offset : offset + nbytes]
    if kind == "read-only":
        own.flags.writeable = False
    if kind == "strided":
        return own[::2]
    return {"none": None, "text": "weights", "list": [1, 2]}.get(kind, own)


@st.composite
def segments(draw: st.DrawFn) -> Any:
    return [
        {
            "begin": draw(INTEGERS),
            "end": draw(INTEGERS | COUNTS),
            "rule": draw(st.sampled_from(["adamw", "adam", "lion", "adagrad", "sgd", "muon"])),
            "lr": draw(NUMBERS),
            "beta1": draw(NUMBERS),
            "beta2": draw(NUMBERS),
            "eps": draw(NUMBERS),
            "step": draw(INTEGERS),
            "index": draw(INTEGERS),
            "seed": draw(INTEGERS),
            "skip": draw(st.booleans()),
        }
        for _ in range(draw(st.integers(0, 2)))
    ]


GOOD_FORMATS = [("fp32", "weight"), ("bf16", "split16"), ("bf16", "fp32"), ("bf16", "none"), ("fp16", "fp32")]
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
REST = {"weight": 0, "split16": 2, "fp32": 4, "none": 0}


@st.composite
def calls(draw: st.DrawFn) -> Any:
    """(numel, five buffers, four names, segments) of a call in which nothing, or this and that, is wrong."""
    numel = draw(COUNTS)
    weight, master = draw(st.sampled_from(GOOD_FORMATS))
    moments, grad = draw(st.sampled_from(["fp32", "bf16", "int8"])), draw(st.sampled_from(list(ITEMSIZE)))
    moment = _native.moment_bytes(moments, numel)
    sizes = [numel * ITEMSIZE[weight], numel * REST[master], moment, moment, numel * ITEMSIZE[grad]]
    memory = [np.zeros(nbytes + 4, np.uint8)[:nbytes] for nbytes in sizes]
    names = [weight, master, moments, grad]
    parts = [{"begin": 0, "end": numel, "rule": "adamw", "lr": 1e-3, "eps": 1e-8, "step": 1}]
    for wrong in draw(st.lists(st.integers(0, 9), max_size=2)):
        if wrong < 5:
            memory[wrong] = draw(buffers())
        elif wrong < 9:
            names[wrong - 5] = draw([DTYPES, MASTERS, MOMENTS, DTYPES][wrong - 5])
        else:
            parts = draw(segments())
    return numel, memory, names, parts


def attempt(call: Any) -> None:
    """Whatever comes of it is an answer; a crash ends the process, and the test run with it."""
    try:
        call()
    except (TypeError, ValueError, OverflowError) as error:
        assert str(error)


@FUZZ
@given(calls(), NUMBERS)
def test_updates_of_anything(call: Any, scale: float) -> None:
    _, (w, r, m, v, g), names, parts = call
    weight, master, moments, grad = names
    attempt(
        lambda: _native.optimizer_update(
            w,
            r,
            m,
            v,
            g,
            weight_dtype=weight,
            master=master,
            moments=moments,
            grad_dtype=grad,
            segments=[_native.Segment(**part, grad_scale=scale) for part in parts],
            pool=POOL,
        )
    )


@FUZZ
@given(buffers(), buffers(), DTYPES, DTYPES, MOMENTS, st.booleans(), INTEGERS)
def test_conversions_of_anything(one: Any, other: Any, a: str, b: str, moments: str, yes: bool, numel: int) -> None:
    calls = [
        lambda: _native.land_gradient(one, a, other, b, add=yes, pool=POOL),
        lambda: _native.sums_of_squares(one, a, POOL),
        lambda: _native.widen_in_place(one, a, numel),
        lambda: _native.encode_split16(one, other, other),
        lambda: _native.decode_split16(one, other, other),
        lambda: _native.round_weights(one, other, a),
        lambda: _native.encode_moments(one, moments, is_signed=yes, data=other),
        lambda: _native.decode_moments(one, moments, is_signed=yes, values=other),
        lambda: _native.read_modify_write(one, other, other, one, POOL),
    ]
    for call in calls:
        attempt(call)


@FUZZ
@given(calls(), st.none() | st.none() | INTEGERS)
def test_jobs_of_anything(pipeline: Any, call: Any, other: int | None) -> None:
    numel, (w, r, m, v, g), names, parts = call
    numel = numel if other is None else other
    weight, master, moments, grad = names

    def submit() -> None:
        stream = _native.StateStream
        future = pipeline.submit(
            numel=numel,
            weight_dtype=weight,
            master=master,
            moments=moments,
            grad_dtype=grad,
            segments=[_native.Segment(**part) for part in parts],
            weight=stream(w),
            residual=stream(r),
            exp_avg=None if m is None else stream(m),
            exp_avg_sq=None if v is None else stream(v),
            grad=g,
        )
        future.wait(60)
        assert future.failure() is None

    attempt(submit)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    engine = _native.IOEngine("threads")
    staging = _native.Arena(1 << 20).view(0, 1 << 20)
    pipeline = _native.UpdatePipeline(engine, POOL, staging, 4096, 1 << 16)
    yield pipeline
    pipeline.close()
    engine.close()


def test_good_calls_are_among_them() -> None:
    """So that the above is not all refusals."""
    w, m, v, g = (np.zeros(256, np.float32) for _ in range(4))
    g[:] = 1
    assert _native.optimizer_update(
        w,
        None,
        m,
        v,
        g,
        weight_dtype="fp32",
        master="weight",
        grad_dtype="fp32",
        pool=POOL,
        segments=[_native.Segment(0, 256, lr=0.1, eps=1e-8, step=1)],
    )
    assert (w < 0).all()
    with pytest.raises(ValueError, match="exp_avg and weight overlap"):
        _native.optimizer_update(
            w, None, w, v, g, weight_dtype="fp32", master="weight", grad_dtype="fp32", pool=POOL, segments=[]
        )
    g.flags.writeable = False
    with pytest.raises(ValueError, match="weight is read-only"):
        _native.optimizer_update(
            g, None, m, v, w, weight_dtype="fp32", master="weight", grad_dtype="fp32", pool=POOL, segments=[]
        )
