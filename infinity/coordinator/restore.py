"""Bringing a generation's states home: what lives in RAM is read, what lives in the store is where it is."""

from __future__ import annotations

from infinity.coordinator.coordinator import Coordinator
from infinity.durable import rng
from infinity.durable.commits import Resumed, facts_of
from infinity.errors import ResumeError
from infinity.io.manifest import Manifest
from infinity.io.store import wait_all
from infinity.state.records import Body, parse_body


def restore(coordinator: Coordinator, step: int | None = None) -> Body:
    """Find the newest generation that is whole (or `step`), take it over, and leave placeholders. Returns its body.

    Raises:
        ResumeError: there is none, or its states have another form than the config asks for.
        SwapIOError: the device failed.
    """
    resources = coordinator.resources
    if resources.generations is None:
        raise AssertionError("resuming without generations")
    manifest = resources.generations.recover(resources.staging.view(), step, _check)
    expected = facts_of(resources)
    if manifest.facts != expected:
        differ = ", ".join(
            f"{key} is {manifest.facts.get(key)!r} there and {value!r} here"
            for key, value in expected.items()
            if manifest.facts.get(key) != value
        )
        raise ResumeError(
            f"the store's states have another form: {differ}. Resume with the same config and optimizer, or convert "
            "them with `infinity checkpoint export` and --from-checkpoint."
        )
    store = resources.require_store()
    held = [home for home in resources.homes() if home.in_memory]
    wait_all([store.read(home.stored(), home.view(), io_class="states") for home in held])
    for home in held:
        home.dirty = False
    for record in coordinator.records:
        coordinator.residents.adopt(record)
    return go_on_from(coordinator, manifest)


def go_on_from(coordinator: Coordinator, manifest: Manifest) -> Body:
    """The states are those of a generation: go on from its step, with its random numbers. Returns its body."""
    coordinator.steps = manifest.step
    if coordinator.resources.store is not None:
        coordinator.resources.store.begin_step(coordinator.steps)
    body = parse_body(manifest.body, f"generation {manifest.step}")
    coordinator.commits.resumed = Resumed(manifest.step, body)
    rng.restore(body.rng)
    return body


def _check(manifest: Manifest) -> None:
    parse_body(manifest.body, f"generation {manifest.step}")
