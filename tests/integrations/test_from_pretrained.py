"""Models that a script loads: when they are offloaded, and what several of them share."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers import trainer as trainer_module

import infinity
from infinity.access.exact import exact_value
from infinity.base.machine_facts import ProcessorFacts
from infinity.cli.main import main
from infinity.coordinator import registry
from infinity.integrations import script_messages
from infinity.io.generation_pins import read_pins
from infinity.runtime.deferred_parameters import is_deferred, values_of
from infinity.runtime.pins import pin, unpin
from tests.integrations.conftest import Launch

Rows = list[dict[str, torch.Tensor]]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def plain_logits(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(checkpoint)(input_ids=ids).logits
    return logits


def test_a_loaded_model_is_offloaded_by_its_first_forward(checkpoint: Path, launch: Launch, ids: torch.Tensor) -> None:
    with launch():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        assert is_deferred(model)
        assert not registry.is_offloaded(model)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        assert registry.is_offloaded(model)
    assert torch.equal(logits, plain_logits(checkpoint, ids))


def test_in_that_forward_weights_are_read_in_other_ways_than_calls(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's head over chunks does this."""

    def forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=input_ids).last_hidden_state
        return hidden @ self.lm_head.weight.t()

    with launch():
        monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with torch.no_grad():
            first, second = model(ids), model(ids)
    monkeypatch.undo()
    torch.testing.assert_close(first, plain_logits(checkpoint, ids))
    assert torch.equal(first, second)


def test_the_path_may_be_given_by_its_name(checkpoint: Path, launch: Launch) -> None:
    with launch():
        assert is_deferred(LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=checkpoint))


def test_generate_gives_the_same_tokens(checkpoint: Path, launch: Launch, ids: torch.Tensor) -> None:
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = AutoModelForCausalLM.from_pretrained(checkpoint).generate(ids, **how)
    with launch():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(checkpoint).generate(ids, **how), expected)


