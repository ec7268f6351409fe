"""Loops as people write them, ended anywhere and resumed: the bits of the loop that never stopped."""

from __future__ import annotations

import gc
import logging
import random
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity import _native
from infinity.cli.main import main
from infinity.errors import ConfigError, ModelError, ResumeError, StoreNotEmptyError, SwapIOError
from infinity.io import atomic_file
from infinity.io.directory import SWAP_NAME, generations_in
from tests import sampling
from tests.conftest import states_of, weights_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x).relu(), 0.2, self.training)
        return self.norm(x).square().mean() + x.abs().mean()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class StopError(Exception):
    """Where a loop is left."""


class Loop:
    """A loop whose random numbers are the global ones: shuffling, dropout, and what evaluation draws."""

    def __init__(self, model: nn.Module, stop: Callable[[str, int], None] = lambda where, done: None) -> None:
        self.model = model
        self.stop = stop
        self.losses: dict[int, str] = {}
        self.optim = infinity.AdamW(model.parameters(), lr=1e-2)
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def run(self) -> Loop:
        raise NotImplementedError

    def step(self, batch: torch.Tensor) -> float:
        loss = self.model(batch)
        loss.backward()
        self.stop("backward", self.done)
        self.optim.step()
        self.optim.zero_grad()
        self.losses[self.done] = loss.item().hex()
        self.done += 1
        self.stop("step", self.done)
        return float(loss.detach())


class PerPass(Loop):
    """A scheduler that steps once a pass, on the mean loss of it, after an evaluation that draws."""

    def make(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optim, factor=0.5, patience=0)
        self.loader = StatefulDataLoader(Rows(), batch_size=4, shuffle=True)
        self.passes = Counter()
        self.done = infinity.track(self.scheduler, self.loader, passes=self.passes, model=self.model)

    def run(self) -> Loop:
        while self.passes.value < 3:
            losses = []
            for batch in self.loader:
                losses.append(self.step(batch))
            self.stop("pass", self.done)
            with torch.no_grad():
                self.model.eval()
                self.losses[-self.done] = float(self.model(torch.randn(4, WIDTH))).hex()
                self.model.train()
            self.scheduler.step(1.0)
            self.stop("schedule", self.done)
            self.passes.value += 1
        return self


class PerStep(Loop):
    """A scheduler that steps with the optimizer, and a count of its own; numpy and Python draw, too."""

    def make(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.7)
        self.loader = StatefulDataLoader(Rows(), batch_size=4, shuffle=True)
        self.passes = Counter()
        self.done = infinity.track(self.loader, self.scheduler, passes=self.passes, model=self.model)

    def run(self) -> Loop:
        while self.done < 9:
            for batch in self.loader:
                self.step(batch * (1 + random.random()) + float(np.random.rand()))
                self.scheduler.step()
                self.stop("schedule", self.done)
                if self.done % 3 == 0:
                    with torch.no_grad():
                        self.model(torch.randn(4, WIDTH))
        return self


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def ended(loop: Loop) -> tuple[dict[int, str], dict[str, torch.Tensor]]:
    states = weights_of(loop.model) | states_of(loop.model)
    states |= {name: buffer.clone() for name, buffer in loop.model.named_buffers()}
    infinity.close(loop.model)
    return loop.losses, states


def fresh(seed: int = 0) -> nn.Module:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return Net()


def config(path: Path, **overrides: Any) -> dict[str, Any]:
    return {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "1MiB", "host": "64MiB"},
        "nvme": {"paths": [str(path)]},
        "update": {"tile": "16KiB", "threads": 1},
        "commit_every": 1,
    } | overrides


def stop_at(where: str, number: int) -> Callable[[str, int], None]:
    def stop(place: str, done: int) -> None:
        if (place, done) == (where, number):
            raise StopError

    return stop


def end_badly(loop: Loop) -> None:
    try:
        loop.run()
    finally:
        infinity.close(loop.model)


