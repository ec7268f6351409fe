"""Experts apart with several ranks: each rank fetches the experts of its own tokens, to the bits of one process."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.errors import PlanError
from infinity.ranks import shared_memory
from infinity.runtime import experts
from tests import sampling
from tests.models import loss_of
from tests.ranks.workers import ended, run
from tests.runtime.over_ranks import digest, offloaded, require_equal
from tests.runtime.test_experts import make

HOST = {"weights": "host", "optimizer": "host"}


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["host", "nvme"])
@pytest.mark.parametrize("overlap", ["off", "before_forward", "during_backward", "auto"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
@pytest.mark.parametrize("model", [{"experts": 8}, {"experts": 6, "recomputed": True}, {"experts": 6, "frozen": True}])
def test_ranks_train_experts_that_are_apart_to_the_bits_of_one_process(
    tmp_path: Path,
    ranks: int,
    micro: int,
    dtype: str,
    optimizer: str,
    overlap: str,
    max_grad_norm: float | None,
    model: dict[str, Any],
) -> None:
    config = HOST | {"optimizer": optimizer, "overlap": overlap}
    options = {"steps": sampling.number(2, 3), "dtype": dtype, "max_grad_norm": max_grad_norm, "model": model}
    require_equal(tmp_path, config, micro, ranks, **options)


def of_transformers(name: str, ranks: int, micro: int) -> tuple[list[float], dict[str, str], bool]:
    """Train a model of transformers. Return the losses, the final weights, and whether experts were apart.

    A process without other ranks uses the batches of all ranks.
    """
    experts._each = lambda nbytes: 3  # type: ignore[assignment]
    model, batch = make(name)
    infinity.offload(model, {"commit_every": 0, "memory": {"host": "256MiB", "device": "64MiB"}, **HOST})
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    rank, several = (dist.get_rank(), True) if dist.is_initialized() else (0, False)
    indices = range(rank, micro * ranks, ranks) if several else range(micro * ranks)
    losses = []
    for step in range(2):

        def loss(index: int, step: int = step) -> torch.Tensor:
            moved = {key: torch.roll(value, 7 * step + index, 1) for key, value in batch.items()}
            return loss_of(model, moved)

        losses += [each.item() for each in infinity.backward(model, loss, indices)]
        if not several:
            optim.grad_scale = torch.tensor(float(ranks))
        optim.step()
        vars(optim).pop("grad_scale", None)
        optim.zero_grad()
    apart = any(isinstance(module, experts.ExpertBank) for module in model.modules())
    with infinity.gathered(model, model):
        weights = {name: digest(parameter) for name, parameter in model.named_parameters()}
    infinity.close(model)
    return losses, weights, apart


@pytest.mark.parametrize("name", ["Qwen3Moe", pytest.param("DeepseekV3", marks=pytest.mark.long)])
def test_models_of_transformers_do_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_each", experts._each)  # `of_transformers` changes it
    losses, weights, apart = of_transformers(name, 2, 2)
    assert apart
    for rank, found in enumerate(run(2, of_transformers, name, 2, 2)):
        assert found == (losses[rank::2], weights, True)


def where_weights_are_not_shared(folder: str) -> None:
    offloaded(folder, {"weights": "nvme", "optimizer": "nvme"}, experts=6)


def test_experts_that_are_apart_need_weights_that_all_ranks_share(tmp_path: Path) -> None:
    for outcome in ended(2, where_weights_are_not_shared, str(tmp_path)):
        assert isinstance(outcome.error, PlanError)
        assert "the experts are apart, and several ranks fetch different experts" in str(outcome.error)


def without_memory() -> bool:
    """Return whether experts are apart where rank 0 may not make memory to share."""

    def denied() -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    shared_memory.make_memfd = denied  # type: ignore[assignment]
    experts._each = lambda nbytes: 3  # type: ignore[assignment]
    model, batch = make("Qwen3Moe")
    infinity.offload(model, {"commit_every": 0, "memory": {"host": "256MiB", "device": "64MiB"}, **HOST})
    loss_of(model, batch).backward()
    apart = any(isinstance(module, experts.ExpertBank) for module in model.modules())
    infinity.close(model)
    return apart


def test_experts_are_together_where_ranks_cannot_share_memory() -> None:
    assert run(2, without_memory) == [False, False]
