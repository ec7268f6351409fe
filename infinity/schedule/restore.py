"""Bringing a generation's states home: what lives in RAM is read, what lives in the store is where it is."""

from __future__ import annotations

from infinity.errors import ResumeError
from infinity.io.manifest import Manifest
from infinity.io.store import wait_all
from infinity.schedule import rng
from infinity.schedule.commits import Resumed, facts_of
from infinity.schedule.ledger import Ledger
from infinity.state.records import Body, parse_body


def restore(ledger: Ledger, step: int | None = None) -> Body:
    """Find the newest generation that is whole (or `step`), take it over, and leave placeholders. Returns its body.

    Raises:
        ResumeError: there is none, or its states have another form than the config asks for.
        SwapIOError: the device failed.
    """
    backing = ledger.backing
    if backing.generations is None:
        raise AssertionError("resuming without generations")
    manifest = backing.generations.recover(backing.staging.view(), step, _check)
    expected = facts_of(backing)
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
    store = backing.require_store()
    held = [home for home in backing.homes() if home.in_memory]
    wait_all([store.read(home.stored(), home.view(), io_class="states") for home in held])
    for home in held:
        home.dirty = False
    for record in ledger.records:
        ledger.residents.adopt(record)
    return go_on_from(ledger, manifest)


def go_on_from(ledger: Ledger, manifest: Manifest) -> Body:
    """The states are those of a generation: go on from its step, with its random numbers. Returns its body."""
    ledger.steps = manifest.step
    if ledger.backing.store is not None:
        ledger.backing.store.step = ledger.steps
    body = parse_body(manifest.body, f"generation {manifest.step}")
    ledger.commits.resumed = Resumed(manifest.step, body)
    rng.restore(body.rng)
    return body


def _check(manifest: Manifest) -> None:
    parse_body(manifest.body, f"generation {manifest.step}")
