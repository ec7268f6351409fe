"""Several ranks train adapters on a base in 4 or 8 bits to the bits of one process, and keep the base once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.coordinator import registry
from infinity.errors import PeerError, PlanError
from infinity.runtime import experts
from infinity.sharded.initial_values import _SAMPLE_NUMEL
from infinity.sizes import PAGE_BYTES
from tests.checkpoint.fp8 import changed, qwen3, write_fp8
from tests.checkpoint.frozen_bases import trained, with_adapters
from tests.conftest import weights_of
from tests.models import qwen3_moe
from tests.ranks.workers import ended, run
from tests.runtime.over_ranks import TIERS, Blocks, digest, offloaded, train
from tests.runtime.test_gather_groups import MACHINES
from tests.runtime.test_gather_groups import on_rank as on_machines
from tests.runtime.test_rank_generations import live, went_on
from tests.runtime.test_rank_generations import require_same as require_same_lives

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

NVME = {"weights": "nvme", "optimizer": "nvme"}
FP8_LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("frozen", ["nf4", "int8"])
@pytest.mark.parametrize("gather", ["world", "node", "none"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", ["off", "during_backward", "auto"])
@pytest.mark.parametrize("trained", ["norms", "frozen"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_ranks_train_on_an_encoded_base_to_the_bits_of_one_process(
    tmp_path: Path,
    tiers: dict[str, Any],
    ranks: int,
    frozen: str,
    gather: str,
    micro: int,
    dtype: str,
    overlap: str,
    trained: str,
    recomputed: bool,
) -> None:
    machines = MACHINES[ranks]
    memory = {"memory": {"host": f"{64 * ranks}MiB", "device": f"{3 * machines.count(machines[0])}MiB"}}
    config = tiers | memory | {"frozen": frozen, "ranks": {"gather": gather}, "overlap": overlap}
    options = {"steps": 2, "dtype": dtype, "max_grad_norm": 0.01, "model": {trained: True, "recomputed": recomputed}}
    losses, norms, weights = train(str(tmp_path / "one"), config, micro, ranks, **options)  # type: ignore[arg-type]
    found = run(ranks, on_machines, str(tmp_path / "all"), config, micro, ranks, machines, options)
    assert found == [(losses[rank::ranks], norms, weights) for rank in range(ranks)]


def test_a_run_on_an_encoded_base_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Values in fp32 that are decoded and encoded again would have other scales."""
    config, options = NVME | {"frozen": "nf4"}, {"dtype": "float32", "model": {"norms": True}}
    one = live(str(tmp_path / "one"), config, 3, 6, **options)  # type: ignore[arg-type]
    for done, ranks in enumerate((2, 3, 1)):
        lives = went_on(str(tmp_path / "all"), config, ranks, done + 1, 6, **options)
        assert [life.began for life in lives] == [done] * ranks
    require_same_lives(lives, one, 1)


