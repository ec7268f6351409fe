"""A script that names infinity at the libraries' own plug points trains the same, and nothing of a library is replaced
meanwhile."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    core_model_loading,
)

import infinity
from infinity.coordinator import registry
from infinity.integrations import infinity_config
from infinity.integrations.checkpoint_folders import folders_of
from infinity.runtime.deferred_parameters import is_a_deferred
from tests.conftest import residuals_of, states_of, weights_of
from tests.integrations.training import Rows, log_of
from tests.models import mixtral

Load = Callable[..., Any]
STEPS = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1}
QUIET = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
ADAMW = {"lr": 1e-3}


@pytest.fixture(autouse=True)
def _closed(tmp_path: Path) -> Iterator[None]:
    """The models of a test are closed at its end, while their directories are there."""
    yield
    end()


def end() -> None:
    """End like a process: close its models, and keep their generations."""
    for run in infinity_config._runs.values():
        run.close(failed=True)
    infinity_config._runs.clear()


def loaded(path: Path, swap: dict[str, Any], *, dtype: Any = "auto", **options: Any) -> Any:
    config = infinity.InfinityConfig(swap, **options)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config)


def arguments(output: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(output), **({"save_strategy": "no"} | STEPS | QUIET | options))


def trainer(model: Any, rows: Rows, output: Path, **options: Any) -> Trainer:
    callbacks = options.pop("callbacks", [infinity.hf.Checkpoints()])
    optimizers = options.pop("optimizers", (None, None))
    factory = options.pop("factory", (infinity.hf.optimizer_factory, ADAMW) if optimizers[0] is None else None)
    return Trainer(
        model,
        arguments(output, **options),
        train_dataset=rows,
        eval_dataset=rows[:4],
        optimizers=optimizers,
        optimizer_cls_and_kwargs=factory,
        callbacks=callbacks,
    )


def plain(path: Path, rows: Rows, output: Path, **options: Any) -> Trainer:
    args = arguments(output, **options)
    return Trainer(AutoModelForCausalLM.from_pretrained(path), args, train_dataset=rows, eval_dataset=rows[:4])


def test_a_trainer_trains_the_same_and_saves_what_plain_transformers_reads(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    model = loaded(checkpoint, swap)
    assert not registry.is_offloaded(model)
    ours, theirs = trainer(model, rows, tmp_path / "ours"), plain(checkpoint, rows, tmp_path / "theirs")
    for each in (ours, theirs):
        each.train()
        each.evaluate()
        each.save_model()
    assert registry.is_offloaded(model)
    torch.testing.assert_close(log_of(ours), log_of(theirs), rtol=1e-6, atol=1e-6)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, weight in theirs.model.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config == json.loads((tmp_path / "theirs" / "config.json").read_text())


def test_converted_tensors_stay_as_long_as_something_reads_them(swap: dict[str, Any], tmp_path: Path) -> None:
    mixtral()[0].save_pretrained(tmp_path / "model")  # type: ignore[operator]
    plainly = AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.state_dict()
    model = loaded(tmp_path / "model", swap)
    parts = [model.model, copy.deepcopy(model).model]
    del model
    gc.collect()
    for part in parts:
        with torch.no_grad():
            assert all(torch.equal(part.get_parameter(name) + 0, plainly[name]) for name, _ in part.named_parameters())
    assert list(tmp_path.glob("infinity-load-*"))
    parts.clear()
    del part
    gc.collect()
    assert not list(tmp_path.glob("infinity-load-*"))


def test_nothing_of_the_quantizer_stays_in_the_model(checkpoint: Path, swap: dict[str, Any]) -> None:
    model, other = loaded(checkpoint, swap), AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.to_dict() == other.config.to_dict()
    assert vars(model).keys() == vars(other).keys()
    assert vars(model.config).keys() == vars(other.config).keys()


def test_an_optimizer_that_is_made_first_serves_trainers_without_the_argument(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    model = loaded(checkpoint, swap)
    optimizer = infinity.hf.optimizer_factory(model, lr=1e-3)
    ours, theirs = trainer(model, rows, tmp_path, optimizers=(optimizer, None)), plain(checkpoint, rows, tmp_path)
    for each in (ours, theirs):
        each.train()
    torch.testing.assert_close(log_of(ours), log_of(theirs), rtol=1e-6, atol=1e-6)


def test_an_optimizer_that_is_made_first_is_told_of_the_trainer_or_refused(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    options = {"bf16": True, "gradient_accumulation_steps": 3, "save_strategy": "steps", "save_total_limit": 1}
    model = loaded(checkpoint, swap | {"pins": 2})
    first = infinity.hf.optimizer_factory(model, lr=1e-3)
    with pytest.raises(infinity.ConfigError, match=r"bf16.*offloaded in fp32.*optimizer_factory\(model.*args=args\)"):
        trainer(model, rows, tmp_path / "out", optimizers=(first, None), **options)
    trainer(model, rows, tmp_path / "out", optimizers=(first, None), **(options | {"bf16": False}))
    assert first.accumulation_steps == 3
    end()
    model = loaded(checkpoint, swap | {"nvme": {"paths": [str(tmp_path / "other")]}})
    args = arguments(tmp_path / "out", **options)
    told = infinity.hf.optimizer_factory(model, lr=1e-3, args=args)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert told.accumulation_steps == 3
    assert registry.coordinator_of(model).plan.placement.pins == 2
    trainer(model, rows, tmp_path / "out", optimizers=(told, None), **options)


def test_a_model_that_was_only_evaluated_is_offloaded_again_in_the_trainers_precision(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    model = loaded(checkpoint, swap)
    with torch.no_grad():
        model.eval()(input_ids=rows[0]["input_ids"][None])
    assert registry.is_offloaded(model)
    trainer(model, rows, tmp_path, bf16=True, max_steps=1).train()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_plain_loop_trains_the_same(checkpoint: Path, swap: dict[str, Any], rows: Rows) -> None:
    losses: list[list[float]] = []
    for ours in (True, False):
        model = loaded(checkpoint, swap) if ours else AutoModelForCausalLM.from_pretrained(checkpoint)
        make: Any = infinity.hf.optimizer_factory if ours else lambda m, **o: torch.optim.AdamW(m.parameters(), **o)
        optimizer = make(model, lr=1e-3, weight_decay=0.0)
        losses.append([])
        for row in rows[:3]:
            loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)


def test_weight_decay_is_that_of_a_trainer(checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path) -> None:
    model = loaded(checkpoint, swap)
    ours = trainer(model, rows, tmp_path, factory=(infinity.hf.optimizer_factory, ADAMW | {"weight_decay": 0.1}))
    theirs = plain(checkpoint, rows, tmp_path, weight_decay=0.1)
    for each in (ours, theirs):
        each.create_optimizer()
    assert [(len(group["params"]), group["weight_decay"]) for group in ours.optimizer.param_groups] == [
        (len(group["params"]), group["weight_decay"]) for group in theirs.optimizer.param_groups
    ]


def test_a_trainers_own_optimizer_is_refused_with_the_fix(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    model = loaded(checkpoint, swap)
    with pytest.raises(infinity.InfinityError, match=r"an optimizer of infinity"):
        Trainer(model, arguments(tmp_path), train_dataset=rows).train()


@pytest.mark.parametrize("made_first", [False, True])
def test_a_later_process_goes_on_from_a_folder_to_the_same_bits(
    made_first: bool, checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    """An optimizer that is made first has offloaded the model before the Trainer loads the folder's weights. These are
    in 16 bits, and the model's masters are finer."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": 2}

    def begun(**options: Any) -> Trainer:
        model = loaded(checkpoint, swap, dtype=torch.bfloat16, **options)
        first = {"args": arguments(tmp_path / "out", **saving)} if made_first else {}
        optimizer = infinity.hf.optimizer_factory(model, lr=1e-3, **first) if made_first else None
        return trainer(model, rows, tmp_path / "out", optimizers=(optimizer, None), **saving)

    first = begun()
    first.train()
    folder = tmp_path / "out" / "checkpoint-4"
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    tensors, masters = weights_of(first.model) | states_of(first.model), dict(residuals_of(first.model))
    end()
    second = begun(resume=folder)
    second._load_from_checkpoint(str(folder))
    assert made_first or all(map(is_a_deferred, second.model.parameters())), "weights are read into memory"
    second.train(resume_from_checkpoint=str(folder))
    assert log_of(second) == log_of(first)
    assert dict(residuals_of(second.model)) == masters
    for name, value in (weights_of(second.model) | states_of(second.model)).items():
        assert torch.equal(value, tensors[name]), name


