"""k steps, an end, a resume, N − k steps: the bits of N steps. And what cannot be resumed says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import infinity
from infinity.durable.commits import Commits
from infinity.errors import (
    ConfigError,
    DirtyStoreError,
    InfinityError,
    ModelError,
    ResumeError,
    StoreNotEmptyError,
)
from infinity.io.directory import generations_in
from tests.conftest import states_of, weights_of
from tests.models import VOCABULARY, gpt2, llama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

STEPS = 8
CHANGED: dict[str, Any] = {"update": {"tile": "16KiB", "threads": 1}}


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (16,), generator=torch.Generator().manual_seed(index))


class Run:
    """A training loop as a user writes it: schedule, dropout, a shuffled loader with or without workers, passes."""

    def __init__(self, model: nn.Module, workers: int = 0) -> None:
        self.model = model
        self.losses: list[float] = []
        self.optim = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda step: 1 / (1 + step))
        generator = torch.Generator().manual_seed(3) if workers else None
        self.loader = StatefulDataLoader(
            Rows(), batch_size=2, shuffle=True, num_workers=workers, generator=generator, drop_last=True
        )
        self.fails_after: int | None = None
        self.done = infinity.track(self.scheduler, self.loader, model=model)

    def train(self, until: int) -> Run:
        for batch in self._batches():
            loss = self.model(input_ids=batch, labels=batch).loss
            loss.backward()
            self.optim.step()
            self.optim.zero_grad()
            if self.done == self.fails_after:
                raise RuntimeError("in the middle")
            self.scheduler.step()
            self.losses.append(loss.item())
            self.done += 1
            if self.done == until:
                break
        return self

    def _batches(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def ended(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        result = self.losses, weights_of(self.model) | states_of(self.model)
        infinity.close(self.model)
        return result


@pytest.fixture
def config(swap_config: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(weights: str, optimizer: str, **overrides: Any) -> dict[str, Any]:
        return swap_config("nvme", weights=weights, optimizer=optimizer, **overrides)

    return make


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return gpt2(dropout=0.1)[0].bfloat16()


_undisturbed: dict[int, tuple[list[float], dict[str, torch.Tensor]]] = {}


def undisturbed(swap: dict[str, Any], workers: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and weights of an undisturbed run. They are the same for every placement
    (tests/runtime/test_same_bits.py), so it runs once."""
    if workers not in _undisturbed:
        model_ = infinity.offload(model(), swap | {"commit_every": 0})
        _undisturbed[workers] = Run(model_, workers).train(STEPS).ended()
    return _undisturbed[workers]


def train_and_close(run: Run) -> None:
    try:
        run.train(STEPS)
    finally:
        infinity.close(run.model)


def same(one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
    (losses, states), (others_losses, others) = one, other
    return losses == others_losses and all(torch.equal(states[name], others[name]) for name in states | others)


PLACEMENTS = [("nvme", "nvme"), ("host", "host"), ("host", "nvme"), ("nvme", "host")]


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    stop: int, placement: tuple[str, str], every: int, config: Any
) -> None:
    """After the resume: another placement, engine, tile size and thread count."""
    swap, workers = config(*placement), 2 if stop == 3 else 0
    expected = undisturbed(swap, workers)
    first = Run(infinity.offload(model(), swap | {"commit_every": every}), workers).train(stop)
    infinity.close(first.model)
    other = {"weights": "host" if placement[0] == "nvme" else "nvme", "commit_every": every, **CHANGED}
    other["nvme"] = swap["nvme"] | {"engine": "threads"}
    second = Run(infinity.resume(model(seed=9), swap | other), workers)
    assert second.done == stop
    losses, states = second.train(STEPS).ended()
    assert same((first.losses + losses, states), expected)


