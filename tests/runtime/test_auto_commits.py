"""With the default, commit_every: auto, a run that names a disk can be resumed, to the bits of one that never
stopped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import ConfigError, DirtyStoreError, ResumeError, StoreNotEmptyError
from infinity.coordinator import registry
from infinity.io.directory import generations_in
from infinity.plan.commit_frequency import EVERY_MAX
from tests.conftest import states_of, weights_of
from tests.models import gpt2, loss_of

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return gpt2()[0].bfloat16().train()


@pytest.fixture
def config(swap_config: Any) -> Any:
    """A config that leaves open how often to commit."""

    def make(weights: str, optimizer: str, **overrides: Any) -> dict[str, Any]:
        made: dict[str, Any] = swap_config(weights=weights, optimizer=optimizer, **overrides)
        return {key: value for key, value in made.items() if key != "commit_every"} | overrides

    return make


def train(net: nn.Module, until: int) -> dict[str, torch.Tensor]:
    optim = infinity.AdamW(net.parameters(), lr=1e-2)
    batch = gpt2()[1]
    for _ in range(infinity.track(model=net), until):
        loss_of(net, batch).backward()
        optim.step()
        optim.zero_grad()
    return weights_of(net) | states_of(net)


def swap_of(config: dict[str, Any]) -> Path:
    return Path(config["nvme"]["paths"][0])


def every(net: nn.Module) -> int:
    return registry.coordinator_of(net).resources.plan.placement.commit_every


@pytest.mark.covering(most=2)
@pytest.mark.parametrize(("weights", "optimizer"), [("nvme", "nvme"), ("host", "nvme"), ("host", "host")])
def test_a_run_with_auto_is_resumed_to_the_same_bits(weights: str, optimizer: str, config: Any) -> None:
    swap = config(weights, optimizer)
    plain = infinity.offload(model(), swap | {"commit_every": 0})
    expected = train(plain, STEPS)
    infinity.close(plain)
    first = infinity.offload(model(), swap)
    small_groups = 3  # rounded up to pages, their weights are more than a tenth of what a step moves
    assert every(first) == {"nvmenvme": 1, "hostnvme": small_groups, "hosthost": EVERY_MAX}[weights + optimizer]
    train(first, 2)
    infinity.close(first)
    assert list(generations_in(swap_of(swap))) == [2]
    again = infinity.resume(model(), swap)
    ended = train(again, STEPS)
    assert all(torch.equal(ended[name], value) for name, value in expected.items())
    infinity.close(again, discard=True)
    assert not generations_in(swap_of(swap))


def test_what_rests_in_ram_is_committed_in_the_first_steps_already(config: Any) -> None:
    """To see what it costs: the plan alone would commit every thousandth step."""
    net = infinity.offload(model(), config("host", "host"))
    train(net, 3)
    newest = registry.coordinator_of(net).commits.newest
    assert newest is not None
    assert newest >= 1
    infinity.close(net, discard=True)


def test_a_resumed_run_needs_no_free_disk_and_may_have_another_number(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = config("nvme", "nvme")
    train(net := infinity.offload(model(), swap), 1)
    infinity.close(net)
    monkeypatch.setattr("infinity.plan.disk.room_bytes", lambda paths: 0)
    net = infinity.resume(model(), swap)
    assert every(net) == 1
    infinity.close(net)
    net = infinity.resume(model(), swap | {"weights": "host"})
    assert every(net) > 1
    infinity.close(net)


def test_without_room_for_two_copies_states_are_updated_in_place(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swap = config("nvme", "nvme")
    monkeypatch.setattr("infinity.plan.disk.room_bytes", lambda paths: 1 << 20)
    with caplog.at_level(logging.INFO, "infinity"):
        net = infinity.offload(model(), swap)
    assert "commits       none (a second copy needs " in caplog.text
    train(net, 1)
    with pytest.raises(ConfigError, match=r"this run keeps no generations \(a second copy needs .* more on /"):
        infinity.commit(net)
    with pytest.raises(infinity.StoreLockedError):
        infinity.resume(model(), swap)
    infinity.close(net)
    assert not swap_of(swap).exists()


def test_nothing_to_resume_is_said_as_before(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="no such directory"):
        infinity.resume(model(), config("nvme", "nvme"))
    with pytest.raises(ConfigError, match="nothing to resume without nvme.paths"):
        infinity.resume(model(), {"memory": {"host": "64MiB"}})
    swap = config("nvme", "nvme")
    net = infinity.offload(model(), swap | {"commit_every": 0})
    header = (swap_of(swap) / "store.infinity").read_bytes()
    infinity.close(net)
    swap_of(swap).mkdir()
    (swap_of(swap) / "store.infinity").write_bytes(header)
    with pytest.raises((DirtyStoreError, ResumeError)):
        infinity.resume(model(), swap)


def test_a_script_that_runs_twice_is_told_the_ways_out(config: Any) -> None:
    swap = config("nvme", "nvme")
    train(net := infinity.offload(model(), swap), 1)
    infinity.close(net)
    with pytest.raises(StoreNotEmptyError) as caught:
        infinity.offload(model(), swap)
    for way in ("infinity.resume", "another directory", "infinity checkpoint remove", "close(model, discard=True)"):
        assert way in str(caught.value)
    net = infinity.resume(model(), swap)
    infinity.close(net, discard=True)
    infinity.close(infinity.offload(model(), swap))
    assert not swap_of(swap).exists()