@pytest.mark.parametrize("used_first", [False, True])
def test_a_model_that_goes_on_and_its_reference_share_the_memory(
    used_first: bool, checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    memory = {"device": "1280KiB", "host": "160MiB"}
    first = trainer(loaded(checkpoint, swap), rows, tmp_path / "out", save_strategy="steps", save_steps=4)
    first.train()
    trained = weights_of(first.model)
    end()
    folder = tmp_path / "out" / "checkpoint-4"
    policy, reference = (loaded(checkpoint, swap | {"memory": memory}, **how) for how in ({"resume": folder}, {}))
    begin, use = (
        lambda: infinity.hf.optimizer_factory(policy, lr=1e-3),
        lambda: reference.eval()(input_ids=rows[0]["input_ids"][None]),
    )
    with torch.no_grad():
        for act in (use, begin) if used_first else (begin, use):
            act()
    assert all(torch.equal(value, trained[name]) for name, value in weights_of(policy).items())
    plainly = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(value, plainly[name]) for name, value in weights_of(reference).items())
    plans = [registry.coordinator_of(model).plan for model in (policy, reference)]
    earlier, later = reversed(plans) if used_first else plans
    assert earlier.budgets.limits.device == 640 << 10
    assert later.budgets.limits.device == (1280 << 10) - earlier.device_bytes