PLACES = {PerPass: ["backward", "step", "pass", "schedule"], PerStep: ["backward", "step", "schedule"]}


def left_at(places: list[str], numbers: tuple[int, ...]) -> list[tuple[str, int]]:
    """Places and steps to leave a loop at: each place and each step once, all pairs in the long forms."""
    pairs = [(place, number) for number in numbers for place in places]
    few = list(zip(places, (3, numbers[0], numbers[-1], 3), strict=False))  # a pass ends after three steps
    return [pair for pair in pairs if pair in {*few, *sampling.some([each for each in pairs if each not in few])}]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", [PerPass, PerStep])
@pytest.mark.parametrize("every", [1, 2])
def test_wherever_a_loop_is_left_it_goes_on_to_the_same_bits(kind: type[Loop], every: int, tmp_path: Path) -> None:
    """Left by an exception at every place around every step: in the middle of a pass, at its border, and after it."""
    losses, states = ended(kind(infinity.offload(fresh(), config(tmp_path / "undisturbed"))).run())
    resumed = []
    for where, number in left_at(PLACES[kind], (2, 3, 6) if every == 1 else (3,)):
        swap = config(tmp_path / f"{where}{number}", commit_every=every)
        loop = kind(infinity.offload(fresh(), swap), stop_at(where, number))
        try:
            end_badly(loop)
        except StopError:
            pass
        else:
            continue
        if not generations_in(tmp_path / f"{where}{number}"):
            assert number <= every
            continue
        again = kind(infinity.resume(fresh(seed=7), swap))
        resumed.append(number - again.done)
        assert again.done <= number
        found, others = ended(again.run())
        mine = loop.losses | found
        assert mine == losses, (where, number)
        assert all(torch.equal(others[name], value) for name, value in states.items()), (where, number)
    assert len(resumed) > 1
    assert max(resumed) <= every, "no more than the running steps are lost"


@pytest.mark.parametrize("kind", [PerPass, PerStep])
def test_a_loop_that_ends_well_can_be_continued(kind: type[Loop], tmp_path: Path) -> None:
    """Ended between two iterations by breaking out of it, closed, resumed: also exactly at the end of a pass."""

    losses, states = ended(kind(infinity.offload(fresh(), config(tmp_path / "undisturbed"))).run())
    for number in (2, 3, 4, 6, 7):
        swap = config(tmp_path / str(number))
        loop = kind(infinity.offload(fresh(), swap), stop_at("schedule", number))
        try:
            loop.run()
        except StopError:
            if kind is PerPass:
                loop.passes.value += 1  # what the iteration had left to do
        else:
            infinity.close(loop.model)
            continue
        infinity.close(loop.model)
        again = kind(infinity.resume(fresh(seed=7), swap))
        assert again.done == number
        found, others = ended(again.run())
        if kind is PerStep and number % 3 == 0:
            continue  # its evaluation was cut off
        assert loop.losses | found == losses, number
        assert all(torch.equal(others[name], value) for name, value in states.items()), number


