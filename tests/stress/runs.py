"""One run from its seed to its verdict: correct bits or the expected error, no lost state, no remaining thread."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.coordinator import registry
from tests.conftest import require_no_leaks
from tests.models import loss_of
from tests.stress.interrupts import CtrlC
from tests.stress.player import Closed, Outcome, Player, digest_of
from tests.stress.scripts import Script, script_of
from tests.stress.subjects import make


def run(seed: int, interrupts: CtrlC) -> Counter[str]:
    """Play a script and check its results; return the counts of events.

    Raises:
        AssertionError: a check failed. Other unexpected exceptions are raised unchanged.
    """
    script = script_of(seed)
    with tempfile.TemporaryDirectory(prefix="infinity-stress-") as directory:
        wanted = _plain(script, Path(directory), interrupts)
        gc.collect()
        threads = _threads()
        counts = _stressed(script, Path(directory), interrupts, wanted)
        gc.collect()
        assert _threads() == threads, f"threads outlive the model: {_threads()} {threads}"
    return counts


def _plain(script: Script, directory: Path, interrupts: CtrlC) -> Outcome:
    player = Player(script, directory, interrupts, plain=True)
    player.run()
    infinity.close(player.model)
    return player.outcome


def _stressed(script: Script, directory: Path, interrupts: CtrlC, wanted: Outcome) -> Counter[str]:
    try:
        player = Player(script, directory, interrupts, plain=False)
    except infinity.SwapIOError:
        assert script.error_at is not None
        return Counter({"runs": 1, "failed at once": 1})
    counts = player.outcome.counts
    counts["runs"] += 1
    model = player.model
    try:
        player.run()
        infinity.synchronize(model)
        _require_same(player, wanted)
        infinity.close(model)  # close() may report the failed transfer; the last step is not durable in this case
        counts["ended well"] += 1
    except (Closed, infinity.InfinityError) as error:
        if player._ended:
            counts["closed before the end"] += 1
        else:
            _require_told(player, error)
            counts["failed as told"] += 1
    found = player.coordinator.speculation_choice.counts
    counts.update(early=found.early, undone=found.undone, late=found.late)
    _require_closed(player)
    del player, model
    if script.config["commit_every"]:
        step = _resumed_step(script, directory, wanted)
        counts["resumed"] += step is not None
        if counts["ended well"]:
            assert step == len(script.iterations), f"the last step is not committed, step {step} is"
    return counts


def _require_same(player: Player, wanted: Outcome) -> None:
    found = player.outcome
    require_no_leaks(player.model)
    assert [_hex(loss) for loss in found.losses] == [_hex(loss) for loss in wanted.losses], (
        f"losses {found.losses} {wanted.losses}"
    )
    assert [_hex(norm) for norm in found.norms] == [_hex(norm) for norm in wanted.norms], "norms"
    assert _digest_of(player) == wanted.digests[player.coordinator.steps], "weights or states"
    require_no_leaks(player.model)


def _digest_of(player: Player) -> str:
    """Return the digest of the model's states. If the transfer that was made to fail occurs meanwhile, try again."""
    try:
        return digest_of(player.model)
    except infinity.SwapIOError:
        assert player.script.error_at is not None
        return digest_of(player.model)


def _hex(value: float) -> str:
    return float(value).hex()


def _require_told(player: Player, error: BaseException) -> None:
    """Require that only a failing device ended the run, that the error names unit and step, and that later calls raise
    errors.
    """
    if player.script.error_at is None:
        raise error
    assert isinstance(error, infinity.InfinityError)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, infinity.SwapIOError):
        cause = cause.__cause__
    assert cause is not None, f"no failed transfer is behind {error!r}"
    assert cause.state in ("", "generation") or cause.unit, str(cause)
    if cause.state == "optimizer states":
        assert cause.step in (player.coordinator.steps, player.coordinator.steps + 1), str(cause)
    for _ in range(2):
        try:
            loss_of(player.model, player.batch)
        except infinity.InfinityError:
            continue
        raise AssertionError("the model goes on after a failure that should have ended it") from error
    infinity.close(player.model)


def _require_closed(player: Player) -> None:
    infinity.close(player.model)
    try:
        loss_of(player.model, player.batch)
    except infinity.InfinityError:
        return
    raise AssertionError("a closed model computes")


def _resumed_step(script: Script, directory: Path, wanted: Outcome) -> int | None:
    """Resume the run and return the committed step; None if nothing was committed. Require that the states are those of
    the undisturbed run at this step.
    """
    gc.collect()
    model, _ = make(script.subject, *_dtype(script))
    config = _resumable(script, directory)
    try:
        model = infinity.resume(model, config)
    except infinity.ResumeError:
        return None
    step = registry.coordinator_of(model).steps
    digest = digest_of(model) if step else wanted.digests.get(0)
    infinity.close(model)
    assert digest == wanted.digests.get(step), f"generation {step} is not what the loop had after that step"
    return step


def _dtype(script: Script) -> tuple[Any]:
    return (torch.bfloat16 if script.bfloat16 else torch.float32,)


def _resumable(script: Script, directory: Path) -> dict[str, Any]:
    nvme = script.config["nvme"] | {"paths": [str(directory / "swap")]}
    return script.config | {"nvme": nvme, "memory": {"host": "512MiB", "device": "64MiB"}}


def _threads() -> int:
    assert threading.active_count() == 1, threading.enumerate()
    return sorted(open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task"))