def test_a_model_that_went_on_takes_other_weights_later(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    """Those of the best folder, for one; the folder that it went on from may be gone then."""
    trainer(loaded(checkpoint, swap), rows, tmp_path / "out", save_strategy="steps", save_steps=4).train()
    end()
    folder = tmp_path / "out" / "checkpoint-4"
    plainly = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    others = {name: 2 * value for name, value in plainly.items()}
    in_memory, model = (loaded(checkpoint, swap, resume=folder) for _ in range(2))
    with torch.no_grad():
        for parameter in in_memory.parameters():
            parameter.zero_()
    for each in (in_memory, copy.deepcopy(model)):  # a copy goes on from nothing
        each.load_state_dict(others)
        assert all(torch.equal(value, others[name]) for name, value in each.state_dict().items())
    optimizer = infinity.hf.optimizer_factory(model, lr=1e-3)
    model.load_state_dict(others)
    assert not torch.equal(weights_of(model)["lm_head.weight"], others["lm_head.weight"]), "it is where it went on"
    model(input_ids=rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss.backward()
    optimizer.step()
    shutil.rmtree(folder)
    model.load_state_dict(others)
    assert all(torch.equal(value, others[name]) for name, value in weights_of(model).items())


def test_a_folder_is_gone_on_from_only_by_a_model_that_was_loaded_for_it(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(loaded(checkpoint, swap), rows, tmp_path / "out", **saving).train()
    end()
    folder = str(tmp_path / "out" / "checkpoint-2")
    other = swap | {"nvme": {"paths": [str(tmp_path / "other")]}}
    with pytest.raises(infinity.ModelError, match="InfinityConfig.*resume="):
        trainer(loaded(checkpoint, other), rows, tmp_path / "out", **saving).train(resume_from_checkpoint=folder)


def test_without_the_callback_a_folder_says_that_it_pins_nothing(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer(loaded(checkpoint, swap), rows, tmp_path / "out", callbacks=[], **saving).train()
    end()
    with pytest.raises(infinity.ResumeError, match="Checkpoints"):
        loaded(checkpoint, swap, resume=tmp_path / "out" / "checkpoint-2")


def test_a_model_above_the_memory_is_saved_shard_by_shard(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(checkpoint, swap)
    infinity.hf.optimizer_factory(model, lr=1e-3)
    monkeypatch.setattr(type(model), "state_dict", _never)
    model.save_pretrained(tmp_path / "out", max_shard_size="200KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("all weights are gathered")


def test_a_checkpoint_of_other_files_is_loaded_as_its_refusal_says(
    checkpoint: Path, swap: dict[str, Any], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.config.save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(infinity.NotAvailableError, match=r"pytorch_model\.bin.*save it with save_pretrained"):
        loaded(tmp_path / "old", swap)
    AutoModelForCausalLM.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    assert infinity.hf.optimizer_factory(loaded(tmp_path / "new", swap), lr=1e-3).param_groups


def test_what_cannot_work_is_refused(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(infinity.ConfigError, match=r"no learning rate.*lr=1e-5"):
        infinity.hf.optimizer_factory(loaded(checkpoint, swap))
    with pytest.raises(infinity.ConfigError, match="was not loaded with"):
        trainer(AutoModelForCausalLM.from_pretrained(checkpoint), rows, tmp_path)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(infinity.ConfigError, match="CUDA_VISIBLE_DEVICES=0"):
        trainer(loaded(checkpoint, swap), rows, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(infinity.NotAvailableError, match="torchrun --nproc-per-node N -m infinity.run"):
        loaded(checkpoint, swap)


COMPARES = "param_needs_quantization" in inspect.getsource(core_model_loading.set_param_for_module)
"""Whether transformers compares sizes under a quantization_config: later versions do."""


@pytest.mark.parametrize("resized", [False, True])
def test_what_a_checkpoint_lacks_and_what_has_another_size_is_initialized_as_without_infinity(
    resized: bool, checkpoint: Path, swap: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"num_labels": 3, "pad_token_id": 0}
    given |= {"vocab_size": 80, "ignore_mismatched_sizes": True} if resized else {}
    found = []
    for options in ({}, {"quantization_config": infinity.InfinityConfig(swap)}):
        torch.manual_seed(3)
        refused = resized and bool(options) and not COMPARES
        with pytest.raises(infinity.ModelError, match="Install transformers") if refused else nullcontext():
            model = AutoModelForSequenceClassification.from_pretrained(checkpoint, **given, **options)
            found.append({name: value.clone() for name, value in model.named_parameters()})
    for name, value in found[0].items():
        assert torch.equal(found[-1][name], value), name


def test_a_config_is_plain_data_and_shares_the_memory_of_its_models(checkpoint: Path, swap: dict[str, Any]) -> None:
    config = infinity.InfinityConfig(swap)
    again = infinity.InfinityConfig.from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()
    assert again.run is config.run is copy.deepcopy(config).run
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config.to_dict())
    assert infinity_config.run_of(list(model.parameters())) is config.run
    infinity.hf.optimizer_factory(model, lr=1e-3)
    assert list(Path(swap["nvme"]["paths"][0]).iterdir())
    config.close()
    assert not Path(swap["nvme"]["paths"][0]).exists()


def test_vertical_is_refused_where_nothing_would_come_of_it(swap: dict[str, Any]) -> None:
    with pytest.raises(infinity.NotAvailableError, match="Leave vertical out of the swap config"):
        infinity.InfinityConfig(swap | {"vertical": True})
    infinity.InfinityConfig(swap)


def test_an_older_transformers_is_refused_when_a_config_is_made(
    swap: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from infinity import *` names the class."""
    monkeypatch.setattr(infinity_config, "WeightConverter", None)
    with pytest.raises(infinity.ConfigError, match="needs transformers 5"):
        infinity.InfinityConfig(swap)


def test_folders_that_the_trainer_removed_are_let_go_whatever_way_leads_to_them(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    model = loaded(checkpoint, swap)
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 6}
    trainer(model, rows, tmp_path / "link" / ".." / "link" / "out", **saves).train()
    folders = {each.name for each in (tmp_path / "there" / "out").iterdir()}
    assert folders == {"checkpoint-5", "checkpoint-6"}
    assert {each.name for each in folders_of(model)} == folders


def test_adapters_around_a_loaded_model_are_saved_and_pinned(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded(checkpoint, swap), lora)
    trainer(model, rows, tmp_path / "out", **saves).train()
    assert registry.is_offloaded(model)
    assert {each.name for each in folders_of(model)} == {"checkpoint-2", "checkpoint-4"}
    expected = weights_of(model)
    end()
    folder = tmp_path / "out" / "checkpoint-4"
    plainly = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), folder)
    for name, weight in plainly.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_a_trainer_whose_optimizer_is_torchs_own_would_pin_nothing(
    checkpoint: Path, swap: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    model = loaded(checkpoint, swap)
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    with pytest.raises(infinity.ConfigError, match="optimizer_cls_and_kwargs="):
        trainer(model, rows, tmp_path / "out", save_strategy="steps", optimizers=(sgd, None)).train()
