"""However the states are placed and moved, ten steps (six in `make test`) end in the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infinity
from infinity import _native
from tests import sampling
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of

STEPS = sampling.number(4, 10)
Result = tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def ten_steps(offload: Any, dtype: torch.dtype, tier: str, **config: Any) -> Result:
    torch.manual_seed(0)
    model, batch = llama()
    model = offload(model.to(dtype).train(), tier, memory={"device": "640KiB", "host": "512MiB"}, **config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        norms.append(optim.last_grad_norm)
    result = losses, norms, weights_of(model), states_of(model)
    infinity.close(model)
    return result


def assert_same(result: Result, expected: Result) -> None:
    assert result[0] == expected[0]
    assert result[1] == expected[1]
    for values, wanted in zip(result[2:], expected[2:], strict=True):
        assert values.keys() == wanted.keys()
        for name, tensor in values.items():
            assert torch.equal(tensor, wanted[name]), name


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


_expected: dict[torch.dtype, Result] = {}


@pytest.fixture
def expected(offload: Any, dtype: torch.dtype) -> Result:
    """Everything in RAM, one thread."""
    if dtype not in _expected:
        _expected[dtype] = ten_steps(offload, dtype, "host", update={"threads": 1})
    return _expected[dtype]


def test_the_states_do_change(expected: Result) -> None:
    assert expected[0][-1] < expected[0][0]
    assert all(tensor.abs().sum() > 0 for tensor in expected[3].values())


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_nvme_and_host_tiers_end_in_the_same_bits(
    engine: str, offload: Any, dtype: Any, expected: Result, tmp_path: Any
) -> None:
    nvme = {"paths": [str(tmp_path / "swap")], "engine": engine}
    assert_same(ten_steps(offload, dtype, "nvme", nvme=nvme), expected)


def test_weights_in_ram_with_states_on_nvme_end_in_the_same_bits(offload: Any, dtype: Any, expected: Result) -> None:
    assert_same(ten_steps(offload, dtype, "nvme", weights="host"), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tile", ["16KiB", "256KiB", "1MiB", "16MiB"])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_tile_size_and_threads_change_no_bit(
    tile: str, threads: int, offload: Any, dtype: Any, expected: Result
) -> None:
    assert_same(ten_steps(offload, dtype, "nvme", update={"tile": tile, "threads": threads}), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_instruction_set_ends_in_the_same_bits(
    isa: str, offload: Any, dtype: Any, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_ISA", isa)
    assert_same(ten_steps(offload, dtype, "nvme"), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_split16_and_an_fp32_master_end_in_the_same_bits(tier: str, offload: Any, dtype: Any, expected: Result) -> None:
    assert_same(ten_steps(offload, dtype, tier, master="fp32"), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("block", ["4KiB", "64KiB", "4MiB"])
def test_block_size_and_depth_change_no_bit(
    block: str, offload: Any, dtype: Any, expected: Result, tmp_path: Any
) -> None:
    nvme = {"paths": [str(tmp_path / "swap")], "block": block, "queue_depth": 3}
    assert_same(ten_steps(offload, dtype, "nvme", nvme=nvme), expected)
