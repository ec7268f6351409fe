"""Several ranks, each with a GPU of its own, train to the bits of one process with one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.errors import ConfigError, PeerError
from tests.ranks.workers import ended, run
from tests.runtime import over_ranks

RANKS = 2
TIERS = [
    {"weights": "host", "optimizer": "host"},
    {"weights": "host", "optimizer": "nvme"},
    {"weights": "nvme", "optimizer": "nvme"},
    {"weights": "host", "optimizer": "device"},
]
IN_RAM = {"weights": "host", "optimizer": "host"}
"""Tiers of the process that has the batches of all ranks."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"there are not {RANKS} GPUs")


def on_gpu(folder: str, config: dict[str, Any], micro: int, options: dict[str, Any], *, own: bool = True) -> Any:
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(dist.get_rank() if dist.is_initialized() and own else 0)
    over_ranks.DEVICE = "cuda"
    return over_ranks.train(folder, config, micro, RANKS, **options)


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("frozen", ["auto", "nf4"])
@pytest.mark.parametrize("overlap", ["off", "during_backward"])
def test_ranks_with_gpus_train_to_the_bits_of_one(
    tmp_path: Path, tiers: dict[str, Any], frozen: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiers | {"overlap": overlap, "frozen": frozen, "memory": {"host": "512MiB", "device": "64MiB"}}
    options = {"dtype": "bfloat16", "max_grad_norm": 0.01, "model": {"frozen": frozen != "auto"}}
    monkeypatch.setattr(over_ranks, "DEVICE", "cuda")
    losses, norms, weights = on_gpu(str(tmp_path / "one"), config | IN_RAM, 2, options)
    found = run(RANKS, on_gpu, str(tmp_path / "all"), config, 2, options, limit_s=120.0)
    assert found == [(losses[rank::RANKS], norms, weights) for rank in range(RANKS)]


def test_each_rank_fetches_the_experts_of_its_own_tokens_to_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": "bfloat16", "max_grad_norm": 0.01, "model": {"experts": 6}}
    config = TIERS[0] | {"memory": {"host": "512MiB", "device": "64MiB"}}
    monkeypatch.setattr(over_ranks, "DEVICE", "cuda")
    losses, norms, weights = on_gpu(str(tmp_path / "one"), config, 2, options)
    found = run(RANKS, on_gpu, str(tmp_path / "all"), config, 2, options, limit_s=120.0)
    assert found == [(losses[rank::RANKS], norms, weights) for rank in range(RANKS)]


def on_one_gpu(config: dict[str, Any]) -> Any:
    return on_gpu("", config, 1, {"steps": 1}, own=False)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    for outcome in ended(RANKS, on_one_gpu, TIERS[0]):
        assert isinstance(outcome.error, ConfigError | PeerError)
        assert "ranks 0 and 1 compute on the same device" in str(outcome.error)
