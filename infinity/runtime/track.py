"""What a run keeps beside its states: schedulers, loaders, anything with a state_dict."""

from __future__ import annotations

from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable.tracked import Stateful
from infinity.errors import ModelError


def track(*objects: Stateful, model: nn.Module | None = None, **named: Stateful) -> int:
    """Keep the state of these objects in every generation; in a resumed run, give them back theirs.

    Call it once they are all made, before the first step:

        scheduler = torch.optim.lr_scheduler.LambdaLR(optim, factor)
        done = infinity.track(scheduler, loader)
        for step in range(done, steps): ...

    Optimizers need not be given: their steps are kept as they are; their learning rates and the like are given back
    here, as torch's load_state_dict does. A loader is watched: what a commit keeps is everything as it was when the
    loader was asked for the next batch (durable/tracked.py). Where no loader is tracked it is as it was when the next
    training forward began; infinity.commit is for other loops.

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
    return _coordinator(model).track(objects, named)


def commit(model: nn.Module) -> None:
    """Make the states as they are now a generation, durable when this returns.

    With commit_every this happens by itself. Call it at the end of an iteration that does more than step and schedule
    (evaluation that draws random numbers, a tracked loader asked for several batches), or to commit between.

    Raises:
        ConfigError: the run keeps no generations: commit_every is 0, or auto found no room for them.
        InfinityError: it could not be made; what can be resumed is the generation before.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.commit()


def finish_commit(model: nn.Module) -> None:
    """If a commit is under way, finish it now instead of before the next training forward: the iteration is over.

    Raises:
        InfinityError: it could not be made.
    """
    registry.coordinator_of(model).end_iteration()


def _coordinator(model: nn.Module | None) -> Coordinator:
    if model is not None:
        coordinator = registry.coordinator_of(model)
    else:
        usable = [coordinator for coordinator in registry.coordinators() if not coordinator.closed]
        if not usable:
            raise ModelError("no model is offloaded: call infinity.offload(model, config) before infinity.track(...)")
        if len(usable) > 1:
            raise ModelError(f"there are {len(usable)} offloaded models; say which: infinity.track(..., model=model)")
        coordinator = usable[0]
    coordinator.require_usable()
    return coordinator
