"""Under `infinity run`, with a model that evicts, each script gives what its plain run gives, also when killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unchanged import configs
from tests.unchanged.cases import cases, tolerance
from tests.unchanged.results import completions_of, first_step_of_last_run, history_of, logits_of, saved_by, weights_of
from tests.unchanged.scripts import SAVED, STEPS, Job, Script

Plain = Callable[[Script, str], Job]
Launched = Callable[[Script, str], Job]

_COMPARABLE_STEPS = {"dpo": 8, "grpo": 1}
"""Steps whose losses are compared in bf16, where plain torch has no fp32 master and loses small updates. DPO's loss
shows it after eight steps. GRPO samples other tokens as soon as the weights differ, which is after the first."""


@pytest.fixture
def launched(plain: Plain, tmp_path: Path) -> Launched:
    """A run that was not started: as the plain one of this script, under `infinity run`."""

    def job(script: Script, dtype: str) -> Job:
        config = configs.write(tmp_path, dtype, reference=script.reference)
        return replace(plain(script, dtype), output=tmp_path / "output", config=config)

    return job


def tolerances(job: Job) -> dict[str, float]:
    """How far what the script reports may be apart. GRPO's loss is zero but for rounding, whatever happens."""
    losses = tolerance(job.dtype)
    if job.script.name == "grpo":
        return {"reward_std": losses, "grad_norm": max(losses, 1e-5)}
    return {"loss": losses, "eval_loss": losses} | ({"grad_norm": 1e-5} if job.dtype == "float32" else {})


def last_comparable_step(job: Job) -> int:
    return STEPS if job.dtype == "float32" else _COMPARABLE_STEPS.get(job.script.name, STEPS)


def require_same(job: Job, expected: Job) -> None:
    last = last_comparable_step(job)
    allowed, theirs = tolerances(job), history_of(expected)
    compared = {key: value for key, value in history_of(job).items() if key[0] <= last and key[1] in allowed}
    different = {
        (step, name): (value, theirs[step, name])
        for (step, name), value in compared.items()
        if value != pytest.approx(theirs[step, name], rel=allowed[name], abs=allowed[name])
    }
    assert not different


@cases("full")
def test_losses_and_what_is_saved_are_those_of_the_plain_run(
    script: Script, dtype: str, plain: Plain, launched: Launched
) -> None:
    job, expected = launched(script, dtype), plain(script, dtype)
    job.run()
    assert history_of(job).keys() == history_of(expected).keys()
    require_same(job, expected)
    if script.name == "grpo":
        sampled = 8 * last_comparable_step(job)
        assert completions_of(job)[:sampled] == completions_of(expected)[:sampled]
    logits = [logits_of(job, saved) for saved in saved_by(job)]
    assert torch.equal(logits[-2], logits[-1])
    assert all(torch.isfinite(each).all() for each in logits)
    if dtype == "float32":
        require_same_artefacts(job, expected, logits)


def require_same_artefacts(job: Job, expected: Job, logits: list[torch.Tensor]) -> None:
    """Check that weights and logits agree up to the rounding of fp32. In bf16, plain torch has no master, so its
    weights differ."""
    ours, theirs = weights_of(job), weights_of(expected)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-5)
    for each, saved in zip(logits, saved_by(expected), strict=True):
        torch.testing.assert_close(each, logits_of(expected, saved), rtol=0, atol=1e-5)


@cases(
    "full", kept="a script that `python -m infinity.run` starts, as users do it, that SIGKILL ends, and that goes on"
)
def test_a_killed_run_resumes_to_the_losses_of_the_uninterrupted_one(
    script: Script, dtype: str, plain: Plain, launched: Launched
) -> None:
    """The saved model equals that of the uninterrupted run, too."""
    job, expected = launched(script, dtype), plain(script, dtype)
    replace(job, spawned=True).run_until_killed()
    job.resume()
    assert set(range(SAVED + 1, STEPS + 1)) <= {step for step, _ in history_of(job)}
    if script.name == "lightning_module":
        assert first_step_of_last_run(job) == SAVED + 1
    require_same(job, expected)
    if dtype == "float32":
        require_same_artefacts(job, expected, [logits_of(job, saved) for saved in saved_by(job)])
