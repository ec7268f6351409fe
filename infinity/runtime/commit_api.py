"""infinity.track and infinity.commit.

infinity.track adds the states of schedulers, loaders and other objects with a state_dict to every generation.
infinity.commit makes a generation.
"""

from __future__ import annotations

from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable.tracked_objects import Stateful
from infinity.errors import ModelError


def track(*objects: Stateful, model: nn.Module | None = None, **named: Stateful) -> int:
    """Save the states of these objects in every generation. In a resumed run, also restore these states.

    Call this when all objects are made, before the first step:

        scheduler = torch.optim.lr_scheduler.LambdaLR(optim, factor)
        done = infinity.track(scheduler, loader)
        for step in range(done, steps): ...

    Optimizers need not be tracked, because generations always contain their step counts. In a resumed run this call
    also restores the learning rates and other hyperparameters of the optimizers, as torch's load_state_dict does. If a
    loader is tracked, a commit saves the states at the time when the loop requests the next batch from the loader
    (durable/tracked_objects.py). Without a tracked loader, a commit saves the random-number states at the end of the
    step, and all other states at the time when the next training forward begins. If a loop needs another time, the loop
    can call infinity.commit.

    Args:
        objects: objects with state_dict and load_state_dict. The values in a state_dict must be numbers, strings,
            lists, tuples, dicts, bytes, tensors or numpy arrays. An object is identified by its class and its position
            among the objects of this class.
        named: further objects; each is identified by its keyword.
        model: the offloaded model; required only if there are several offloaded models.

    Returns:
        The number of optimizer steps so far: 0 in a new run, the step of the generation in a resumed run.

    Raises:
        ConfigError: an object has no state_dict, or its state_dict cannot be kept; the message says what to use
            instead.
        ResumeError: the resumed run did not track this object, or the object's state does not fit.
    """
    return _coordinator(model).track(objects, named)


def commit(model: nn.Module) -> None:
    """Make a generation of the current states. The generation is durable when this function returns.

    Commits also happen automatically, after every commit_every steps. Call this function at the end of an iteration
    that does more than optimizer and scheduler steps, such as an evaluation that draws random numbers, or several
    batches from a tracked loader. Also call this function for a commit between two automatic commits.

    Raises:
        ConfigError: the run keeps no generations, because commit_every is 0, or because commit_every is auto and there
            is no room for generations.
        InfinityError: the generation could not be made. The run can be resumed from the generation before.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.commit()


def finish_commit(model: nn.Module) -> None:
    """Finish a commit that is in progress. Without this call, the next training forward would finish the commit.

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
