"""Recovery of the newest generation that is complete on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from infinity.errors import ManifestError, ResumeError
from infinity.io.generation_scan import ANY, EligibleGenerations, common_candidates, require_one
from infinity.io.generations import Generations
from infinity.io.manifest import Manifest
from infinity.ranks.world import SingleProcessWorld, World

logger = logging.getLogger(__name__)


def recover(
    world: World,
    generations: Generations,
    place: Path,
    attempt: Callable[[EligibleGenerations], Manifest],
    step: int | None,
    *,
    pinned: bool,
) -> Manifest:
    """Recover the newest generation that is complete on every rank, or the generation of `step`.

    Args:
        world: the ranks.
        generations: generations of this rank.
        place: first path of nvme.paths, for messages.
        attempt: function that recovers one of the given generations.
        step: step of the generation; None: the newest generation.
        pinned: whether to recover the generation that a checkpoint folder pins. `attempt` then chooses this generation
            itself.

    Returns:
        The manifest of the generation.

    Raises:
        ResumeError: there is no such generation. All ranks raise this error.
        PeerError: another rank failed.
    """
    if isinstance(world, SingleProcessWorld):
        return attempt(ANY)
    mine = {candidate.name: candidate for candidate in generations.candidates(None if pinned else step)}
    told = world.tell(
        "resuming", [[[*candidate.name, candidate.kept] for candidate in mine.values()], generations.pins_found()]
    )
    names = common_candidates([[((number, life), kept) for number, life, kept in found] for found, _ in told])
    folders = set.intersection(*(set(pins) for _, pins in told))
    if not pinned:
        require_one(names, step, place)
    problems = []
    for each in [None] if pinned else names:
        problem = ""
        try:
            manifest = attempt(EligibleGenerations(names, folders, None if each is None else mine[each]))
        except ResumeError as error:
            if _is_unreadable(error):
                raise
            problem = str(error)
        failed = world.tell(f"resuming {'a pinned generation' if each is None else f'step {each[0]}'}", problem)
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
    missing = f"there is no generation{which} of which every rank has its part ({have})"
    raise ResumeError(f"nothing to resume in {place}: {'; '.join(problems) or missing}")


def _is_unreadable(error: ResumeError) -> bool:
    """Return whether the error says that a generation cannot be read at present, so that it may be complete
    (generation_scan.py: require_readable).

    A resumed run must not remove such a generation.
    """
    return isinstance(error.__cause__, ManifestError) and isinstance(error.__cause__.__cause__, OSError)
