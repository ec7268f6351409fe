"""A Trainer that knows nothing of infinity trains the same with its model offloaded."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import infinity
from infinity.coordinator import registry
from infinity.integrations.transformers import Trainer as OffloadedTrainer
from infinity.io.pins import read_pins
from infinity.optim.adamw import AdamW
from infinity.runtime.pins import pinned
from tests import sampling
from tests.conftest import weights_of
from tests.integrations.conftest import Launch

Rows = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "infinity")


def trainer(checkpoint: Path, rows: Rows, output: Path, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=options.pop("dtype", "auto"))
    return Trainer(model=model, args=TrainingArguments(**(given | options)), train_dataset=rows, eval_dataset=rows[:6])


def log_of(trainer: Trainer) -> list[float]:
    """Losses, norms and metrics, in order."""
    keys = ("loss", "eval_loss", "grad_norm")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


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


SLOW = ["compiled"]


@pytest.mark.parametrize("way", [way for way in WAYS if way not in SLOW] + sampling.some(SLOW))
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
    assert len(logs[0]) >= 12
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-6, atol=1e-6)


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
        one = trainer(checkpoint, rows, tmp_path / "out", optim="lion_32bit", learning_rate=1e-4)
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


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_a_run_goes_on_from_its_checkpoint_folder(
    limit: int | None, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """The folder of an earlier step, of which another generation is the newest."""
    with launch():
        whole = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=limit, **SAVING)
        whole.train()
        folders = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert [path.name for path in pinned(whole.model)] == folders[-2:]
        assert [(tmp_path / "out" / name / "portable").exists() for name in folders[:-2]] == [True] * len(folders[:-2])
    steps = [int(name.split("-")[1]) for name in folders]
    assert steps == {None: [2, 4, 6], 1: [6], 2: [4, 6]}[limit]
    with launch():
        again = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=limit, **(SAVING | {"max_steps": 8}))
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 8
    expected = {entry["step"]: entry["loss"] for entry in whole.state.log_history if "loss" in entry}
    found = {entry["step"]: entry["loss"] for entry in again.state.log_history if "loss" in entry}
    assert all(found[step] == loss for step, loss in expected.items())


@pytest.mark.parametrize(
    ("before", "after", "folders", "with_a_copy"), [(1, 3, 3, 1), (3, 1, 1, 0), (2, None, 5, 2), (None, 2, 2, 0)]
)
def test_a_run_goes_on_with_another_limit_in_the_room_that_its_store_has(
    before: int | None,
    after: int | None,
    folders: int,
    with_a_copy: int,
    checkpoint: Path,
    rows: Rows,
    launch: Launch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ways: dict[str, Any] = SAVING | {"lr_scheduler_type": "constant"}
    with launch():
        whole = trainer(checkpoint, rows, tmp_path / "whole", **(ways | {"max_steps": 10, "save_strategy": "no"}))
        whole.train()
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", save_total_limit=before, **(ways | {"max_steps": 4})).train()
    assert "room for" not in caplog.text
    with launch():
        again = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=after, **(ways | {"max_steps": 10}))
        again.train(resume_from_checkpoint=True)
        assert log_of(again) == log_of(whole)
        there = sorted((tmp_path / "out").iterdir(), key=lambda path: int(path.name.split("-")[1]))
        assert len(there) == folders
        assert [(path / "portable").exists() for path in there] == [True] * with_a_copy + [False] * (
            folders - with_a_copy
        )
        assert list(pinned(again.model)) == there[with_a_copy:]
    had, wished = ({None: 2, 1: 2, 2: 3, 3: 4}[limit] for limit in (before, after))
    assert f"was made with room for {had} pinned generations and keeps it, not {wished} as now" in caplog.text
    assert ("the older ones get a portable copy" in caplog.text) == (had < wished)


def test_room_is_made_for_as_many_pins_as_a_store_can_have(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=1000, **(SAVING | {"max_steps": 2}))
        one.train()
        assert registry.coordinator_of(one.model).plan.placement.pins == 64


def test_what_is_resumed_in_the_middle_ends_as_the_run_that_was_not_stopped(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    ends = []
    for folder in (None, tmp_path / "out" / "checkpoint-4"):
        with launch():
            one = trainer(checkpoint, rows, tmp_path / "out", save_total_limit=3, **SAVING)
            one.train(resume_from_checkpoint=folder and str(folder))
            ends.append((log_of(one), weights_of(one.model)))
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=0, atol=0)
    assert all(torch.equal(value, ends[0][1][name]) for name, value in ends[1][1].items())


def test_a_checkpoint_folder_loads_in_plain_transformers(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.train()
        expected = weights_of(one.model)
        one.save_model(str(tmp_path / "last"))
    for folder in ("out/checkpoint-6", "last"):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert all(torch.equal(plain.get_parameter(name), value) for name, value in expected.items())


def test_the_best_model_is_there_at_the_end(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    ends = []
    for context in (nullcontext(), launch()):
        with context as run:
            best = SAVING | {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
            one = trainer(checkpoint, rows, tmp_path / f"out{len(ends)}", greater_is_better=True, **best)
            one.train()
            assert one.state.best_global_step < 6
            ends.append(one.evaluate()["eval_loss"])
            best_loss = max(entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry)
            assert run is None or ends[-1] == best_loss
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)


def test_a_second_train_goes_on(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    logs = []
    for context in (nullcontext(), launch()):
        with context:
            one = trainer(checkpoint, rows, tmp_path / "out")
            one.train()
            one.train()
            logs.append(log_of(one))
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("saves", [False, True])
def test_two_trainers_train_one_model_one_after_the_other(
    saves: bool, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """The second has an optimizer of its own, which begins anew."""
    logs = []
    for context in (nullcontext(), launch(pins=2 if saves else 0)):
        with context:
            first = trainer(checkpoint, rows, tmp_path / "out")
            first.train()
            options = {"learning_rate": 5e-4, "report_to": [], "use_cpu": True, "logging_steps": 1, "max_steps": 6}
            options |= SAVING if saves else {"save_strategy": "no"}
            arguments = TrainingArguments(str(tmp_path / f"second{len(logs)}"), **options)
            second = Trainer(first.model, arguments, train_dataset=rows)
            second.train()
            logs.append(log_of(first) + log_of(second))
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-5, atol=1e-6)
    assert (tmp_path / "second1" / "checkpoint-6" / "infinity.json").exists() == saves


def test_a_second_trainer_that_saves_needs_pins_and_says_so_before_it_trains(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        first = trainer(checkpoint, rows, tmp_path / "out")
        first.train()
        arguments = TrainingArguments(str(tmp_path / "out"), max_steps=2, report_to=[], use_cpu=True, **SAVING)
        second = Trainer(first.model, arguments, train_dataset=rows)
        with pytest.raises(infinity.PlanError, match="Set `pins: 2` in the swap config"):
            second.train()
        assert second.state.global_step == 0


class Rotation(TrainerCallback):  # type: ignore[misc]
    """A script's own: one folder stays."""

    def __init__(self, remove: Callable[[Path], object]) -> None:
        self._remove = remove

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        for folder in Path(args.output_dir).glob("checkpoint-*"):
            if folder.name != f"checkpoint-{state.global_step}":
                self._remove(folder)


