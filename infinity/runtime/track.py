"""State that a run keeps beside its unit states: schedulers, loaders, anything with a state_dict."""

from __future__ import annotations

from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable.tracked_objects import Stateful
from infinity.errors import ModelError


def track(*objects: Stateful, model: nn.Module | None = None, **named: Stateful) -> int:
    """Keep the state of these objects in every generation; in a resumed run, restore it.

    Call this once all objects are made, before the first step:

        scheduler = torch.optim.lr_scheduler.LambdaLR(optim, factor)
        done = infinity.track(scheduler, loader)
        for step in range(done, steps): ...

    Optimizers need not be given: their steps are kept anyway. In a resumed run this call restores their learning rates
    and other hyperparameters, as torch's load_state_dict does. A loader is watched: a commit keeps everything as it was
    when the loader was asked for the next batch (durable/tracked_objects.py). Without a tracked loader, a commit keeps
    the random numbers as they were when the step ended, and everything else as it was when the next training forward
    began. For other loops there is infinity.commit.

    Args:
        objects: objects with state_dict and load_state_dict, whose values are numbers, strings, lists, tuples, dicts,
            bytes, tensors and numpy arrays. An object is known by its class and its position among those of its class.
        named: the same, known by these names.
        model: the offloaded model; needed only if there are several.

    Returns:
        The number of optimizer steps done: 0 at the beginning, the step of the generation in a resumed run.

    Raises:
        ConfigError: an object has no state_dict, or one that cannot be kept; says what to use instead.
        ResumeError: the run that is resumed did not track this object, or its state does not fit.
    """
    return _coordinator(model).track(objects, named)


def commit(model: nn.Module) -> None:
    """Make a generation of the current states. It is durable when this returns.

    With commit_every this happens automatically. Call it at the end of an iteration that does more than step and
    schedule, such as evaluation that draws random numbers, or several batches from a tracked loader. Call it also to
    commit in between.

    Raises:
        ConfigError: the run keeps no generations: commit_every is 0, or auto found no room for them.
        InfinityError: the generation could not be made; the generation before can be resumed.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.commit()


def finish_commit(model: nn.Module) -> None:
    """Finish a commit in progress now, at the end of the iteration, instead of before the next training forward.

    Raises:
        InfinityError: the generation could not be made.
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
            raise ModelError(f"there are {len(usable)} offloaded models; name one: infinity.track(..., model=model)")
        coordinator = usable[0]
    coordinator.require_usable()
    return coordinator
