"""Random training loops, made from a seed, and the function that runs such a loop, on plain torch and on infinity."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim import lr_scheduler

from infinity.errors import NonFiniteGradientError
from infinity.state.layer_tiles import LayerTile
from tests.fuzz import gradients
from tests.fuzz.models import Net, UserError
from tests.fuzz.unfreezing import Freezing, freeze, late_ones, unfreezing

Zero = Literal["optimizer", "filled", "model", "kept"]


@dataclass(frozen=True)
class Failure:
    """An exception of the user's code in the `nth` module that has parameters, in one forward or backward pass.

    Attributes:
        repeats: part of the loop that is repeated after the exception: only the forward, or the complete iteration.
    """

    where: Literal["forward", "backward"]
    nth: int
    repeats: Literal["forward", "iteration"]


@dataclass(frozen=True)
class Iteration:
    """One step.

    Attributes:
        evaluation: context of a forward before the step, and whether it also runs in training mode; None: no
            evaluation.
        lr: learning rate set by hand at the start of the iteration; None: it is not changed.
        gates: whether each visit of a block takes place.
        restart: None if the run does not end after this step. Otherwise the run ends and is resumed; the value is the
            number of generations between the newest generation and the resumed one.
        changes: changes of gradients after each micro-batch.
    """

    micro_batches: int
    told: bool
    evaluation: tuple[Literal["no_grad", "inference_mode"], bool] | None
    failure: Failure | None
    nan: bool
    closure: bool
    zero: Zero
    lr: float | None
    gates: tuple[bool, ...]
    in_thread: bool
    restart: int | None
    changes: tuple[gradients.Change | None, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A random training loop.

    Attributes:
        groups: hyperparameters of each param group; parameters are distributed to the groups in turn.
        hint: value of accumulation_steps, which may be wrong.
        freezing: schedule of requires_grad; None: requires_grad is not changed.
    """

    rule: str
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]
    clip: float | None
    hint: int | None
    scheduler: str | None
    iterations: tuple[Iteration, ...]
    freezing: Freezing | None = None

    @property
    def accumulates(self) -> bool:
        """Whether several backward passes may precede a step."""
        return any(each.micro_batches > 1 or each.zero == "kept" for each in self.iterations)


class World(Protocol):
    """A model in training, in plain torch or offloaded."""

    model: Net
    optimizer: Any
    scheduler: Any

    def top(self) -> None:
        """Prepare for the next training forward."""

    def restart(self, back: int, index: int) -> int:
        """End the run after iteration `index`, and resume it from the generation that is `back` generations older than
        the newest.

        Returns:
            Number of optimizer steps that are done.
        """

    def accumulating(self) -> AbstractContextManager[Any]: ...

    def gradients(self, parameters: Sequence[nn.Parameter], *, write: bool) -> AbstractContextManager[None]:
        """Provide gradients of these parameters that may be read and changed within the context."""