@pytest.mark.parametrize("every", [1, 5])
def test_a_run_that_an_exception_ended_resumes_at_its_last_commit(every: int, config: Any) -> None:
    """The exception comes before the scheduler's step, so that step is not committed when the model is closed."""
    swap = config("nvme", "nvme")
    expected = undisturbed(swap)

    run = Run(infinity.offload(model(), swap | {"commit_every": every}))
    run.fails_after = 6
    with pytest.raises(RuntimeError, match="in the middle"):
        train_and_close(run)
    again = Run(infinity.resume(model(), swap | {"commit_every": every}))
    kept = again.done
    assert kept == (6 if every == 1 else 5)
    losses, states = again.train(STEPS).ended()
    assert same((run.losses[:kept] + losses, states), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("overlap", ["auto", "before_forward", "off"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_step_that_was_decided_has_the_one_before_it_on_disk(
    placement: tuple[str, str], overlap: str, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk: here nothing it has finished is seen before the next step must wait for it."""
    monkeypatch.setattr(Commits, "ready", False)
    swap = config(*placement, commit_every=1, overlap=overlap)
    run = Run(infinity.offload(model(), swap))
    for step in range(1, 6):
        run.train(step)
        assert max(generations_in(tmp_path / "swap"), default=0) == step - 1
    infinity.close(run.model)


def test_a_run_can_be_resumed_many_times(config: Any) -> None:
    swap = config("host", "nvme")
    expected = undisturbed(swap)
    losses: list[float] = []
    for until in range(1, STEPS + 1):
        start = infinity.resume if until > 1 else infinity.offload
        run = Run(start(model(), swap | {"commit_every": 1, "keep": 2})).train(until)
        assert len(run.losses) == 1
        losses += run.losses
        states = weights_of(run.model) | states_of(run.model)
        infinity.close(run.model)
    assert same((losses, states), expected)


def test_buffers_frozen_and_unused_parameters_and_skipped_steps_come_back(config: Any) -> None:
    """Running means, parameters without gradients, a NaN step, and momentum that begins after the resume."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.spare = nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 32)
            self.frozen = nn.Linear(32, 32)
            self.frozen.requires_grad_(False)
            self.unused = nn.Parameter(torch.randn(8192))  # tiles of its own, which no step touches

        def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
            x = self.linear(self.norm(x)) + self.frozen(x)
            return x + self.spare(x) if spare else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, spare)
            return x.square().mean()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net()

    def steps(net: nn.Module, optim: Any, first: int, end: int) -> None:
        for step in range(first, end):
            if step == 4:
                optim.param_groups[0]["momentum"] = 0.9
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            net(x * float("nan") if step == 2 else x, spare=step % 3 == 0).backward()
            optim.step()
            optim.zero_grad()

    def everything(net: nn.Module) -> dict[str, torch.Tensor]:
        result = weights_of(net) | states_of(net) | {name: value.clone() for name, value in net.named_buffers()}
        infinity.close(net)
        return result

    swap = config("nvme", "nvme", update={"tile": "16KiB"})
    net = infinity.offload(build(), swap)
    steps(net, infinity.SGD(net.parameters(), lr=0.1), 0, 7)
    expected = everything(net)
    for stop in range(1, 7):
        paths = {"nvme": {"paths": [swap["nvme"]["paths"][0] + str(stop)]}, "commit_every": 1}
        net = infinity.offload(build(), swap | paths)
        optim = infinity.SGD(net.parameters(), lr=0.1)
        steps(net, optim, 0, stop)
        skipped = optim.skipped_steps
        infinity.close(net)
        net = infinity.resume(Net(), swap | paths)
        optim = infinity.SGD(net.parameters(), lr=0.1)
        assert infinity.track(model=net) == stop
        assert optim.skipped_steps == skipped
        steps(net, optim, stop, 7)
        found = everything(net)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name].nan_to_num(), value.nan_to_num()), (stop, name)


def test_a_commit_moves_no_state_that_is_in_the_store(config: Any) -> None:
    """Bytes counted by the engine: a step writes the same with and without; what is in RAM is written once."""
    written: dict[tuple[str, int], int] = {}
    for weights in ("nvme", "host"):
        for every in (0, 1):
            swap = config(weights, "nvme", commit_every=every)
            swap["nvme"] = {"paths": [swap["nvme"]["paths"][0] + f"{weights}{every}"]}
            net, batch = llama()
            net = infinity.offload(net.bfloat16(), swap)
            optim = infinity.AdamW(net.parameters())
            for step in range(3):
                if step == 2:
                    infinity.synchronize(net)
                    before = infinity.statistics(net)
                net(**batch).loss.backward()
                optim.step()
                optim.zero_grad()
            if every:
                infinity.commit(net)
            infinity.synchronize(net)
            after = infinity.statistics(net)
            written[weights, every] = after.written_bytes - before.written_bytes
            weight_bytes = after.plan.layout.weight_bytes
            infinity.close(net)
    assert written["nvme", 1] == written["nvme", 0]
    assert written["host", 1] == written["host", 0] + weight_bytes


def test_the_plan_says_what_the_copies_take_and_reserves_it(config: Any) -> None:
    sizes = {}
    for keep in (1, 2):
        swap = config("host", "host", commit_every=1, keep=keep)
        swap["nvme"] = {"paths": [swap["nvme"]["paths"][0] + str(keep)]}
        net = infinity.offload(llama()[0], swap)
        plan = infinity.statistics(net).plan
        sizes[keep] = plan.layout.swap.nbytes
        assert plan.layout.swap.nbytes == (plan.layout.weight_bytes + plan.layout.state_bytes) * (keep + 1)
        held = Path(swap["nvme"]["paths"][0]) / "states.infinity-swap"
        assert held.stat().st_blocks * 512 >= plan.layout.swap.nbytes
        assert f"every step, {keep} kept, each state in {keep + 1} copies" in plan.describe()
        infinity.close(net)


def test_a_store_updated_in_place_is_refused(config: Any, tmp_path: Path) -> None:
    swap = config("nvme", "nvme")
    net = infinity.offload(llama()[0], swap)
    for name in ("store.infinity", "states.infinity-swap"):
        data = (tmp_path / "swap" / name).read_bytes()
        (tmp_path / name).write_bytes(data)
    infinity.close(net)
    (tmp_path / "swap").mkdir()
    for name in ("store.infinity", "states.infinity-swap"):
        (tmp_path / name).rename(tmp_path / "swap" / name)
    with pytest.raises(DirtyStoreError, match="updated in place"):
        infinity.resume(llama()[0], swap | {"commit_every": 1})
    with pytest.raises(ConfigError, match="set commit_every: 1"):
        infinity.resume(llama()[0], swap)


def test_a_new_run_refuses_a_directory_with_generations(config: Any) -> None:
    swap = config("nvme", "nvme", commit_every=1)
    Run(infinity.offload(model(), swap)).train(1).ended()
    with pytest.raises(StoreNotEmptyError, match="finetune --resume"):
        infinity.offload(model(), swap)
    run = Run(infinity.resume(model(), swap))
    assert run.done == 1
    infinity.close(run.model)


def test_what_does_not_fit_the_run_is_named(config: Any, tmp_path: Path) -> None:
    swap = config("nvme", "nvme", commit_every=1)
    with pytest.raises(ResumeError, match="no such directory"):
        infinity.resume(model(), swap)
    Run(infinity.offload(model(), swap)).train(1).ended()
    with pytest.raises(ResumeError, match="need one of"):
        infinity.resume(llama()[0], swap)
    with pytest.raises(ResumeError, match="keep|need one of"):
        infinity.resume(model(), swap | {"keep": 3})
    with pytest.raises(ResumeError, match="no generation 9; it has: 1"):
        infinity.resume(model(), swap, step=9)
    net = infinity.resume(model(), swap)
    with pytest.raises(ResumeError, match="trained with infinity.AdamW; it cannot be resumed with Adam"):
        infinity.Adam(net.parameters())
    infinity.close(net)
    net = infinity.resume(model(), swap)
    infinity.AdamW(net.parameters())
    with pytest.raises(ResumeError, match="did not track 'other'; it tracked 'LambdaLR#0', 'StatefulDataLoader#0'"):
        infinity.track(other=nn.Linear(1, 1), model=net)
    infinity.close(net)


def test_a_store_without_a_commit_is_begun_anew(config: Any) -> None:
    swap = config("nvme", "nvme", commit_every=5)
    run = Run(infinity.offload(model(), swap)).train(2)
    run.fails_after = 2
    with pytest.raises(RuntimeError, match="in the middle"):
        train_and_close(run)
    with pytest.raises(ResumeError, match="no such directory"):
        infinity.resume(model(), swap)
    Run(infinity.offload(model(), swap)).train(2).ended()


def test_tracking_says_what_cannot_be_kept(config: Any) -> None:
    net = infinity.offload(model(), config("nvme", "nvme", commit_every=1))
    with pytest.raises(ConfigError, match="StatefulDataLoader takes the same arguments"):
        infinity.track(DataLoader(Rows()), model=net)  # type: ignore[arg-type]

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [{"thing": object()}]}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match=r"deep\[0\].thing is a object"):
        infinity.track(Odd(), model=net)
    infinity.track(x=nn.Linear(1, 1), model=net)
    with pytest.raises(ConfigError, match="the name 'x' is in use already"):
        infinity.track(x=nn.Linear(1, 1), model=net)
    infinity.close(net)
    with pytest.raises(ModelError, match="no model is offloaded: call infinity.offload"):
        infinity.track(nn.Linear(1, 1))


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_failed_fdatasync_fails_the_generation_and_is_not_tried_again(
    engine: str, config: Any, tmp_path: Path
) -> None:
    from infinity import _native

    swap = config("nvme", "nvme", commit_every=1)
    swap["nvme"] = swap["nvme"] | {"engine": engine}
    fault = _native.Fault(2, "error", errno=5, operation="sync")
    run = Run(infinity.offload(model(), swap, faults=[fault]))
    with pytest.raises(InfinityError, match=r"generation 3 could not be made durable: fdatasync .*\(errno 5\).* is 2"):
        run.train(STEPS)
    with pytest.raises(InfinityError, match="generation 3"):
        run.train(STEPS)
    infinity.close(run.model)
    assert list(generations_in(tmp_path / "swap")) == [2]
    expected = undisturbed(config("nvme", "nvme") | {"nvme": {"paths": [str(tmp_path / "other")]}})
    again = Run(infinity.resume(model(), swap))
    assert again.done == 2
    losses, states = again.train(STEPS).ended()
    assert same((run.losses[:2] + losses, states), expected)


