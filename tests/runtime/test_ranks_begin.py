"""Ranks begin with one model and one idea of where they go on, whatever each of them has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification

import infinity
from infinity.errors import ConfigError, InfinityError, ModelError, PeerError
from infinity.ranks.paths import rank_paths
from tests.models import llama
from tests.ranks.tasks import Lines
from tests.ranks.workers import ended, run
from tests.runtime.over_ranks import TIERS, Blocks, batch, digest, offloaded

pytestmark = pytest.mark.cpu_only("several ranks compute on the CPU")

MEMORY = {"memory": {"host": "256MiB", "device": "64MiB"}}
CLASSIFIES: dict[str, Any] = {"model_class": AutoModelForSequenceClassification, "num_labels": 3}


def weights_of(model: Any) -> dict[str, str]:
    with infinity.gathered(model, model):
        return {name: digest(parameter) for name, parameter in model.named_parameters()}


def unseeded(folder: str) -> tuple[dict[str, str], list[str]]:
    heard = Lines()
    logging.getLogger("infinity").addHandler(heard)
    logging.getLogger("infinity").setLevel(logging.WARNING)
    model = offloaded(folder, TIERS[3], seed=dist.get_rank())
    weights = weights_of(model)
    infinity.close(model)
    return weights, heard.messages


def test_a_model_that_was_not_seeded_begins_with_the_values_of_rank_0(tmp_path: Path) -> None:
    expected = {name: digest(value) for name, value in Blocks(torch.float32, seed=0).named_parameters()}
    found = run(3, unseeded, str(tmp_path))
    assert [weights for weights, _ in found] == [expected] * 3
    assert ["as with DistributedDataParallel" in "".join(lines) for _, lines in found] == [True, False, False]


class Normed(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lines = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.register_buffer("scale", torch.full((3,), float(rank)))
        self.register_buffer("complex", torch.tensor(1j * rank, dtype=torch.complex128))
        self.register_buffer("unsaved", torch.arange(4) + rank, persistent=False)


def buffered(folder: str) -> list[list[float]]:
    config = {**TIERS[3], **MEMORY, "commit_every": 0, "nvme": {"paths": [folder]}}
    model = infinity.offload(Normed(dist.get_rank()), config, device="cpu")
    found = [model.scale.tolist(), model.unsaved.tolist(), [model.complex.imag.item()]]
    infinity.close(model)
    return found


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    assert run(2, buffered, str(tmp_path)) == [[[0.0] * 3, [0, 1, 2, 3], [0.0]]] * 2


def loaded(paths: list[str], folder: str) -> tuple[str, str]:
    config = {**TIERS[3], **MEMORY, "commit_every": 0, "nvme": {"paths": [folder]}}
    try:
        model = infinity.load_pretrained(paths[dist.get_rank()], config, device="cpu")
    except InfinityError as error:
        return type(error).__name__, str(error)
    infinity.close(model)
    return "", ""


def test_ranks_that_load_different_checkpoints_are_told(tmp_path: Path) -> None:
    paths = [str(tmp_path / "first"), str(tmp_path / "other")]
    model, _ = llama()
    model.save_pretrained(paths[0])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[-1, -1] += 1.0
    model.save_pretrained(paths[1])
    for kind, text in run(2, loaded, paths, str(tmp_path / "swap")):
        assert kind == "PeerError"
        assert "'model.layers.0.mlp.up_proj.weight' has different values in the files of rank 1" in text
    assert run(2, loaded, [paths[0]] * 2, str(tmp_path / "swap")) == [("", "")] * 2


def headed(path: str, folder: str) -> str:
    torch.manual_seed(dist.get_rank())
    config = {**TIERS[3], **MEMORY, "commit_every": 0, "nvme": {"paths": [folder]}}
    model = infinity.load_pretrained(path, config, device="cpu", **CLASSIFIES)
    head = weights_of(model)["score.weight"]
    infinity.close(model)
    return head


def test_a_new_head_of_an_unseeded_rank_is_that_of_rank_0(tmp_path: Path) -> None:
    llama()[0].save_pretrained(tmp_path / "in")
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "in", num_labels=3, dtype=torch.bfloat16)
    assert run(2, headed, str(tmp_path / "in"), str(tmp_path / "swap")) == [digest(plain.score.weight)] * 2


def test_a_rank_that_finds_no_checkpoint_tells_the_others(tmp_path: Path) -> None:
    llama()[0].save_pretrained(tmp_path / "first")
    paths = [str(tmp_path / "first"), str(tmp_path / "missing")]
    (kind, text), (own, _) = run(2, loaded, paths, str(tmp_path / "swap"), limit_s=30)
    assert (kind, own) == ("PeerError", "ModelError")
    assert "rank 1 failed" in text
    assert "missing" in text


def unusual(folder: str) -> str:
    model = Blocks(torch.float32)
    if dist.get_rank() == 1:
        model.double()
    try:
        infinity.offload(model, {**TIERS[3], **MEMORY, "nvme": {"paths": [folder]}}, device="cpu")
    except (ModelError, ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_whose_model_cannot_be_offloaded_tells_the_others(tmp_path: Path) -> None:
    first, second = run(2, unusual, str(tmp_path), limit_s=30)
    assert first.startswith("PeerError: rank 1 failed")
    assert not second.startswith("PeerError")
    assert second


def begun_or_resumed(path: str, folder: str, until: int, die: bool) -> int:
    """Return the step that this life began after."""
    config = {**TIERS[3], **MEMORY, "commit_every": 1, "nvme": {"paths": [folder]}}
    model = infinity.load_pretrained(path, config, device="cpu", resume="auto", dtype=torch.float32)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    began = infinity.track(model=model)
    for step in range(began, until):
        ids = (batch(step, dist.get_rank(), torch.float32)[:, :16].abs() * 10).long()
        model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        optim.zero_grad()
    infinity.close(model)
    return began


@pytest.mark.long(kept="only here one rank alone has no generation")
def test_auto_begins_anew_on_all_ranks_where_one_has_no_generation(tmp_path: Path) -> None:
    """A kill between the manifests of the first generation leaves this state."""
    llama()[0].save_pretrained(tmp_path / "model")
    given = str(tmp_path / "model"), str(tmp_path / "swap")
    assert run(2, begun_or_resumed, *given, 1, False) == [0, 0]
    (manifest,) = rank_paths(tmp_path / "swap", 2)[1].glob("generation-*")
    manifest.unlink()
    assert run(2, begun_or_resumed, *given, 1, False) == [0, 0]
    assert run(2, begun_or_resumed, *given, 2, False) == [1, 1]


def saved_slowly(folder: str) -> str:
    """Save while writing the output takes longer than ranks wait for each other."""
    import time

    from infinity.checkpoint import save_pretrained

    put = save_pretrained.put

    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(3.0)
        return put(*arguments, **named)

    save_pretrained.put = slowly
    save_config = {"nvme": {"paths": [f"{folder}/swap"], "deadline_s": 1}}
    from infinity.ranks import world
    from infinity.sharded import rank_agreement

    rank_agreement._MARGIN_S, world._SIGN_OF_LIFE_S = 1.0, 0.5
    model = infinity.offload(Blocks(torch.float32), {**TIERS[3], **MEMORY, **save_config}, device="cpu")
    infinity.save_pretrained(model, f"{folder}/out")
    infinity.close(model)
    return ""


def test_a_sync_may_take_longer_than_ranks_wait(tmp_path: Path) -> None:
    assert [each.error for each in ended(2, saved_slowly, str(tmp_path))] == [None, None]
    assert load_file(tmp_path / "out" / "model.safetensors")