@dataclass
class Log:
    """Results of a run that the user can see.

    Attributes:
        restarts: the step from which the run was resumed; the key is the iteration after which the run had ended.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    rates: list[Any] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    restarts: dict[int, int] = field(default_factory=dict)
    gradients: list[float] = field(default_factory=list)


def _iteration(rng: random.Random, visits: int, odd: float, accumulation: int, resumable: bool) -> Iteration:
    def chance(share: float) -> bool:
        return rng.random() < share * odd

    return Iteration(
        micro_batches=rng.choice([1, 2, 3]) if chance(0.2) else accumulation,
        told=rng.random() < 0.3,
        evaluation=(rng.choice(["no_grad", "inference_mode"]), rng.random() < 0.5) if chance(0.4) else None,
        failure=Failure(rng.choice(["forward", "backward"]), rng.randrange(40), rng.choice(["forward", "iteration"]))
        if chance(0.3)
        else None,
        nan=chance(0.15),
        closure=chance(0.2),
        zero=rng.choice(["filled", "model", "kept"]) if chance(0.4) else "optimizer",
        lr=rng.choice([1e-3, 3e-3, 1e-2]) if chance(0.2) else None,
        gates=tuple(not chance(0.2) for _ in range(visits)),
        in_thread=chance(0.2),
        restart=rng.choice([0, 0, 1]) if resumable and chance(0.3) else None,
    )


_RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False},
    "Adam": {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.01, "maximize": False},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": False},
    "Adagrad": {
        "lr": 1e-2,
        "lr_decay": 0.1,
        "weight_decay": 0.01,
        "initial_accumulator_value": 0.1,
        "eps": 1e-10,
        "maximize": False,
    },
    "SGD": {
        "lr": 1e-2,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.01,
        "nesterov": False,
        "maximize": False,
    },
}


def _hyperparameters(rng: random.Random, rule: str) -> dict[str, Any]:
    """Return the hyperparameters of a group that differ from the defaults."""
    choices: dict[str, list[Any]] = {"lr": [1e-3, 3e-2, 0.0], "weight_decay": [0.0, 0.5], "maximize": [True]}
    if rule in ("AdamW", "Adam", "Lion"):
        choices["betas"] = [(0.0, 0.9), (0.95, 0.999)]
    if rule == "SGD":
        choices["dampening"] = [0.5]
    return {key: rng.choice(values) for key, values in choices.items() if rng.random() < 0.3}


def make(seed: int, visits: int, *, resumable: bool) -> Loop:
    """Return a loop for a model with this number of block visits in a forward. `resumable`: generations are kept."""
    rng = random.Random(f"loop {seed}")
    rule = rng.choice(["AdamW"] * 6 + list(_RULES))
    odd, accumulation = rng.choice([0.0, 0.5, 1.0, 1.0]), rng.choice([1, 1, 1, 2, 3])
    steps = rng.randint(2, 5)
    iterations = [_iteration(rng, visits, odd, accumulation, resumable) for _ in range(steps)]
    iterations = [replace(e, changes=gradients.drawn(seed, at, e.micro_batches)) for at, e in enumerate(iterations)]
    loop = Loop(
        rule=rule,
        defaults=_RULES[rule],
        groups=tuple(_hyperparameters(rng, rule) if index else {} for index in range(rng.choice([1, 1, 2, 3]))),
        clip=rng.choice([None, None, 1e9, 1.0, 0.01]),
        hint=rng.choice([None, None, accumulation, 2]),
        scheduler=rng.choice([None, "step", "cosine", "lambda", "warm restarts", "plateau"]),
        iterations=tuple(iterations),
    )
    return unfreezing(seed, loop)


def grouped(loop: Loop, model: nn.Module) -> list[dict[str, Any]]:
    """Return param groups for an optimizer, at most as many as there are parameters for."""
    late = set(map(id, late_ones(loop, model)))
    parameters = [each for each in model.parameters() if each.requires_grad and id(each) not in late]
    count = len(loop.groups)
    groups = [{"params": parameters[index::count]} | given for index, given in enumerate(loop.groups)]
    return [group for group in groups if group["params"]]


def schedule(loop: Loop, optimizer: Any) -> Any:
    """Return the loop's learning rate scheduler."""
    made = {
        "step": lambda: lr_scheduler.StepLR(optimizer, 2, 0.5),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 8),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, _warmed),
        "warm restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    }
    return None if loop.scheduler is None else made[loop.scheduler]()