def bytes_kept(folder: str, config: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the encoded weights of this rank in RAM, and of its complete units."""
    model = offloaded(folder, config, norms=True)
    coordinator = registry.coordinator_of(model)
    homes = [home for unit in coordinator.units for _, home in unit.weights_home.encoded()]
    assert all(home.in_memory for home in homes)
    infinity.close(model)
    return sum(home.nbytes for home in homes), sum(unit.full.encoded_bytes for unit in coordinator.units)


def test_the_base_is_in_ram_once_for_all_ranks(tmp_path: Path) -> None:
    config = {"weights": "host", "optimizer": "host", "frozen": "nf4"}
    kept, complete = zip(*run(3, bytes_kept, str(tmp_path), config), strict=True)
    assert sum(kept) == complete[0]
    assert max(kept) - min(kept) <= 3 * 3 * PAGE_BYTES  # 3 blocks, each with its slices rounded up


def of_a_checkpoint(paths: list[str], swap: str) -> tuple[list[float], dict[str, str]]:
    """Train adapters on a checkpoint, which may be another one on each rank."""
    torch.manual_seed(0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    config = NVME | {"memory": {"device": "64MiB", "host": "256MiB"}, "nvme": {"paths": [swap]}, "commit_every": 0}
    model = with_adapters(infinity.load_pretrained(paths[rank], config, defer=True))
    infinity.offload(model, config)
    assert any(group.codec for unit in registry.coordinator_of(model).units for group in unit.full.groups)
    losses = trained(model, 2)
    digests = {name: digest(value) for name, value in weights_of(model).items()}
    infinity.close(model)
    return losses, digests


@pytest.mark.parametrize("block", [(128, 128), pytest.param((1, 1), marks=pytest.mark.long)])
def test_ranks_train_adapters_on_an_fp8_checkpoint_as_one_process_does(tmp_path: Path, block: tuple[int, int]) -> None:
    """Each rank has the same batch, so that the mean of the gradients is that of one process.

    With a scale for each weight, the form in the file is longer than the weights.
    """
    path = str(write_fp8(qwen3(), tmp_path / "base", block=block))
    one = of_a_checkpoint([path], str(tmp_path / "one"))
    assert run(2, of_a_checkpoint, [path] * 2, str(tmp_path / "all")) == [one] * 2


def test_ranks_with_different_encoded_files_are_told(tmp_path: Path) -> None:
    path = write_fp8(qwen3(), tmp_path / "base")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FP8_LAYER].view(torch.uint8)[0, 0] ^= 1

    other = changed(path, tmp_path / "other", change)
    assert qwen3().get_parameter(FP8_LAYER).numel() > _SAMPLE_NUMEL
    for outcome in ended(2, of_a_checkpoint, [str(path), str(other)], str(tmp_path / "swap")):
        assert isinstance(outcome.error, PeerError)
        assert "up_proj.base_layer.weight' has different values in the files of rank 1" in str(outcome.error)


def with_forms(folder: str, forms: list[str]) -> None:
    config = NVME | {"frozen": forms[dist.get_rank()], "nvme": {"paths": [folder]}, "commit_every": 0}
    infinity.offload(Blocks(torch.float32, norms=True), config, device="cpu")


def test_ranks_with_different_forms_are_told(tmp_path: Path) -> None:
    for outcome in ended(2, with_forms, str(tmp_path), ["nf4", "int8"]):
        assert isinstance(outcome.error, PeerError)
        assert "frozen" in str(outcome.error)


def of_a_mixture(folder: str, begins: bool, together: bool, weights: str = "nvme") -> int:
    """Take a step, or resume and take one more. Return the number of steps before."""
    experts._each = lambda nbytes: 1  # the process of this rank trains nothing else
    torch.manual_seed(0)
    model, inputs = qwen3_moe()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    config = NVME | {
        **{"weights": weights, "frozen": "nf4", "experts": "together" if together else "apart", "commit_every": 1},
        **{"memory": {"device": "64MiB", "host": "256MiB"}, "nvme": {"paths": [folder]}},
    }
    (infinity.offload if begins else infinity.resume)(model, config, device="cpu")
    optim = infinity.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    began = infinity.track(model=model)
    model(**inputs).loss.backward()
    optim.step()
    infinity.close(model)
    return began


def test_experts_that_were_apart_go_on_with_ranks_that_share_all_weights(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run(1, of_a_mixture, folder, True, False) == [0]
    for outcome in ended(2, of_a_mixture, folder, False, False):
        assert isinstance(outcome.error, PlanError)
        assert "the experts are apart, and several ranks fetch different experts" in str(outcome.error)
    assert run(2, of_a_mixture, folder, False, False, "host") == [1, 1], "as the error says, with weights: host"
    assert run(1, of_a_mixture, folder, False, False) == [2]


def test_experts_together_on_an_encoded_base_go_on_with_ranks_and_back(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert run(1, of_a_mixture, folder, True, True) == [0]
    assert run(2, of_a_mixture, folder, False, True) == [1, 1]
    assert run(1, of_a_mixture, folder, False, True) == [2]