def test_two_optimizers_that_step_in_turn_commit_at_the_top_of_the_loop(tmp_path: Path) -> None:
    def build(model: nn.Module) -> tuple[list[Any], Any]:
        parts = [list(model.blocks[0].parameters()), [*model.blocks[1].parameters(), *model.norm.parameters()]]
        optims = [infinity.AdamW(parts[0], lr=1e-2), infinity.SGD(parts[1], lr=1e-2, momentum=0.9)]
        loader = StatefulDataLoader(Rows(), batch_size=4, shuffle=True)
        return optims, loader

    def train(model: nn.Module, optims: list[Any], loader: Any, first: int, end: int, cut: bool = False) -> list[str]:
        losses = []
        while first < end:
            for batch in loader:
                for index, optim in enumerate(optims):
                    loss = model(batch)
                    loss.backward()
                    if cut and first == end - 1 and index:
                        raise StopError
                    optim.step()
                    for each in optims:
                        each.zero_grad()
                    losses.append(loss.item().hex())
                first += 1
                if first == end:
                    break
        return losses

    def train_and_close(model: nn.Module, optims: list[Any], loader: Any, cut: int) -> None:
        try:
            train(model, optims, loader, 0, cut, cut=True)
        finally:
            infinity.close(model)

    model = infinity.offload(fresh(), config(tmp_path / "a"))
    optims, loader = build(model)
    infinity.track(loader, model=model)
    expected = train(model, optims, loader, 0, 6)
    states = weights_of(model)
    infinity.close(model)
    for every in (1, 3):
        for cut in range(2, 6):
            swap = config(tmp_path / f"{every}{cut}", commit_every=every)
            model = infinity.offload(fresh(), swap)
            optims, loader = build(model)
            infinity.track(loader, model=model)
            with pytest.raises(StopError):
                train_and_close(model, optims, loader, cut)
            if not generations_in(Path(swap["nvme"]["paths"][0])):
                assert cut <= every
                continue
            model = infinity.resume(fresh(seed=5), swap)
            optims, loader = build(model)
            done = infinity.track(loader, model=model)
            assert done % 2 == 0, "whole iterations, of two steps each"
            assert done >= 2 * (cut - 1) - (2 if every == 1 else 4)
            assert train(model, optims, loader, done // 2, 6) == expected[done:]
            assert all(torch.equal(value, states[name]) for name, value in weights_of(model).items())
            infinity.close(model)


def trained(swap: dict[str, Any], steps: int, **resume: Any) -> int:
    """Do some steps of a run, from wherever it is, and return the number of steps that were done before."""
    there = generations_in(Path(swap["nvme"]["paths"][0]))
    model = infinity.resume(fresh(), swap, **resume) if there else infinity.offload(fresh(), swap)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    done = infinity.track(model=model)
    for step in range(done, done + steps):
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).backward()
        optim.step()
        optim.zero_grad()
    infinity.close(model)
    return done


def test_a_store_whose_first_disk_is_not_there_is_refused(tmp_path: Path) -> None:
    """Neither missing, nor empty as an unmounted directory is, nor of another run: the second part is left alone."""
    swap = config(tmp_path / "one")
    swap["nvme"]["paths"].append(str(tmp_path / "two"))
    trained(swap, 2)
    before = (tmp_path / "two" / SWAP_NAME).read_bytes()
    (tmp_path / "one").rename(tmp_path / "away")
    for make in (lambda: None, lambda: (tmp_path / "one").mkdir()):
        make()
        with pytest.raises(StoreNotEmptyError, match="two holds a part of an earlier run's store"):
            infinity.offload(fresh(), swap)
        assert (tmp_path / "two" / SWAP_NAME).read_bytes() == before
    (tmp_path / "one").rmdir()
    (tmp_path / "away").rename(tmp_path / "one")
    swapped = swap | {"nvme": {"paths": swap["nvme"]["paths"][::-1]}}
    with pytest.raises(ResumeError, match=r"is part 2 of 2 of its store, and nvme.paths names it as part 1 of 2"):
        infinity.resume(fresh(), swapped)
    with pytest.raises(ResumeError, match="need one of|part 1 of 2"):
        infinity.resume(fresh(), swap | {"nvme": {"paths": swap["nvme"]["paths"][:1]}})
    assert trained(swap, 1) == 2


def test_a_resume_fsyncs_the_directory_before_it_goes_on(tmp_path: Path) -> None:
    trained(config(tmp_path / "swap"), 2)
    acts: list[tuple[str, Path]] = []
    with atomic_file.observed(lambda name, path, *_: acts.append((name, path))):
        model = infinity.resume(fresh(), config(tmp_path / "swap"))
    assert ("end fsync directory", tmp_path / "swap") in acts
    infinity.close(model)


