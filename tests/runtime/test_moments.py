"""Moments in bf16 and int8, and weights without a master: the same bits wherever they are, and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import _native
from infinity.coordinator import registry
from tests.runtime.test_same_bits import assert_same, ten_steps

FORMS: dict[str, dict[str, str]] = {
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "no-master": {"moments": "bf16", "master": "none"},
}


@pytest.fixture(scope="module", params=FORMS, ids=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, str]:
    return FORMS[request.param]


_expected: dict[str, Any] = {}


@pytest.fixture
def expected(offload: Any, form: dict[str, str]) -> Any:
    key = str(form)
    if key not in _expected:
        _expected[key] = ten_steps(offload, torch.bfloat16, "host", update={"threads": 1}, **form)
    return _expected[key]


def test_training_goes_on_as_with_fp32_moments(offload: Any, expected: Any) -> None:
    exact = ten_steps(offload, torch.bfloat16, "host")
    assert expected[0][-1] < expected[0][0]
    assert abs(expected[0][-1] - exact[0][-1]) < 0.05 * (exact[0][0] - exact[0][-1])
    assert any(not torch.equal(moment, exact[3][name]) for name, moment in expected[3].items())


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_nvme_and_host_tiers_end_in_the_same_bits(
    engine: str, offload: Any, form: Any, expected: Any, tmp_path: Any
) -> None:
    nvme = {"paths": [str(tmp_path / "swap")], "engine": engine}
    assert_same(ten_steps(offload, torch.bfloat16, "nvme", nvme=nvme, **form), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tile", ["16KiB", "1MiB"])
@pytest.mark.parametrize("threads", [2, 7])
def test_tile_size_and_threads_change_no_bit(tile: str, threads: int, offload: Any, form: Any, expected: Any) -> None:
    update = {"tile": tile, "threads": threads}
    assert_same(ten_steps(offload, torch.bfloat16, "nvme", update=update, **form), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("isa", _native.supported_isas())
def test_every_instruction_set_ends_in_the_same_bits(
    isa: str, offload: Any, form: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_ISA", isa)
    assert_same(ten_steps(offload, torch.bfloat16, "nvme", weights="host", overlap="off", **form), expected)


def test_embeddings_and_norms_keep_fp32_moments_beside_int8_ones(offload: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 64)
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
            self.norm = nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    model = offload(Model().bfloat16(), moments="int8")
    kept = {place.spec.name: place.group.moments for _, place in registry.coordinator_of(model).places()}
    assert {name for name, moments in kept.items() if moments == "int8"} == {"blocks.0.weight", "blocks.1.weight"}
    assert set(kept.values()) == {"int8", "fp32"}
    assert "int8" in infinity.statistics(model).plan.describe()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"moments": "fp32"}, 20.0),
        ({"moments": "fp32", "master": "fp32"}, 24.0),
        ({"moments": "bf16"}, 12.0),
        ({"moments": "int8"}, 8.0625),
        ({"moments": "int8", "master": "none"}, 4.0625),
    ],
)
def test_an_update_moves_as_many_bytes_as_the_design_says(form: Any, expected: float, offload: Any) -> None:
    """Counted by the engine: states on NVMe, weights in RAM."""
    numel = 4 * _native.CHUNK_NUMEL  # whole chunks, so that no scale page is half empty
    model = offload(nn.Linear(2048, numel // 2048, bias=False).bfloat16(), weights="host", overlap="off", **form)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 2048).bfloat16()).float().square().sum().backward()
    before = infinity.statistics(model)
    optim.step()
    infinity.synchronize(model)
    after = infinity.statistics(model)
    moved = after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes
    assert moved / numel == expected
    assert before.plan.forecast.step_bytes == moved


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_other_seeds_round_otherwise_only_where_rounding_is_random(form: str, offload: Any) -> None:
    def trained(seed: int) -> Any:
        torch.manual_seed(0)
        model = offload(nn.Linear(64, 64).bfloat16(), "host", moments=form)
        optim = infinity.AdamW(model.parameters(), lr=1e-2, seed=seed)
        for _ in range(3):
            model(torch.ones(4, 64).bfloat16()).float().square().sum().backward()
            optim.step()
            optim.zero_grad()
        from tests.conftest import states_of

        return states_of(model)["weight.exp_avg"]

    assert torch.equal(trained(0), trained(0))
    assert torch.equal(trained(0), trained(1)) == (form == "int8")