def test_a_reference_has_no_states_and_a_directory_and_memory_of_its_own(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    with launch(memory={"device": "1MiB", "host": "100MiB"}):
        policy, reference = (AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(2))
        optim = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        reference = Accelerator(cpu=True).prepare_model(reference, evaluation_mode=True)
        with torch.no_grad():
            reference(input_ids=ids)
        policy(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        plans = [registry.coordinator_of(model).plan for model in (policy, reference)]
        assert [plan.layout.trainable_numel > 0 for plan in plans] == [True, False]
        assert plans[0].budgets.limits.device == 1 << 19
        assert plans[0].budgets.limits.host == 50 << 20
        assert plans[1].budgets.limits.device == (1 << 20) - plans[0].device_bytes
        assert plans[1].budgets.limits.host == (100 << 20) - plans[0].host_bytes
        swaps = {path.parent.relative_to(tmp_path / "swap") for path in (tmp_path / "swap").rglob("*.infinity-swap")}
        assert swaps == {Path("."), Path("reference-2")}
    assert not list((tmp_path / "swap").rglob("*.infinity-swap"))


def test_a_reference_in_fp32_is_converted_too_where_autocast_would_copy_it(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch(memory={"device": "1MiB", "host": "100MiB"}):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        reference = AutoModelForCausalLM.from_pretrained(checkpoint)
        reference = accelerator.prepare_model(reference, evaluation_mode=True)
        with torch.no_grad():
            assert reference(input_ids=ids).logits.isfinite().all()
        assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}


def test_a_plan_that_does_not_fit_names_what_the_memory_is_shared_with(checkpoint: Path, launch: Launch) -> None:
    with launch(memory={"device": "320KiB", "host": "100MiB"}):
        models = [AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(2)]
        with pytest.raises(infinity.PlanError, match=r"The script has 2 models; .*160\.00 KiB"):
            torch.optim.AdamW(models[0].parameters())


@pytest.mark.cpu_only("about host memory to the byte")
def test_a_model_that_is_loaded_when_another_was_used_gets_what_that_one_left(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch(weights="auto", optimizer="auto", memory={"device": "640KiB", "host": "6MiB"}):
        first = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(first.parameters())
        second = AutoModelForCausalLM.from_pretrained(checkpoint)
        second(input_ids=ids)
        plans = [registry.coordinator_of(model).plan for model in (first, second)]
        assert sum(plan.host_bytes for plan in plans) <= 6 << 20
        assert sum(plan.device_bytes for plan in plans) <= 640 << 10
        assert plans[0].placement.optimizer.tier == "host"


@pytest.mark.cpu_only("about host memory to the byte")
def test_a_model_for_which_nothing_is_left_names_the_other_and_the_fix(checkpoint: Path, launch: Launch) -> None:
    with launch(weights="auto", optimizer="auto", memory={"device": "640KiB", "host": "5MiB"}):
        first = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(first.parameters())
        second = AutoModelForCausalLM.from_pretrained(checkpoint)
        named = r"LlamaForCausalLM has 0 B and 3\.\d+ MiB, and .* are left for this model\. Load every model before"
        with pytest.raises(infinity.PlanError, match=named):
            torch.optim.AdamW(second.parameters())


def test_a_model_that_was_closed_leaves_its_memory_to_the_next(checkpoint: Path, launch: Launch) -> None:
    with launch(weights="auto", optimizer="auto", memory={"device": "640KiB", "host": "5MiB"}):
        first = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(first.parameters())
        infinity.close(first, discard=True)
        second = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(second.parameters())
        assert registry.coordinator_of(second).plan.budgets.limits.host == 5 << 20


def test_embeddings_may_be_resized_and_parameters_frozen_before_training(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model.resize_token_embeddings(model.config.vocab_size + 8)
        model.model.layers[0].requires_grad_(False)
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optim.step()
        layout = registry.coordinator_of(model).plan.layout
        assert layout.trainable_numel == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert loss.isfinite()


def test_a_module_around_a_model_that_was_used_is_refused_with_the_fix(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, rows: Rows, tmp_path: Path
) -> None:
    with launch():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model(input_ids=ids)
        outer = nn.Sequential(model)
        args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
        with pytest.raises(infinity.ModelError, match="Make the Sequential before the first forward pass"):
            Trainer(outer, args, train_dataset=rows).create_optimizer()


def test_models_that_are_not_loaded_from_files_stay_as_they_are(launch: Launch) -> None:
    with launch():
        plain = nn.Linear(4, 4)
        optim = torch.optim.AdamW(plain.parameters())
        assert type(optim) is torch.optim.AdamW
        plain(torch.ones(1, 4)).sum().backward()
        optim.step()


def test_after_the_run_the_libraries_are_as_they_were(checkpoint: Path, launch: Launch) -> None:
    before = [torch.optim.AdamW.__init__, Trainer.create_optimizer, vars(LlamaForCausalLM).get("from_pretrained")]
    with launch():
        assert Trainer.create_optimizer is not before[1]
    after = [torch.optim.AdamW.__init__, Trainer.create_optimizer, vars(LlamaForCausalLM).get("from_pretrained")]
    assert after == before
    assert not is_deferred(AutoModelForCausalLM.from_pretrained(checkpoint))


def test_trainer_pushes_its_checkpoints_and_the_model_to_the_hub(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[set[str]] = []

    class Api:
        """huggingface_hub.HfApi, of which nothing leaves the machine."""

        def create_repo(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(repo_id="someone/model")

        def upload_folder(self, *, folder_path: str, **kwargs: Any) -> Any:
            pushed.append({path.name for path in Path(folder_path).iterdir()})
            return SimpleNamespace(done=lambda: True, result=lambda: "url", commit_url="url")

    monkeypatch.setattr(trainer_module, "hf_api", Api)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        save_steps=1,
        push_to_hub=True,
        hub_model_id="someone/model",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with launch():
        one = Trainer(AutoModelForCausalLM.from_pretrained(checkpoint), args, train_dataset=rows)
        one.train()
        one.push_to_hub(blocking=True)
    assert len(pushed) >= 2
    assert all("model.safetensors" in names for names in pushed)


@pytest.mark.parametrize("changed", [False, True])
def test_models_that_the_script_let_go_leave_no_store_and_the_next_has_its_own(
    changed: bool, checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Also one that was changed after its first use, and so offloaded anew."""

    def main() -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        if changed:
            model(input_ids=ids)
            model.lm_head.requires_grad_(False)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        model.save_pretrained(tmp_path / "out")

    with launch():
        main()
        gc.collect()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        with torch.no_grad():
            assert again(input_ids=ids).logits.isfinite().all()
    assert not list((tmp_path / "swap").rglob("*.infinity*"))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, infinity.AdamW])
def test_a_model_that_the_script_offloads_itself_is_saved_shard_by_shard(
    optimizer: Any, checkpoint: Path, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("all weights are gathered")

    with launch():
        swap = {"memory": {"device": "640KiB", "host": "96MiB"}, "nvme": {"paths": [str(tmp_path / "own")]}}
        model = infinity.load_pretrained(checkpoint, swap, dtype=torch.float32)
        optimizer(model.parameters(), lr=1e-3)
        monkeypatch.setattr(type(model), "state_dict", gather)
        model.save_pretrained(tmp_path / "out", max_shard_size="200KB")
        monkeypatch.undo()
        infinity.close(model)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    plainly = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(value, plainly[name]) for name, value in read.items())


def test_a_forked_process_removes_folders_as_without_infinity(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    """It has no say in what is pinned."""
    with launch(pins=1):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model(input_ids=ids)
        pin(model, tmp_path / "folder")
        child = os.fork()
        if not child:
            try:
                shutil.rmtree(tmp_path / "folder")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert not (tmp_path / "folder").exists()
        assert [each.folder for each in read_pins(tmp_path / "swap")] == [str(tmp_path / "folder")]
        unpin(model, tmp_path / "folder")


def test_the_store_of_another_run_stays_where_a_model_was_that_the_script_let_go(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    def train() -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        infinity.commit(model)

    with launch():
        train()
        gc.collect()
        assert main(["checkpoint", "remove", str(tmp_path / "swap")]) == 0
        other = train_apart(checkpoint, tmp_path / "swap")
    assert list((tmp_path / "swap").glob("generation-*")), f"{other} is gone"


def train_apart(checkpoint: Path, swap: Path) -> str:
    """Leaves a store of another run; returns the run."""
    config = {"weights": "nvme", "nvme": {"paths": [str(swap)]}, "commit_every": 1, "memory": MEMORY}
    model = infinity.load_pretrained(checkpoint, config)
    infinity.commit(model)
    run = registry.coordinator_of(model).run
    infinity.close(model)
    return run


MEMORY = {"device": "640KiB", "host": "96MiB"}


def test_an_optimizer_for_a_model_that_is_only_evaluated_is_refused(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch():
        model = Accelerator(cpu=True).prepare_model(
            AutoModelForCausalLM.from_pretrained(checkpoint), evaluation_mode=True
        )
        with torch.no_grad():
            model(input_ids=ids)
        with pytest.raises(infinity.ModelError, match="Make the optimizer before the first forward pass"):
            torch.optim.AdamW(model.parameters())


def in_memory(model: nn.Module) -> set[str]:
    """Return the deferred parameters whose values are in memory. They stay deferred."""
    found: set[str] = set()
    with suppress(InterruptedError), values_of(model) as values:
        found |= {name for name, _ in model.named_parameters() if values.in_memory(name)}
        raise InterruptedError
    return found


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        (AutoModelForSequenceClassification, [0, 2]),
        pytest.param(AutoModelForTokenClassification, [[0] * 12, [2] * 12], marks=pytest.mark.long),
    ],
)
def test_a_model_with_a_new_head_is_streamed_and_trains_as_the_plain_one(
    kind: Any, labels: Any, checkpoint: Path, launch: Launch, ids: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    losses: list[list[float]] = []
    for context in (nullcontext(), launch()):
        with context as run:
            torch.manual_seed(0)
            model, info = kind.from_pretrained(checkpoint, num_labels=3, pad_token_id=0, output_loading_info=True)
            assert {name.partition(".")[0] for name in info["missing_keys"]} == {"score"}
            assert info["unexpected_keys"] == {"lm_head.weight"}
            if run is not None:
                assert in_memory(model) == info["missing_keys"]
            optim = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
            losses.append([])
            for _ in range(3):
                loss = model(input_ids=ids, labels=torch.tensor(labels)).loss
                loss.backward()
                optim.step()
                optim.zero_grad()
                losses[-1].append(loss.item())
            assert registry.is_offloaded(model) == (run is not None)
    assert losses[1][0] == losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert "whole" not in caplog.text


def test_a_head_of_another_size_is_initialized_where_the_script_asks_for_that(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    made: dict[str, Any] = {"num_labels": 2, "pad_token_id": 0}
    AutoModelForSequenceClassification.from_pretrained(checkpoint, **made).save_pretrained(tmp_path / "two")
    heads, logits = [], []
    for context in (nullcontext(), launch()):
        with context:
            torch.manual_seed(0)
            model, info = AutoModelForSequenceClassification.from_pretrained(
                tmp_path / "two", num_labels=3, ignore_mismatched_sizes=True, output_loading_info=True
            )
            assert [name for name, _, _ in info["mismatched_keys"]] == ["score.weight"]
            heads.append(model.score.weight.detach().clone())
            with torch.no_grad():
                logits.append(model(input_ids=ids).logits)
    assert torch.equal(*heads)
    assert torch.equal(*logits)


def test_a_model_that_is_not_there_is_the_error_that_scripts_expect(launch: Launch, tmp_path: Path) -> None:
    with launch(), pytest.raises((OSError, infinity.ModelError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nothing")


def test_after_a_script_that_failed_its_states_are_named_with_what_to_do(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infinity")

    def script() -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        infinity.commit(model)
        raise AttributeError("a bug")

    with pytest.raises(AttributeError), launch():
        script()
    assert "the script failed after step 1; no checkpoint folder was saved, and " in caplog.text
    assert " has the states after step 1\n" in caplog.text
    assert "infinity checkpoint export" in caplog.text


def test_a_model_that_hangs_in_a_cycle_leaves_its_memory_to_the_next(checkpoint: Path, launch: Launch) -> None:
    with launch(weights="auto", optimizer="auto", memory={"device": "640KiB", "host": "5MiB"}):
        first = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(first.parameters())
        first.itself = [first]
        del first
        second = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(second.parameters())
        assert registry.coordinator_of(second).plan.budgets.limits.host == 5 << 20


def test_weights_that_the_script_has_in_fp32_are_saved_in_fp32_as_their_masters(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain saves what it trains, which is fp32 where the script computes in bf16 by autocast."""
    with launch() as run:
        run.computes_in("bf16")
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optim.step()
            optim.zero_grad()
        model.save_pretrained(tmp_path / "saved")
        coordinator = registry.coordinator_of(model)
        coordinator.finish_updates()
        masters = {place.spec.name: exact_value(coordinator, place) for _, place in coordinator.places()}
        assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    assert "save_pretrained writes the masters in fp32, and state_dict() returns the bf16" in caplog.text
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    differs = [name for name, value in saved.items() if not torch.equal(value, masters[name])]
    assert differs == []
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    assert any((value != value.bfloat16()).any() for value in saved.values())


def test_weights_that_the_script_has_in_bf16_are_saved_in_bf16(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    with launch() as run:
        run.computes_in("bf16")
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}


def test_every_store_that_a_stopped_script_leaves_is_named(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def train() -> Any:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optim.step()
            optim.zero_grad()
        return model

    def script() -> None:
        with launch(memory={"device": "2MiB", "host": "96MiB"}):
            models = [train(), train()]
            assert len(models) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script()
    for place in (tmp_path / "swap", tmp_path / "swap" / "model-2"):
        state = f"no checkpoint folder was saved, and {place} has the states after step 1\n"
        assert f"infinity: stopped after step 2; {state}" in caplog.text


def test_a_script_with_a_reference_model_leaves_no_empty_directory(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    """The reference is offloaded first, into a directory below that of the model that is trained."""
    with launch(memory={"device": "2MiB", "host": "96MiB"}):
        reference = AutoModelForCausalLM.from_pretrained(checkpoint).eval().requires_grad_(False)
        with torch.no_grad():
            reference(input_ids=ids)
        assert list((tmp_path / "swap").iterdir())
        del reference
    assert not (tmp_path / "swap").exists()


def test_a_new_head_is_converted_too_and_saved_in_fp32(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    """With frozen weights beside, and a layer of which a part is trained."""
    with launch() as run:
        run.computes_in("bf16")
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model.resize_token_embeddings(100)
        model.model.layers[0].mlp.requires_grad_(False)
        optim = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        optim.step()
        model.save_pretrained(tmp_path / "saved")
    saved, given = load_file(tmp_path / "saved" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    frozen = [name for name in saved if "layers.0.mlp" in name]
    assert len(frozen) == 3
    assert all(torch.equal(saved[name], given[name]) for name in frozen)


def test_what_is_written_into_a_state_dict_outside_gathered_is_never_lost_silently(
    checkpoint: Path, launch: Launch
) -> None:
    """An average that takes its tensors from one state_dict does this."""
    with launch(weights="host", optimizer="host"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        for value in model.state_dict().values():
            value.mul_(2.0)
        with pytest.raises(infinity.ModelError, match="was changed outside infinity"):
            model.state_dict()
        with pytest.raises(infinity.ModelError, match="was changed outside infinity"):
            dict(infinity.state_dict(model))


@pytest.mark.cpu_only("the warning is about the processor that computes")
@pytest.mark.parametrize(("flags", "slow"), [({"avx2"}, True), ({"avx2", "avx512_bf16"}, False)])
def test_a_trained_model_in_bf16_is_warned_of_where_the_processor_has_no_instructions_for_it(
    flags: set[str], slow: bool, checkpoint: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(script_messages, "processor", lambda: ProcessorFacts("Some CPU", frozenset(flags)))
    with launch(memory={"host": "96MiB"}):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        torch.optim.AdamW(model.parameters())
    warning = "infinity: dtype bf16: this processor has neither avx512_bf16 nor amx_bf16, so it multiplies such"
    assert (warning in caplog.text) == slow