def test_load_pretrained_resumes_what_is_there(config: Any, tmp_path: Path) -> None:
    llama()[0].bfloat16().save_pretrained(tmp_path / "in")
    _, batch = llama()
    swap = config("nvme", "nvme", commit_every=1)
    losses = []
    for done in range(3):
        net = infinity.load_pretrained(tmp_path / "in", swap, resume="auto")
        optim = infinity.AdamW(net.parameters(), lr=1e-2)
        assert infinity.track(model=net) == done
        loss = net(**batch).loss
        loss.backward()
        optim.step()
        losses.append(loss.item())
        infinity.close(net)
    net = infinity.load_pretrained(tmp_path / "in", config("nvme", "nvme") | {"nvme": {"paths": [str(tmp_path / "b")]}})
    optim = infinity.AdamW(net.parameters(), lr=1e-2)
    for expected in losses:
        optim.zero_grad()
        loss = net(**batch).loss
        loss.backward()
        optim.step()
        assert loss.item() == expected
    infinity.close(net)


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_failed_write_of_what_is_in_ram_fails_the_commit(engine: str, config: Any, tmp_path: Path) -> None:
    from infinity import _native

    swap = config("host", "host", commit_every=5)
    swap["nvme"] = swap["nvme"] | {"engine": engine}
    fault = _native.Fault(3, "error", errno=5, operation="write")
    run = Run(infinity.offload(model(), swap, faults=[fault])).train(1)
    with pytest.raises(InfinityError, match="errno 5"):
        infinity.commit(run.model)
    assert not generations_in(tmp_path / "swap")
    infinity.close(run.model)
