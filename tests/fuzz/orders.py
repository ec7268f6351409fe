"""Training loops that have their operations in random order, are killed at a random place and are resumed.

`python -m tests.fuzz.orders SEED [COUNT]` runs cases, one after the other. Each case has an undisturbed run, a run that
is killed (SIGKILL), and a run that resumes from its store, each in its own process. The resumed run must have:

* the losses, weights and states of the undisturbed run, and no warning, if every iteration has one of two orders. In
  the first order, the iteration takes one item of a tracked loader and then makes one step. In the second order, the
  iteration ends with a call of `infinity.commit`.
* the same results, or a warning at the resume, if an iteration has another order. The warning says that the states may
  have been saved at another point of the loop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process imports _dynamo
from torch import nn

import infinity
from infinity.access.exact import exact_value
from infinity.coordinator import registry
from infinity.io.directory import generations_in
from tests.conftest import states_of, weights_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader

WITHOUT_WRITES = ("evaluate", "look", "draw")
"""Operations that may be between a forward and its backward."""
WIDTH, ITERATIONS = 8, 4
DOUBT = "its loop may have been elsewhere"

BETWEEN = ("write", "put back", "evaluate", "look", "fail", "draw")
"""Operations that may be anywhere.

`write` writes new weights. `put back` changes weights and restores them. `evaluate` is a forward without a graph that
draws random numbers. `look` is a forward with a graph but without a backward. `fail` is a forward that raises. `draw`
draws random numbers.
"""


@dataclass(frozen=True)
class Case:
    """Settings of a case.

    Attributes:
        body: names of the operations of the loop body.
        tracked: whether infinity tracks the loader.
        exact: whether a resumed run must end in the bits of the undisturbed run.
        killed: iteration in which the run is killed, and index of the operation in the loop body.
    """

    seed: int
    body: tuple[str, ...]
    tracked: bool
    exact: bool
    killed: tuple[int, int]
    config: dict[str, Any]

    def describe(self) -> str:
        doubt = "exact" if self.exact else "exact, or it says that it is not"
        return f"{' · '.join(self.body)}; {doubt}; killed at {self.killed}; {self.config}"


def make(seed: int) -> Case:
    draw = random.Random(f"order {seed}")

    def some(share: float, kinds: tuple[str, ...] = BETWEEN) -> list[str]:
        return [draw.choice(kinds) for _ in range(2) if draw.random() < share]

    share = draw.choice([0.1, 0.4, 0.8])
    kind = draw.choice(["plain"] * 6 + ["commit", "untracked", "two steps", "two items", "ahead", "left"])
    a_pass = ["forward", *some(share / 2, WITHOUT_WRITES), "backward"]
    after = ["schedule", *some(share)]
    draw.shuffle(after)
    body = ["next", *some(share), *a_pass, *some(share / 2), "step", *after]
    if kind == "two items":
        body = ["next", *some(share), *a_pass, "next", *a_pass, "step", *after]
    if kind == "two steps" or (kind == "commit" and draw.random() < 0.5):
        body = ["next", *some(share), *a_pass, "step", *some(share), *a_pass, "step", *after]
    if kind == "ahead":  # this iteration takes the item of the next iteration
        seen = ("schedule", "evaluate", "draw")  # no forward or write: they would count for the new item
        body = [*a_pass, "step", *(part for part in after if part in seen)]
        body.insert(draw.randrange(1, len(body)), "next")
    if kind == "left":  # this leaves gradients, which the next step includes
        body += a_pass
    if kind == "commit":
        body.append("commit")
    states = draw.choice(["nvme", "host"])
    every = draw.choice([1, 1, 2, 3]) if kind != "commit" else 1000  # only the operation `commit` commits
    config = {"weights": draw.choice(["nvme", "host"]), "optimizer": states, "commit_every": every}
    if draw.random() < 0.3:
        config["overlap"] = draw.choice(["off", "before_forward", "during_backward"])
    return Case(
        seed,
        tuple(body),
        tracked=kind != "untracked" and (kind != "commit" or draw.random() < 0.5),
        exact=kind in ("plain", "commit", "two items"),
        killed=(draw.randrange(1, ITERATIONS), draw.randrange(len(body))),
        config=config,
    )


class Net(nn.Module):
    """A model that is in bf16, so that it has a master, and that has a buffer and draws random numbers in
    its forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(2)])
        self.register_buffer("seen", torch.zeros(()))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x.bfloat16()).relu(), 0.2, self.training)
            if self.fails:
                raise ValueError("a forward that fails")
        if self.training:
            self.seen += x.detach().float().mean()
        return (x.float() - 1).square().mean()


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Count:
    """Number of completed iterations. Without a tracked loader, this number selects the next item."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Loop:
    """One life of a case's loop."""

    def __init__(self, case: Case, swap: dict[str, Any], *, resumed: bool) -> None:
        torch.manual_seed(7 if resumed else 0)
        self.case = case
        self.model: Any = (infinity.resume if resumed else infinity.offload)(Net(), swap)
        self.optim = infinity.AdamW(self.model.parameters(), lr=3e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.8)
        self.loader: Any = StatefulDataLoader(Rows(), batch_size=3, shuffle=True)
        self.items: Any = None
        self.count = Count()
        self.item = self.loss = torch.zeros(())
        self.losses: dict[int, list[str]] = {}
        tracked = {"loader": self.loader} if case.tracked else {}
        infinity.track(self.scheduler, count=self.count, model=self.model, **tracked)
        if case.body[0] != "next":
            self.next()

    def run(self, killed: tuple[int, int] | None = None) -> Loop:
        while self.count.value < ITERATIONS:
            for number, part in enumerate(self.case.body):
                if (self.count.value, number) == killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                getattr(self, part.replace(" ", "_"))()
            if "commit" not in self.case.body:
                self.count.value += 1
        return self

    def next(self) -> None:
        if not self.case.tracked:
            self.item = torch.stack([Rows()[(self.count.value * 3 + index) % len(Rows())] for index in range(3)])
            return
        for _ in range(3):  # a resumed loader may be at the end of its first pass
            if self.items is not None:
                try:
                    self.item = next(self.items)
                    return
                except StopIteration:
                    pass
            self.items = iter(self.loader)
        raise AssertionError("a pass without an item")

    def forward(self) -> None:
        self.loss = self.model(self.item)
        self.losses.setdefault(self.count.value, []).append(self.loss.item().hex())

    def backward(self) -> None:
        self.loss.backward()

    def step(self) -> None:
        self.optim.step()
        self.optim.zero_grad()

    def schedule(self) -> None:
        self.scheduler.step()

    def commit(self) -> None:
        self.count.value += 1
        infinity.commit(self.model)

    def write(self) -> None:
        with infinity.gathered(self.model, write=True):
            self.model.blocks[0].weight.data.mul_(1.25)

    def put_back(self) -> None:
        with infinity.gathered(self.model, write=True):
            kept = self.model.blocks[1].weight.data.clone()
            self.model.blocks[1].weight.data.add_(0.125)
        with torch.no_grad():
            self.model(self.item)
        with infinity.gathered(self.model, write=True):
            self.model.blocks[1].weight.data.copy_(kept)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            found = self.model(torch.randn(2, WIDTH))
        self.model.train()
        self.losses.setdefault(self.count.value, []).append(found.item().hex())

    def look(self) -> None:
        self.losses.setdefault(self.count.value, []).append(self.model(self.item).item().hex())

    def fail(self) -> None:
        self.model.fails = True
        with contextlib.suppress(ValueError):
            self.model(self.item)
        self.model.fails = False

    def draw(self) -> None:
        torch.rand(3)


