"""The plain runs are worth comparing with: they learn, repeat to the bit and resume, and the model evicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import infinity
from tests.unchanged.cases import cases
from tests.unchanged.configs import DEVICE_MEMORY, evicting
from tests.unchanged.results import completions_of, first_step_of_last_run, history_of, logits_of, saved_by, weights_of
from tests.unchanged.scripts import SAVED, SCRIPTS, STEPS, Job, Script

Plain = Callable[[Script, str], Job]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=str)
def test_no_script_knows_infinity(script: Script) -> None:
    source = script.path.read_text()
    assert "infinity" not in source
    assert 30 <= len(source.splitlines()) <= 80


@cases("full", kept="a script without infinity, with which those under infinity are compared")
def test_a_plain_run_learns_and_what_it_saves_can_be_loaded(script: Script, dtype: str, plain: Plain) -> None:
    job = plain(script, dtype)
    history = history_of(job)
    assert [step for step, name in history if name == "loss"] == list(range(1, STEPS + 1))
    if script.name == "grpo":
        assert len(completions_of(job)) == 8 * STEPS
        assert all(
            history[step, "reward_std"] > 0 and history[step, "grad_norm"] > 1e-3 for step in range(1, STEPS + 1)
        )
    else:
        assert history[STEPS, "loss"] < history[1, "loss"]
    logits = [logits_of(job, saved) for saved in saved_by(job)]
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits[-2], logits[-1])


@cases()
def test_a_plain_run_that_is_killed_and_resumed_repeats_the_uninterrupted_one_to_the_bit(
    script: Script, dtype: str, plain: Plain, tmp_path: Path
) -> None:
    job = replace(plain(script, dtype), output=tmp_path / "output")
    job.run_until_killed()
    job.resume()
    expected, history = history_of(plain(script, dtype)), history_of(job)
    assert {(step, name) for step, name in expected if step > SAVED} <= history.keys()
    if script.name == "lightning_module":
        assert first_step_of_last_run(job) == SAVED + 1
    assert history == {key: expected[key] for key in history}
    weights = weights_of(plain(script, dtype))
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(job).items())


@pytest.mark.parametrize("dtype", DEVICE_MEMORY)
def test_the_model_evicts(dtype: str, inputs: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "checkpoint", dtype=getattr(torch, dtype))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    infinity.offload(model, evicting(tmp_path / "swap", DEVICE_MEMORY[dtype]))
    try:
        for _ in range(2):
            with torch.no_grad():
                model(input_ids=torch.arange(64).reshape(2, 32))
        statistics = infinity.statistics(model)
        assert statistics.slot_bytes < nbytes / 2
        assert statistics.weight_bytes_read > 1.5 * nbytes
    finally:
        infinity.close(model)
