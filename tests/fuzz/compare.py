"""One case from its seed to its verdict: the same loop on plain torch and on infinity must end in the same bits."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from tests.conftest import require_no_leaks, states_of, weights_of
from tests.fuzz import configs, gradients, loops, models
from tests.fuzz.loops import Log, Loop
from tests.fuzz.models import Net
from tests.fuzz.reference import USES, Reference
from tests.mixture import in_plain_torch

_NORM_TOLERANCE = 1e-12  # norms are sums in fp64 that are added in another order


@dataclass(frozen=True)
class Case:
    """A model's seed, a loop and a config.

    Attributes:
        fixed: options of the swap config that do not change during the run.
    """

    seed: int
    fixed: dict[str, Any]
    loop: Loop

    def model(self, values: int = 0) -> Net:
        return models.make(self.seed, values=values)

    @property
    def is_fp32(self) -> bool:
        """Whether the model and the moments are fp32. torch then rounds in the same places as infinity."""
        return self.fixed["moments"] == "fp32" and all(p.dtype == torch.float32 for p in self.model().parameters())

    def describe(self) -> str:
        model = self.model()
        lines = [f"{model.width} wide, {'tokens' if model.tokens else 'numbers'}: {', '.join(model.traits)}"]
        loop = self.loop
        lines.append(f"{loop.rule} {loop.groups} clip={loop.clip} hint={loop.hint} scheduler={loop.scheduler}")
        lines.append(str(loop.freezing))
        lines += [f"  {iteration}" for iteration in loop.iterations]
        return "\n".join([*lines, str(self.fixed)])


def make(seed: int) -> Case:
    rng = random.Random(f"config {seed}")
    fixed = configs.fixed(rng)
    loop = loops.make(seed, len(models.make(seed).visits), resumable=fixed["commit_every"] > 0)
    if loop.rule == "Adagrad":
        fixed["moments"] = "fp32"
    return Case(seed, fixed, loop)


class Plain:
    """A model in plain torch, with an optimizer that has infinity's arithmetic."""

    def __init__(self, case: Case, restarts: dict[int, int]) -> None:
        self._restarts = restarts
        self._kept: dict[int, Any] = {}
        self.model = in_plain_torch(case.model())
        exact = {parameter for parameter in self.model.parameters() if parameter.dim() < 2}
        for module in self.model.modules():
            exact |= set(module.parameters(recurse=False)) if isinstance(module, nn.Embedding) else set()
        loop = case.loop
        options = {"max_grad_norm": loop.clip, "moments": case.fixed["moments"], "exact": exact} | loop.defaults
        self.optimizer = Reference(loops.grouped(loop, self.model), loop.rule, **options)
        self.scheduler = loops.schedule(loop, self.optimizer)

    def _now(self) -> Any:
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return copy.deepcopy((self.model.state_dict(), self.optimizer.everything(), scheduler))

    def top(self) -> None:
        self._kept.setdefault(self.optimizer.steps, self._now())

    def restart(self, back: int, index: int) -> int:
        self.top()  # this keeps the current state, if it is not kept yet
        step = self._restarts[index]
        if step == self.optimizer.steps:
            return step
        model, optimizer, scheduler = copy.deepcopy(self._kept[step])
        self.model.load_state_dict(model)
        self.optimizer.take(optimizer)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(scheduler)
        self._kept = {at: kept for at, kept in self._kept.items() if at <= step}
        self.optimizer.zero_grad()
        return step

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def gradients(self, parameters: Sequence[nn.Parameter], *, write: bool) -> AbstractContextManager[None]:
        return gradients.lent(self.optimizer.gradients, parameters)


class Offloaded:
    """The same model, offloaded by infinity."""

    def __init__(self, case: Case, directory: Path) -> None:
        self._case = case
        self._rng = random.Random(f"swap {case.seed}")
        self._paths = [directory / f"swap{index}" for index in range(self._rng.choice([1, 1, 2]))]
        self._lives = 0
        self.configs: list[dict[str, Any]] = []
        self._live(None)

    def _live(self, step: int | None) -> None:
        """Begin the run, or resume it."""
        case, loop = self._case, self._case.loop
        model = case.model(values=self._lives)
        given = {"accumulates": loop.accumulates or model.in_pieces}
        config = configs.make(self._rng, case.fixed, model, self._paths, **given)
        self.configs.append(config)
        self.model = infinity.offload(model, config) if not self._lives else infinity.resume(model, config, step=step)
        self._lives += 1
        make: Any = getattr(infinity, loop.rule)
        options = {"max_grad_norm": loop.clip, "accumulation_steps": loop.hint} | loop.defaults
        self.optimizer = make(loops.grouped(loop, self.model), **options)
        self.scheduler = loops.schedule(loop, self.optimizer)
        named = {} if self.scheduler is None else {"scheduler": self.scheduler}
        infinity.track(model=self.model, **named)

    def top(self) -> None:
        return

    def restart(self, back: int, index: int) -> int:
        coordinator = registry.coordinator_of(self.model)
        infinity.close(self.model)
        assert coordinator.resources.generations is not None
        made = sorted(coordinator.resources.generations._kept)
        step = made[max(len(made) - 1 - back, 0)]
        self._live(step)
        return step

    def accumulating(self) -> AbstractContextManager[Any]:
        return infinity.no_sync(self.model)

    def gradients(self, parameters: Sequence[nn.Parameter], *, write: bool) -> AbstractContextManager[None]:
        return infinity.gathered(self.model, *parameters, write=write, grads=True)

    def close(self) -> None:
        infinity.close(self.model, discard=True)
        for parameter in self.model.parameters():  # hooks of parameters hide the run from the garbage collector
            parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None