def _warmed(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def run(world: World, loop: Loop) -> Log:
    """Run the loop and return its log."""
    log, index = Log(), 0
    while index < len(loop.iterations):
        iteration = loop.iterations[index]
        freeze(world, loop, index)
        if iteration.lr is not None:
            for group in world.optimizer.param_groups:
                group["lr"] = iteration.lr
        world.model.gates = list(iteration.gates)
        if iteration.evaluation is not None:
            log.evaluations.append(_evaluate(world.model, *iteration.evaluation))
        if iteration.failure is not None and iteration.failure.repeats == "iteration":
            try:
                _passes(world, iteration, index, iteration.failure)
            except UserError:
                log.failures.append(f"iteration {index}")
            world.optimizer.zero_grad()
        try:
            loss = _step(world, iteration, index, log)
        except NonFiniteGradientError:
            log.failures.append(f"the end, in iteration {index}")
            break
        log.losses.append(loss)
        log.norms.append(world.optimizer.last_grad_norm)
        log.skipped.append(world.optimizer.skipped_steps)
        _zero(world, iteration.zero)
        if loop.scheduler is not None:
            world.scheduler.step(*([loss if math.isfinite(loss) else 1.0] if loop.scheduler == "plateau" else []))
        log.rates.append([(group["lr"], group["weight_decay"]) for group in world.optimizer.param_groups])
        index += 1
        if iteration.restart is not None and iteration.zero != "kept" and index not in log.restarts:
            log.restarts[index] = index = world.restart(iteration.restart, index)
    return log


def _step(world: World, iteration: Iteration, index: int, log: Log) -> float:
    failure = iteration.failure if iteration.failure and iteration.failure.repeats == "forward" else None

    def passes() -> torch.Tensor:
        return torch.tensor(_passes(world, iteration, index, failure, log))

    if iteration.closure:
        return float(world.optimizer.step(passes))
    loss = float(passes())
    world.optimizer.step()
    return loss


def _zero(world: World, how: Zero) -> None:
    if how == "model":
        world.model.zero_grad()
    elif how != "kept":
        world.optimizer.zero_grad(set_to_none=how == "optimizer")


def _passes(world: World, iteration: Iteration, index: int, failure: Failure | None, log: Log | None = None) -> float:
    """Run the forward and backward passes of an iteration. With a `log`, a failed forward is repeated."""
    model, total = world.model, 0.0
    world.top()
    for micro in range(iteration.micro_batches):
        last = micro == iteration.micro_batches - 1
        batch = model.batch(100 * index + micro)
        fails = failure if micro == 0 else None
        if fails is not None and log is not None:
            torch.manual_seed(index * 100 + micro)
            try:
                with _broken(model, fails.nth, "forward"):
                    model(batch)
            except UserError:
                log.failures.append(f"forward {index}")
            fails = None
        torch.manual_seed(index * 100 + micro)
        telling = world.accumulating() if iteration.told and not last else nullcontext()
        with telling, _broken(model, fails.nth, fails.where) if fails is not None else nullcontext():
            loss = model(batch) / iteration.micro_batches
            total += loss.item()
            _backward(loss * math.nan if iteration.nan and last else loss, iteration.in_thread)
        read = gradients.apply(world, iteration.changes[micro])
        if log is not None:
            log.gradients += read
    return total


def _backward(loss: torch.Tensor, in_thread: bool) -> None:
    if not in_thread:
        loss.backward()
        return
    raised: list[BaseException] = []
    threads = torch.get_num_threads()  # experts compute again in the backward, and the number decides the rounding

    def backward() -> None:
        torch.set_num_threads(threads)
        try:
            loss.backward()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@contextmanager
def _broken(model: nn.Module, nth: int, where: str) -> Any:
    """Make the `nth` module fail in its forward, or in the backward of its output."""
    modules = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    modules = [module for module in modules if not isinstance(module, LayerTile)]  # not called in plain torch

    def fail(*_: Any) -> None:
        raise UserError

    def hook(module: nn.Module, given: Any, output: Any) -> None:
        if where == "forward":
            fail()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(fail)

    handle = modules[nth % len(modules)].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _evaluate(model: Net, how: str, training: bool) -> float:
    model.train(training)
    torch.manual_seed(7)
    with torch.no_grad() if how == "no_grad" else torch.inference_mode():
        loss = model(model.batch(10_000)).item()
    model.train()
    return loss
