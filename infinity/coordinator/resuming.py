"""A run that goes on: the newest generation that is whole, on all ranks, becomes the values of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from infinity.coordinator.coordinator import Coordinator
from infinity.durable import buffers, rng
from infinity.durable.commits import facts_of
from infinity.errors import ManifestError, ResumeError
from infinity.io.generations import Generations
from infinity.io.manifest import Manifest
from infinity.io.store import wait_all
from infinity.io.whole import Agreed, common, require_one
from infinity.state.records import Body, parse_body

logger = logging.getLogger(__name__)


def from_generation(model: nn.Module, step: int | None, digest: str | None = None) -> Callable[[Coordinator], None]:
    """Values, and those of the persistent buffers, come from generation `step`, the pinned one of `digest`, or the
    newest that is whole."""

    def fill(coordinator: Coordinator) -> None:
        buffers.restore(model, _restore(coordinator, step, digest).buffers)

    return fill


def _restore(coordinator: Coordinator, step: int | None, digest: str | None) -> Body:
    """Find the newest generation that is whole (or `step`, or `digest`), take it over, and leave placeholders. Returns
    its body.

    Raises:
        ResumeError: there is none, or its states have another form than the config asks for.
        SwapIOError: the device failed.
    """
    resources, generations = coordinator.resources, coordinator.resources.generations
    if generations is None:
        raise AssertionError("resuming without generations")
    memory = resources.staging.view()

    def recover(agreed: Agreed | None) -> Manifest:
        return generations.recover(memory, step, _check, digest, agreed)

    if resources.exchange is None:
        manifest = recover(None)
    else:
        manifest = _recover_together(coordinator, generations, recover, step, pinned=digest is not None)
    expected = facts_of(resources)
    if manifest.facts != expected:
        differ = ", ".join(
            f"{key} is {manifest.facts.get(key)!r} there and {expected.get(key)!r} here"
            for key in dict.fromkeys((*expected, *manifest.facts))
            if manifest.facts.get(key) != expected.get(key)
        )
        raise ResumeError(
            f"the store's states have another form: {differ}. Resume with the same config and optimizer, or convert "
            "them with `infinity checkpoint export` and infinity.offload_from_checkpoint, or infinity finetune "
            "--from-checkpoint."
        )
    store = resources.require_store()
    held = [home for home in resources.homes() if home.in_memory]
    wait_all([store.read(home.stored(), home.view(), io_class="states") for home in held])
    for home in held:
        home.read()
    coordinator.room.adopt()
    return go_on_from(coordinator, manifest)


def _recover_together(
    coordinator: Coordinator,
    generations: Generations,
    recover: Callable[[Agreed], Manifest],
    step: int | None,
    *,
    pinned: bool,
) -> Manifest:
    """Recover the newest generation that is whole on every rank, or that of `step`.

    Args:
        pinned: recover the one that a checkpoint folder pins, which `recover` knows.

    Raises:
        ResumeError: there is none, on all ranks.
        PeerError: another rank failed.
    """
    place = coordinator.resources.require_store().directories[0].path.parent
    mine = {way.name: way for way in generations.ways(None if pinned else step)}
    told = coordinator.meet("resuming", [[[*way.name, way.kept] for way in mine.values()], generations.pins_found()])
    names = common([[((number, life), kept) for number, life, kept in found] for found, _ in told])
    folders = set.intersection(*(set(pins) for _, pins in told))
    if not pinned:
        require_one(names, step, place)
    problems = []
    for each in [None] if pinned else names:
        problem = ""
        try:
            manifest = recover(Agreed(names, folders, None if each is None else mine[each]))
        except ResumeError as error:
            if _is_unreadable(error):
                raise
            problem = str(error)
        failed = coordinator.meet(f"resuming {'a pinned generation' if each is None else f'step {each[0]}'}", problem)
        if not any(failed):
            return manifest
        where = "" if each is None else f"step {each[0]} on "
        problems += [f"{where}rank {rank}: {why}" for rank, why in enumerate(failed) if why]
        logger.warning("%s", problems[-1])
    have = "; ".join(
        f"rank {rank}: {', '.join(str(number) for number, *_ in found) or 'none'}"
        for rank, (found, _) in enumerate(told)
    )
    which = "" if step is None else f" of step {step}"
    missing = f"there is no generation{which} that every rank has a part of ({have})"
    raise ResumeError(f"nothing to resume in {place}: {'; '.join(problems) or missing}")


def _is_unreadable(error: ResumeError) -> bool:
    """Whether the generation may be whole and cannot be read now (whole.py: require_readable): it must not be given
    up."""
    return isinstance(error.__cause__, ManifestError) and isinstance(error.__cause__.__cause__, OSError)


def go_on_from(coordinator: Coordinator, manifest: Manifest) -> Body:
    """The states are those of a generation: go on from its step, with its random numbers. Returns its body."""
    coordinator.at_step(manifest.step, manifest.run)
    body = parse_body(manifest.body, f"generation {manifest.step}")
    coordinator.commits.resume(manifest.step, body)
    rng.restore(body.rng)
    return body


def _check(manifest: Manifest) -> None:
    parse_body(manifest.body, f"generation {manifest.step}")
