"""What a run keeps beside its states: schedulers, loaders, anything with a state_dict."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from infinity.errors import ConfigError, ModelError, ResumeError
from infinity.io import document
from infinity.schedule import registry
from infinity.schedule.commits import Stateful
from infinity.schedule.ledger import Ledger

logger = logging.getLogger(__name__)


def track(*objects: Stateful, model: nn.Module | None = None, **named: Stateful) -> int:
    """Keep the state of these objects in every generation; in a resumed run, give them back theirs.

    Call it once they are all made, before the first step:

        scheduler = torch.optim.lr_scheduler.LambdaLR(optim, factor)
        done = infinity.track(scheduler, loader)
        for step in range(done, steps): ...

    Optimizers need not be given: their steps are kept as they are; their learning rates and the like are given back
    here, as torch's load_state_dict does. Objects that can be iterated (loaders, samplers) are asked for their state
    when a step ends, everything else when the next training forward begins, so that schedulers have been stepped and
    the next batch has not been taken (infinity.commit is for other loops).

    Args:
        objects: with state_dict and load_state_dict, whose values are numbers, strings, lists, tuples, dicts, bytes,
            tensors and numpy arrays. They are known by their class and their number among those of it.
        named: the same, known by these names.
        model: the offloaded model; needed only where there are several.

    Returns:
        The optimizer steps that are done: 0 at the beginning, the step of the generation in a resumed run.

    Raises:
        ConfigError: an object has no state_dict, or one that cannot be kept; says what to use instead.
        ResumeError: the run that is resumed did not track this object, or its state does not fit.
    """
    ledger = _ledger(model)
    added: dict[str, Stateful] = {}
    for item in objects:
        number = sum(type(item).__name__ == name.split("#")[0] for name in [*ledger.commits.tracked, *added])
        added[f"{type(item).__name__}#{number}"] = item
    for name, item in (added | named).items():
        if name in ledger.commits.tracked:
            raise ConfigError(f"infinity.track: there is a '{name}' already")
        _require_stateful(name, item)
        if ledger.commits.resumed is not None:
            _give_back(name, item, ledger.commits.resumed.tracked)
        ledger.commits.tracked[name] = item
    for optimizer in ledger.commits.optimizers:
        optimizer.take_up_hyperparameters()
    return ledger.steps


def commit(model: nn.Module) -> None:
    """Make the states as they are now a generation, durable when this returns.

    With commit_every this happens by itself. Call it at the end of an iteration that does more than step and schedule
    (evaluation that draws random numbers, a tracked loader asked for several batches), or to commit between.

    Raises:
        ConfigError: the model was offloaded with commit_every: 0.
        InfinityError: it could not be made; what can be resumed is the generation before.
    """
    ledger = registry.ledger_of(model)
    ledger.require_usable()
    if ledger.backing.generations is None:
        raise ConfigError("commit_every: 0 keeps no generations; set commit_every: 1, or how many steps apart")
    ledger.begin_commit()
    ledger.finish_commit()


def finish_commit(model: nn.Module) -> None:
    """If a commit is under way, finish it now instead of before the next training forward: the iteration is over.

    Raises:
        InfinityError: it could not be made.
    """
    ledger = registry.ledger_of(model)
    if ledger.commits.under_way:
        commit(model)


def _ledger(model: nn.Module | None) -> Ledger:
    if model is not None:
        ledger = registry.ledger_of(model)
    else:
        usable = [ledger for ledger in registry.ledgers() if not ledger.closed]
        if len(usable) != 1:
            raise ModelError(f"there are {len(usable)} offloaded models; say which: infinity.track(..., model=model)")
        ledger = usable[0]
    ledger.require_usable()
    return ledger


def _require_stateful(name: str, item: Any) -> None:
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        hint = ""
        if type(item).__name__ == "DataLoader":
            hint = " torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and has both."
        raise ConfigError(
            f"infinity.track: {name} has no state_dict and load_state_dict, so its state cannot be kept.{hint}"
        )
    try:
        document.require_writable(item.state_dict())
    except TypeError as error:
        raise ConfigError(f"infinity.track: the state of {name} cannot be kept: {error}") from error


def _give_back(name: str, item: Stateful, saved: dict[str, Any]) -> None:
    if name not in saved:
        there = ", ".join(f"'{key}'" for key in saved) or "nothing"
        raise ResumeError(f"the run that is resumed did not track '{name}'; it tracked {there}")
    try:
        item.load_state_dict(saved[name])
    except Exception as error:
        raise ResumeError(f"the state of '{name}' in the run that is resumed does not fit: {error}") from error