def test_a_resume_that_fails_or_does_nothing_removes_nothing(tmp_path: Path) -> None:
    swap = config(tmp_path / "swap", keep=3)
    trained(swap, 4)
    assert list(generations_in(tmp_path / "swap")) == [4, 3, 2]
    other = fresh()
    other.register_buffer("more", torch.zeros(3))
    with pytest.raises(ResumeError, match="buffer 'more' is only in the model"):
        infinity.resume(other, swap, step=3)
    with pytest.raises(ResumeError, match=r"stored is \['exp_avg', 'exp_avg_sq'\] there|need one of"):
        infinity.resume(fresh(), swap, step=3, optimizer="lion")
    with pytest.raises(SwapIOError, match="errno 5"):
        infinity.resume(fresh(), swap, faults=[_native.Fault(0, "error", errno=5, operation="read")])
    infinity.close(infinity.resume(fresh(), swap, step=3))
    assert list(generations_in(tmp_path / "swap")) == [4, 3, 2]
    assert trained(swap, 1, step=3) == 3
    assert list(generations_in(tmp_path / "swap")) == [4, 3, 2]
    assert trained(swap, 1, step=2) == 2
    assert list(generations_in(tmp_path / "swap")) == [3, 2]


def test_states_of_another_form_are_moved_as_the_error_says(tmp_path: Path) -> None:
    swap, out = config(tmp_path / "swap"), tmp_path / "out"
    trained(swap, 2)
    with pytest.raises(
        ResumeError, match=r"another form: moments.*`infinity checkpoint export` and infinity\.offload_f"
    ):
        infinity.resume(fresh(), swap | {"moments": "bf16"})
    assert main(["checkpoint", "export", str(tmp_path / "swap"), "--output", str(out)]) == 0
    model = infinity.offload_from_checkpoint(fresh(), out, config(tmp_path / "other", moments="bf16"))
    infinity.AdamW(model.parameters())
    assert infinity.track(model=model) == 2
    infinity.close(model)
    assert trained(swap, 1) == 2


def test_where_there_are_no_models_or_several_track_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model is offloaded: call infinity\.offload\(model, config\) before"):
        infinity.track()
    models = [infinity.offload(fresh(), config(tmp_path / name)) for name in ("one", "two")]
    with pytest.raises(
        ModelError, match=r"there are 2 offloaded models; name one: infinity\.track\(\.\.\., model=model"
    ):
        infinity.track(counter=Counter())
    for model in models:
        assert infinity.track(counter=Counter(), model=model) == 0
        infinity.close(model)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_manifest_that_a_crash_left_behind_goes_at_the_next_resume(checksums: bool, tmp_path: Path) -> None:
    swap = config(tmp_path / "swap")
    swap["nvme"]["checksums"] = checksums
    trained(swap, 1)
    old = generations_in(tmp_path / "swap")[1]
    saved = old.read_bytes()
    trained(swap, 1)
    old.write_bytes(saved)
    trained(swap, 2)
    assert list(generations_in(tmp_path / "swap")) == [4]


def test_a_model_that_is_collected_leaves_a_whole_generation(tmp_path: Path) -> None:
    swap = config(tmp_path / "swap")

    def train() -> None:
        model = infinity.offload(fresh(), swap)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        model(torch.randn(4, WIDTH)).backward()
        optim.step()

    train()
    gc.collect()
    assert trained(swap, 1) == 1


def test_an_optimizer_that_was_refused_can_be_made_again(tmp_path: Path) -> None:
    swap = config(tmp_path / "swap")
    trained(swap, 3)
    model = infinity.resume(fresh(), swap)
    with pytest.raises(ResumeError, match="cannot be resumed with Adam"):
        infinity.Adam(model.parameters())
    for _ in range(2):  # as a notebook's cell that is run again
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        assert [state["step"] for state in optim.state.values()] == [3] * 6
    old, optim = optim, infinity.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, WIDTH)).backward()
    with pytest.raises(ModelError, match="replaced it"):
        old.step()
    optim.step()
    infinity.close(model)