@dataclass
class Verdict:
    """Result of a case.

    Attributes:
        problems: descriptions of the differences.
        configs: swap configs of the run, one for each process life (a run starts a new life when it is resumed).
        moved: whether at least one weight changed.
    """

    seed: int
    problems: list[str] = field(default_factory=list)
    configs: list[dict[str, Any]] = field(default_factory=list)
    moved: bool = False


def judge(case: Case, *, distortion: float = 1.0) -> Verdict:
    """Run a case both ways and compare.

    Args:
        case: the case.
        distortion: factor of the learning rate of one param group in the plain run. A value other than 1 must cause
            problems.
    """
    verdict = Verdict(case.seed)
    with tempfile.TemporaryDirectory(prefix="infinity-fuzz-", dir=_where(case.seed)) as directory:
        offloaded = None
        try:
            offloaded = Offloaded(case, Path(directory))
            found = loops.run(offloaded, case.loop)
            require_no_leaks(offloaded.model)
            plain, wanted = _plain(case, found, None)
            if distortion != 1.0 and plain.optimizer.moved:
                group = random.Random(case.seed).choice(sorted(plain.optimizer.moved))
                plain, wanted = _plain(case, found, (group, distortion))
            verdict.moved = bool(plain.optimizer.moved)
            verdict.problems = _differences(found, wanted) + _states_that_differ(offloaded, plain)
        finally:
            if offloaded is not None:
                verdict.configs = offloaded.configs
                offloaded.close()
    return verdict


def _plain(case: Case, found: Log, distorted: tuple[int, float] | None) -> tuple[Plain, Log]:
    plain = Plain(case, found.restarts)
    plain.optimizer.distorted = distorted
    return plain, loops.run(plain, case.loop)


def _where(seed: int) -> str | None:
    """Return a directory in memory, where an fdatasync takes no time. For every 20th case, return None: this case uses
    a disk.
    """
    return "/dev/shm" if seed % 20 and os.access("/dev/shm", os.W_OK) else None


def _differences(found: Log, wanted: Log) -> list[str]:
    problems = []
    for name in ("failures", "restarts", "skipped", "rates", "evaluations", "losses", "gradients"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        if repr(ours) != repr(theirs):  # compares every digit; NaN equals NaN
            problems.append(f"{name} are {ours}, should be {theirs}")
    norms = zip(found.norms, wanted.norms, strict=True)
    if not all(abs(a - b) <= _NORM_TOLERANCE * b or (a != a and b != b) for a, b in norms):
        problems.append(f"norms are {found.norms}, should be {wanted.norms}")
    return problems


def _states_that_differ(offloaded: Offloaded, plain: Plain) -> list[str]:
    problems = []
    expected = dict(plain.model.named_parameters())
    for name, weight in weights_of(offloaded.model).items():
        problems += _difference(name, weight, expected[name].detach())
    for name, buffer in offloaded.model.named_buffers():
        problems += _difference(name, buffer, dict(plain.model.named_buffers())[name])
    uses = USES[plain.optimizer.rule]
    for name, moment in states_of(offloaded.model).items():
        name, kind = name.rsplit(".", 1)
        state = plain.optimizer.state.get(expected[name], {})
        key = "m" if kind == "exp_avg" else "v"
        if key in uses and key in state:
            problems += _difference(f"{kind} of {name}", moment, state[key].reshape(-1))
    return problems


def _difference(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> list[str]:
    if torch.equal(ours, theirs):
        return []
    apart = (ours.double() - theirs.double()).abs().max().item() if ours.shape == theirs.shape else float("nan")
    return [f"{name} differs by up to {apart:g} (values up to {theirs.abs().max().item():g})"]
