"""A Trainer that knows nothing of infinity trains the same with its model offloaded."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import infinity
from infinity.coordinator import registry
from infinity.integrations.transformers import Trainer as OffloadedTrainer
from infinity.optim.adamw import AdamW
from infinity.runtime.pins import pinned
from tests import sampling
from tests.conftest import weights_of
from tests.integrations.conftest import Launch
from tests.integrations.training import SAVING, Rows, log_of, trainer

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulation, clipping, cosine": {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
    },
    "no clipping": {"max_grad_norm": 0.0},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "the older AdamW": {"optim": "adamw_torch", "weight_decay": 0.1},
    "SGD": {"optim": "sgd"},
    "Adagrad": {"optim": "adagrad"},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}


FEW = ["as it is", "accumulation, clipping, cosine", "evaluation", "checkpointing", "by length"]
"""The optimizers of the others are tried in tests/optim, and reentrant checkpointing in tests/runtime."""


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in FEW else pytest.mark.long) for way in WAYS])
def test_losses_and_norms_are_those_of_the_plain_script(
    way: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    logs = []
    for context in (nullcontext(), launch()):
        with context as run:
            one = trainer(checkpoint, rows, tmp_path / "out", **WAYS[way])
            one.train()
            logs.append(log_of(one))
            assert (run is not None) == registry.is_offloaded(one.model)
    assert len(logs[0]) >= 8
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_precision_is_near_the_plain_script(
    kind: str, dtype: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """The fp32 weights are the master then; autocast copies none."""
    if kind == "fp16" and dtype == "bfloat16":
        pytest.skip("autocast to fp16 copies bf16 weights")
    logs = []
    for context in (nullcontext(), launch()):
        with context:
            one = trainer(checkpoint, rows, tmp_path / "out", dtype=dtype, **{kind: True})
            one.train()
            logs.append([entry["loss"] for entry in one.state.log_history if "loss" in entry])
    torch.testing.assert_close(logs[1], logs[0], rtol=2e-2, atol=2e-2)


def test_an_eight_bit_optimizer_becomes_int8_moments(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", optim="paged_adamw_8bit")
        before = one.evaluate(rows)["eval_loss"]
        one.train()
        assert registry.coordinator_of(one.model).plan.placement.form.moments == "int8"
        assert type(one.optimizer.optimizer) is AdamW
        assert one.evaluate(rows)["eval_loss"] < before
    assert "paged_adamw_8bit: infinity keeps the moments in int8" in caplog.text


def test_lion_is_infinitys(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", optim="lion_32bit", learning_rate=1e-4, max_steps=6)
        before = one.evaluate()["eval_loss"]
        one.train()
        assert type(one.optimizer.optimizer) is infinity.Lion
        assert one.evaluate()["eval_loss"] < before


def test_an_optimizer_that_needs_weights_in_memory_is_refused_with_the_fix(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch(), pytest.raises(infinity.ConfigError, match=r"Adafactor works on weights in memory.*adamw_torch"):
        trainer(checkpoint, rows, tmp_path / "out", optim="adafactor").train()


def test_predict_gives_the_logits_of_the_plain_model(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    logits = []
    for context in (nullcontext(), launch()):
        with context:
            one = trainer(checkpoint, rows, tmp_path / "out")
            logits.append(torch.tensor(one.predict(rows[:4]).predictions))
            one.train()
            logits[-1] = torch.cat([logits[-1], torch.tensor(one.predict(rows[:4]).predictions)])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


def test_the_state_of_the_trainer_is_that_of_the_plain_script(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = []
    for context in (nullcontext(), launch()):
        with context:
            output = tmp_path / f"out{len(names)}"
            trainer(checkpoint, rows, output, **SAVING).train()
            names.append({path.name for path in (output / "checkpoint-6").iterdir()})
            assert json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())["global_step"] == 6
    assert names[1] == names[0] | {"infinity.json"}
    assert "names of the states" not in caplog.text


# -- without the launcher ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [pytest.param("in RAM", marks=pytest.mark.long), "by infinity"])
def test_infinitys_trainer_trains_saves_and_resumes_without_the_launcher(
    loaded: str, checkpoint: Path, rows: Rows, tmp_path: Path
) -> None:
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "640KiB", "host": "96MiB"},
        "nvme": {"paths": [str(tmp_path / "swap")]},
        "commit_every": 1,
        "pins": 3,
    }
    plain = trainer(checkpoint, rows, tmp_path / "plain", **SAVING)
    plain.train()
    logs = []
    for folder in (None, str(tmp_path / "out" / "checkpoint-4")):
        if loaded == "in RAM":
            model = AutoModelForCausalLM.from_pretrained(checkpoint)
        elif folder is None:
            model = infinity.load_pretrained(checkpoint, config, dtype=torch.float32)
        else:
            break
        args = TrainingArguments(**{**plain.args.to_dict(), "output_dir": str(tmp_path / "out")})
        one = OffloadedTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:6], swap_config=config)
        one.train(resume_from_checkpoint=folder)
        logs.append(log_of(one))
        assert set(pinned(one.model).values()) == {2, 4, 6}
        infinity.close(one.model)
    for log in logs:
        torch.testing.assert_close(log, log_of(plain), rtol=1e-6, atol=1e-6)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-6") is not None


def test_what_one_trainer_wishes_is_not_for_the_next_model(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    with launch():
        first = trainer(checkpoint, rows, tmp_path / "out", optim="adamw_8bit", **SAVING)
        with pytest.raises(infinity.ResumeError):  # other moments than the folder's
            first.train(resume_from_checkpoint=True)
    with launch(memory={"device": "4MiB", "host": "384MiB"}):
        first = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        first.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
        second = trainer(checkpoint, rows, tmp_path / "other")
        plain = AutoModelForCausalLM.from_pretrained(checkpoint)
        second.create_optimizer()
        expected = weights_of(second.model)
        assert registry.coordinator_of(second.model).plan.placement.form.moments == "fp32"
        with torch.no_grad():
            assert all(torch.equal(plain.get_parameter(name) + 0, value) for name, value in expected.items())


def test_a_trainer_in_mixed_precision_does_not_convert_the_next_model(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", bf16=True).create_optimizer()
        second = trainer(checkpoint, rows, tmp_path / "out")
        second.create_optimizer()
        assert {parameter.dtype for parameter in second.model.parameters()} == {torch.float32}


def test_several_gpus_that_are_visible_are_not_used_by_data_parallel(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    class SeesTwo(TrainingArguments):
        def __post_init__(self) -> None:
            super().__post_init__()
            assert self.device.type == "cpu"  # which counts the GPUs
            self._n_gpu = 2

    args = SeesTwo(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    with launch():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        one = Trainer(model=model, args=args, train_dataset=rows)
        one.train()
    assert args.n_gpu == 1
    assert not isinstance(one.model_wrapped, torch.nn.DataParallel)


def test_evaluation_in_bf16_names_the_dtype_to_load(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """Trainer converts the model when it evaluates outside of training."""
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", bf16_full_eval=True)
        one.train()
        with pytest.raises(infinity.InfinityError, match="dtype="):
            one.evaluate()


def saved(checkpoint: Path, rows: Rows, launch: Launch, output: Path) -> list[float]:
    """Train for six steps, saving after steps 2 and 4, and return the log."""
    with launch():
        whole = trainer(checkpoint, rows, output, save_total_limit=3, **SAVING)
        whole.train()
    return log_of(whole)


@pytest.mark.parametrize("before", ["nothing", "an evaluation"])
def test_the_launchers_folder_is_where_the_first_train_of_a_script_goes_on(
    before: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    whole = saved(checkpoint, rows, launch, tmp_path / "out")
    with launch(resume=tmp_path / "out" / "checkpoint-4"):
        one = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=3, **SAVING)
        if before == "an evaluation":
            one.evaluate()
        one.train()
        assert log_of(one)[-len(whole) :] == whole
        assert one.state.global_step == 6
        one.train()  # another one begins at step 0, as without infinity
        assert [entry["step"] for entry in one.state.log_history if "loss" in entry] == list(range(1, 7))


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("named", [True, "the same folder", False])
def test_a_script_may_name_the_launchers_folder_too(
    named: bool | str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    saved(checkpoint, rows, launch, tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with launch(resume=tmp_path / "out" / "checkpoint-6"):
        one = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=3, **(SAVING | {"max_steps": 7}))
        one.train(resume_from_checkpoint=str(tmp_path / "link" / "checkpoint-6") if isinstance(named, str) else named)
        assert one.state.global_step == registry.coordinator_of(one.model).steps == 7


def test_a_script_that_names_another_folder_than_the_launcher_is_refused_and_both_ways_on_work(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    saved(checkpoint, rows, launch, tmp_path / "out")
    last, earlier = (tmp_path / "out" / name for name in ("checkpoint-6", "checkpoint-4"))
    ways: dict[str, Any] = SAVING | {"max_steps": 7, "save_total_limit": 3}
    for named, said in ((str(last), str(last)), (True, str(last))):
        with launch(resume=earlier):
            one = trainer(checkpoint, rows, tmp_path / "out", **ways)
            with pytest.raises(
                infinity.ConfigError, match=rf"^--resume {earlier}: .* from {said}, because .*{named!r}"
            ):
                one.train(resume_from_checkpoint=named)
    for told, named in ((None, last), (earlier, None)):  # each leaves one of them out
        with launch(resume=told):
            one = trainer(checkpoint, rows, tmp_path / "again", **(ways | {"save_strategy": "no"}))
            one.train(resume_from_checkpoint=named and str(named))
            assert one.state.global_step == registry.coordinator_of(one.model).steps == 7


def test_an_optimizer_that_a_script_makes_before_train_is_refused_where_the_model_goes_on(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    saved(checkpoint, rows, launch, tmp_path / "out")
    with launch(resume=tmp_path / "out" / "checkpoint-4"):
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        with pytest.raises(infinity.ConfigError, match=r"start at step 0\. Let trainer\.train\(\) make the optimizer"):
            one.create_optimizer()
        one.train()
        assert one.state.global_step == 6


@pytest.mark.parametrize("how", sampling.some(["compiled"]))
def test_a_compiled_model_warns_of_nothing_that_infinity_does(
    how: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(), warnings.catch_warnings(record=True) as warned:
        trainer(checkpoint, rows, tmp_path / "out", max_steps=2, **WAYS[how]).train()
    said = [str(each.message) for each in warned] + caplog.messages
    assert not [each for each in said if "Dynamo" in each or "recompile_limit" in each]