def test_parameter_groups_that_are_added_take_up_their_states(tmp_path: Path) -> None:
    swap = config(tmp_path / "swap")
    trained(swap, 2)
    model = infinity.resume(fresh(), swap)
    optim = infinity.AdamW(model.blocks.parameters(), lr=1e-2)
    with pytest.raises(ResumeError, match="give the same parameters in the same groups"):
        model(torch.randn(4, WIDTH))
    infinity.close(model)
    model = infinity.resume(fresh(), swap)
    optim = infinity.AdamW(model.blocks.parameters(), lr=1e-2)
    optim.add_param_group({"params": list(model.norm.parameters())})
    assert {state["step"] for state in optim.state.values()} == {2}
    infinity.close(model)


def test_hyperparameters_come_back_without_track_and_may_be_changed_after_it(tmp_path: Path, caplog: Any) -> None:
    swap = config(tmp_path / "swap")
    model = infinity.offload(fresh(), swap)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
    infinity.track(scheduler, model=model)
    for _ in range(2):
        model(torch.randn(4, WIDTH)).backward()
        optim.step()
        scheduler.step()
    infinity.close(model)
    model = infinity.resume(fresh(), swap)
    optim = infinity.AdamW(model.parameters(), lr=1.0)
    with caplog.at_level(logging.WARNING, logger="infinity"):
        model(torch.randn(4, WIDTH)).backward()
    assert optim.param_groups[0]["lr"] == 1e-2 * 0.25
    assert "the run that is resumed tracked ExponentialLR#0, and nothing has restored" in caplog.text
    infinity.close(model)
    model = infinity.resume(fresh(), swap)
    optim = infinity.AdamW(model.parameters(), lr=1.0)
    infinity.track(torch.optim.lr_scheduler.ExponentialLR(optim, 0.5), model=model)
    optim.param_groups[0]["lr"] = 3e-3
    model(torch.randn(4, WIDTH)).backward()
    assert optim.param_groups[0]["lr"] == 3e-3
    infinity.close(model)


def test_an_object_whose_state_fails_is_named_and_stops_the_run(tmp_path: Path) -> None:
    class Fails(Counter):
        def state_dict(self) -> dict[str, Any]:
            if self.value:
                raise ValueError("no state today")
            return {}

    model = infinity.offload(fresh(), config(tmp_path / "swap"))
    optim, fails = infinity.AdamW(model.parameters()), Fails()
    infinity.track(fails=fails, model=model)
    model(torch.randn(4, WIDTH)).backward()
    optim.step()
    fails.value = 1
    with pytest.raises(ConfigError, match="the state of fails cannot be kept: no state today"):
        model(torch.randn(4, WIDTH))
    infinity.close(model)


def test_a_closed_run_holds_none_of_its_objects(offload: Any) -> None:
    """They go with the loop, and do not wait for the garbage collector as the model does."""
    loop = PerPass(offload(Net(), commit_every=1))
    loop.step(next(iter(loop.loader)))
    model, loader = loop.model, weakref.ref(loop.loader)
    infinity.close(model)
    gc.disable()
    try:
        del loop
        assert loader() is None
    finally:
        gc.enable()


def test_a_buffer_of_another_dtype_is_not_converted_silently(tmp_path: Path) -> None:
    def model(dtype: torch.dtype) -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        net.register_buffer("seen", torch.full((2,), 1 / 3, dtype=dtype))
        return net

    swap = config(tmp_path / "swap")
    net = infinity.offload(model(torch.float64), swap)
    optim = infinity.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 8)).sum().backward()
    optim.step()
    infinity.close(net)
    with pytest.raises(ResumeError, match=r"'seen' is \(2,\), torch.float32 here and \(\(2,\), torch.float64\) in"):
        infinity.resume(model(torch.float32), swap)