def test_folders_that_the_script_removes_itself_let_their_generations_go(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **(SAVING | {"save_steps": 1}))
        one.add_callback(Rotation(lambda folder: shutil.rmtree(folder)))
        one.train()
    last = tmp_path / "out" / "checkpoint-6"
    assert [pin.folder for pin in read_pins(tmp_path / "swap")] == [str(last)]
    with launch():
        again = trainer(checkpoint, rows, tmp_path / "out", **(SAVING | {"max_steps": 8}))
        again.train(resume_from_checkpoint=str(last))
        shutil.rmtree(tmp_path / "out")
        assert pinned(again.model) == {}
    assert not list((tmp_path / "swap").glob("*.infinity*"))


def test_a_folder_that_vanished_otherwise_stays_pinned_and_is_named(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(pins=3):
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.add_callback(Rotation(lambda folder: subprocess.run(["rm", "-r", folder], check=True)))
        one.train()
    folders = [Path(pin.folder).name for pin in read_pins(tmp_path / "swap")]
    assert folders[-1] == "checkpoint-6"
    assert len(folders) == 3
    for folder in folders[:-1]:
        assert f"{folder} pin generations and are not there" in caplog.text or f"{folder}, " in caplog.text
    assert f"infinity checkpoint unpin {tmp_path / 'swap'} --all-gone" in caplog.text


def test_what_is_removed_after_the_model_was_closed_stays_pinned_and_the_store_stays(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.train()
        infinity.close(one.model)
        shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    assert [Path(pin.folder).name for pin in read_pins(tmp_path / "swap")] == ["checkpoint-4", "checkpoint-6"]


def test_a_folder_that_is_not_infinitys_is_refused(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    with launch(), pytest.raises(infinity.ResumeError, match=r"checkpoint-6.*infinity\.json"):
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train(resume_from_checkpoint=True)


def test_resuming_a_model_that_was_used_is_refused(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        one.train()
        with pytest.raises(infinity.ModelError, match="Resume in a new process"):
            one.train(resume_from_checkpoint=True)


def test_without_generations_a_folder_holds_weights_only_and_says_so(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(commit_every=0):
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    assert "will hold weights and no optimizer states: commit_every is 0" in caplog.text
    assert not (tmp_path / "out" / "checkpoint-6" / "infinity.json").exists()
    with launch(), pytest.raises(infinity.ResumeError):
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train(resume_from_checkpoint=True)


def test_a_run_that_ended_well_leaves_the_store_only_where_folders_need_it(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        trainer(checkpoint, rows, tmp_path / "out").train()
    assert not list((tmp_path / "swap").glob("*.infinity*"))
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    with launch(), pytest.raises(infinity.StoreNotEmptyError, match="checkpoint-6"):
        trainer(checkpoint, rows, tmp_path / "out").train()


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


@pytest.mark.parametrize("loaded", ["in RAM", "by infinity"])
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


@pytest.mark.parametrize("before", ["nothing", "an evaluation"])
def test_a_trainer_that_would_begin_at_step_0_on_a_resumed_model_is_refused(
    before: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train()
    folder = tmp_path / "out" / "checkpoint-4"
    with launch(resume=folder):
        one = trainer(checkpoint, rows, tmp_path / "out", **SAVING)
        if before == "an evaluation":
            one.evaluate()
        with pytest.raises(
            infinity.ConfigError, match=r"begins at step 0\. Leave --resume out, and call trainer\.train"
        ):
            one.train()
    with launch(resume=folder):
        trainer(checkpoint, rows, tmp_path / "out", **SAVING).train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("how", sampling.some(["compiled"]))
def test_a_compiled_model_warns_of_nothing_that_infinity_does(
    how: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch(), warnings.catch_warnings(record=True) as warned:
        trainer(checkpoint, rows, tmp_path / "out", max_steps=2, **WAYS[how]).train()
    said = [str(each.message) for each in warned] + caplog.messages
    assert not [each for each in said if "Dynamo" in each or "recompile_limit" in each]
