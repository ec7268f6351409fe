"""Resuming of a run: fill a model with the newest generation that is complete on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from infinity.coordinator.coordinator import Coordinator
from infinity.durable import module_buffers, rng
from infinity.durable.generation_body import GenerationBody, parse_body
from infinity.errors import ResumeError
from infinity.io.generation_scan import EligibleGenerations
from infinity.io.manifest import Manifest
from infinity.sharded.recovery import recover


def from_generation(model: nn.Module, step: int | None, digest: str | None = None) -> Callable[[Coordinator], None]:
    """Return a function that fills a model and its persistent buffers from a generation.

    Args:
        model: the model.
        step: step of the generation; None: the newest complete generation.
        digest: digest of a pinned generation; None: a generation that is not pinned.
    """

    def fill(coordinator: Coordinator) -> None:
        module_buffers.restore(model, _restore(coordinator, step, digest).buffers)

    return fill


def _restore(coordinator: Coordinator, step: int | None, digest: str | None) -> GenerationBody:
    """Restore the states of a generation, and leave placeholders in the model.

    Returns:
        The body of the generation.

    Raises:
        ResumeError: there is no such generation, or its states have another form than the config requires.
        SwapIOError: the device failed.
    """
    generations = coordinator.generations
    if generations is None:
        raise AssertionError("resuming without generations")
    memory = coordinator.idle_memory()

    def attempt(eligible: EligibleGenerations) -> Manifest:
        return generations.recover(memory, step, _check, digest, eligible)

    place = coordinator.directories[0].parent
    manifest = recover(coordinator.world, generations, place, attempt, step, pinned=digest is not None)
    expected = coordinator.facts()
    if manifest.facts != expected:
        differ = ", ".join(
            f"{key} is {manifest.facts.get(key)!r} in the store and {expected.get(key)!r} in this run"
            for key in dict.fromkeys((*expected, *manifest.facts))
            if manifest.facts.get(key) != expected.get(key)
        )
        raise ResumeError(
            f"the store's states have another form: {differ}. Resume with the same config and optimizer, or convert "
            "them with `infinity checkpoint export` and infinity.offload_from_checkpoint, or infinity finetune "
            "--from-checkpoint."
        )
    coordinator.adopt()
    return continue_from(coordinator, manifest)


def continue_from(coordinator: Coordinator, manifest: Manifest) -> GenerationBody:
    """Continue from a generation whose states the model already has: restore its step and its random number states.

    Returns:
        The body of the generation.
    """
    body = parse_body(manifest.body, f"generation {manifest.step}")
    coordinator.resume(manifest.step, manifest.run, body)
    rng.restore(body.rng)
    return body


def _check(manifest: Manifest) -> None:
    parse_body(manifest.body, f"generation {manifest.step}")