@dataclass(frozen=True)
class Life:
    """Results of a life.

    Attributes:
        began: index of the first iteration.
    """

    began: int
    losses: dict[str, list[str]]
    states: dict[str, str]
    doubted: bool


def live(case: Case, swap: dict[str, Any], *, resumed: bool, killed: tuple[int, int] | None = None) -> Life:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infinity").addHandler(handler)
    logging.getLogger("infinity").setLevel(logging.WARNING)
    loop = Loop(case, swap, resumed=resumed)
    began = loop.count.value
    loop.run(killed)
    coordinator = registry.coordinator_of(loop.model)
    states = weights_of(loop.model) | states_of(loop.model) | {"seen": loop.model.seen.clone()}
    states |= {f"{place.spec.name}.master": exact_value(coordinator, place) for _, place in coordinator.places()}
    infinity.close(loop.model)
    bits = {name: str(value.reshape(-1).view(torch.uint8).tolist()) for name, value in states.items()}
    losses = {str(number): found for number, found in loop.losses.items()}
    return Life(began, losses, bits, doubted=any(DOUBT in each for each in said))


def apart(act: Callable[[], Life], into: Path) -> Life | str:
    """Run `act` in a forked process and return its result. If `act` fails, return the traceback; if the process was
    killed, return "".
    """
    pid = os.fork()
    if pid == 0:
        try:
            into.write_text(json.dumps(act().__dict__))
        except BaseException:
            into.write_text(json.dumps(traceback.format_exc()))
        os._exit(0)
    os.waitpid(pid, 0)
    if not into.exists():
        return ""
    found = json.loads(into.read_text())
    return found if isinstance(found, str) else Life(**found)


def judge(case: Case) -> str:
    """Run a case. Return "" if the case passes; otherwise return its problem."""
    place = Path(tempfile.mkdtemp(prefix="order-"))
    try:
        return _judge(case, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _judge(case: Case, place: Path) -> str:
    def swap(name: str) -> dict[str, Any]:
        small = {"memory": {"device": "1MiB", "host": "64MiB"}, "update": {"tile": "16KiB", "threads": 1}}
        return small | {"nvme": {"paths": [str(place / name)]}} | case.config

    whole = apart(lambda: live(case, swap("whole"), resumed=False), place / "whole.json")
    cut = apart(lambda: live(case, swap("cut"), resumed=False, killed=case.killed), place / "cut.json")
    if isinstance(whole, str) or not isinstance(cut, str) or cut:
        return f"undisturbed: {whole}\nkilled: {cut}"
    if not generations_in(place / "cut"):
        return ""
    again = apart(lambda: live(case, swap("cut"), resumed=True), place / "again.json")
    if isinstance(again, str):
        return f"resumed: {again}"
    problems = [] if again.states == whole.states else ["other states"]
    problems += [
        f"iteration {number}: {found} instead of {whole.losses.get(number)}"
        for number, found in again.losses.items()
        if found != whole.losses.get(number)
    ]
    if again.doubted and case.exact:
        return "it doubts where it was: " + "; ".join(problems)
    return "" if again.doubted else "; ".join(problems)


def main(first: int, count: int = 1) -> int:
    """Print one line of JSON for each case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("infinity").propagate = False
    failed = 0
    for seed in range(first, first + count):
        case = make(seed)
        problem = judge(case)
        failed += bool(problem)
        said = f"seed {seed}: {case.describe()}\n{problem}" if problem else ""
        print(json.dumps({"seed": seed, "problem": said}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:])), 1))
