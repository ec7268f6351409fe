"""`infinity finetune --method dpo` and `--method reward` train as TRL's trainers do."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from infinity.cli.main import main
from infinity.cli.step_watch import StepCallback
from infinity.io.directory import FINISHED_NAME
from tests.cli.test_finetune import arguments_of, run
from tests.cli.test_sft import BATCH, COUNT, LENGTH, STEPS, job, losses_of, write
from tests.processes import Forked

__all__ = ["job"]

HELD_OUT = 4
CHATS = [
    {
        "prompt": [{"role": "user", "content": f"say {index}"}],
        "chosen": [{"role": "assistant", "content": "fox " * (1 + index % 5)}],
        "rejected": [{"role": "assistant", "content": "hen " * (1 + index % 3)}],
    }
    for index in range(COUNT)
]
IMPLICIT = [
    {
        "chosen": f"\n\nHuman: say {index}\n\nAssistant: fox" + " fox" * (index % 5),
        "rejected": f"\n\nHuman: say {index}\n\nAssistant: hen" + " hen" * (index % 3),
    }
    for index in range(COUNT)
]


def plain(job: dict[str, Any], rows: list[dict[str, Any]], method: str, lora: int | None, **more: Any) -> list[float]:
    """Losses of the steps of TRL's trainer with the same batches, and that on held-out rows."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    order = np.random.default_rng((0, 0)).permutation(COUNT)
    options: dict[str, Any] = {
        "output_dir": str(job["--output"].parent / "trl"),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": HELD_OUT,
        "gradient_accumulation_steps": job["--gradient-accumulation"],
        "max_steps": STEPS,
        "seed": 0,  # of adapters
        "learning_rate": job["--lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "max_length": LENGTH,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
    }
    adapters = (
        {}
        if lora is None
        else {
            "peft_config": LoraConfig(
                r=lora,
                lora_alpha=2 * lora,
                target_modules="all-linear",
                task_type="CAUSAL_LM" if method == "dpo" else "SEQ_CLS",
            )
        }
    )
    kind, config = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "reward": (trl.RewardTrainer, trl.RewardConfig)}[method]
    torch.manual_seed(0)  # of a new head
    path: Any = job["--model"]
    model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if method == "dpo"
        else AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    )
    trainer: Any = kind(
        model,
        args=config(**options, **more),
        train_dataset=Dataset.from_list([rows[index] for index in order]),
        eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
        processing_class=AutoTokenizer.from_pretrained(path),
        **adapters,
    )
    # No decay apart for norms: infinity finetune has one rate of decay for all.
    trainer.get_decay_parameter_names = lambda model: [name for name, _ in model.named_parameters()]
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.covering(most=2)
@pytest.mark.parametrize(
    ("method", "rows", "lora", "more"),
    [
        ("dpo", CHATS, None, {"beta": 0.5}),
        ("dpo", IMPLICIT, 4, {}),
        ("reward", CHATS, None, {"center_rewards_coefficient": 0.1}),
    ],
)
def test_losses_are_those_of_trl(
    method: str, rows: list[dict[str, Any]], lora: int | None, more: dict[str, float], job: dict[str, Any]
) -> None:
    write(job, rows)
    expected = plain(job, rows, method, lora, **more)
    apart = job["--data"].with_name("apart.jsonl")
    write(job | {"--data": apart}, rows[:HELD_OUT])
    flags = [str(each) for item in more.items() for each in (f"--{item[0]}", item[1])]
    adapters = {} if lora is None else {"--lora": lora}
    assert run(job | {"--method": method, "--eval-data": apart} | adapters, *flags, "--verify-output") == 0
    report = json.loads((job["--output"] / "report.json").read_text())
    assert [*losses_of(job), report["evaluations"][-1]["loss"]] == pytest.approx(expected, abs=1e-6)
    assert [each.name for each in job["--config"].parent.glob("swap/*")] == [FINISHED_NAME]


def _killed(arguments: list[str]) -> int:
    """Killed after the second step, when the third has begun."""
    begins = StepCallback.on_step_begin

    def begin(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        begins(self, args, state, control, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCallback, "on_step_begin", begin)
        return main(arguments)


BESIDE = pytest.mark.long(kept="only here a run is killed beside its reference, and goes on with that")


@pytest.mark.parametrize("method", [pytest.param("dpo", marks=BESIDE), "reward"])
def test_a_killed_run_ends_in_the_same_bits(method: str, job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    write(job, IMPLICIT)
    job |= {"--method": method}
    assert run(job) == 0
    expected, swap = losses_of(job), tmp_path / "swap"
    other = job | {"--output": tmp_path / "other"}
    process = Forked(_killed, arguments_of(other))
    process.finished()
    assert process.returncode == -signal.SIGKILL
    if method == "dpo":
        assert main(["finetune", "--resume", str(swap), "--model", str(job["--output"])]) == 2
        assert "which its reference model must have: give --model with the original weights" in capsys.readouterr().err
    assert main(["finetune", "--resume", str(swap), "--model", str(job["--model"])]) == 0
    assert "resumed after step 2 of 4" in capsys.readouterr().out
    assert losses_of(other) == expected
    (name,) = {each.name for each in job["--output"].glob("*.safetensors")}
    found, same = (load_file(each["--output"] / name) for each in (job, other))
    assert found.keys() == same.keys()
    assert all(torch.equal(found[each], same[each]) for each in found)
    assert [each.name for each in swap.iterdir()] == [FINISHED_NAME]


CHOSEN = ["--columns", "prompt=prompt", "completion=chosen"]


@pytest.mark.parametrize(
    ("method", "refused", "instead"),
    [
        ("sft", {"the loss is the model's own. Leave it out": [*CHOSEN, "--loss_type", "dft"]}, CHOSEN),
        (
            "reward",
            {
                "--no-packing does nothing with --method reward: leave it out": ["--no-packing"],
                "--sample does nothing with --method reward: leave it out": ["--sample", "fox"],
                "reward: use --gradient-accumulation instead": ["--micro-batches", "2"],
            },
            ["--gradient-accumulation", "2"],
        ),
        (
            "dpo",
            {
                "leave it out, or give --method dpo": ["--method", "sft", "--beta", "0.2"],
                "the model that --model names: leave it out": ["--sync_ref_model"],
                "TRL refuses --loss_type exo_pair of --method dpo: ValueError: Label smoothing must": [
                    "--loss_type",
                    "exo_pair",
                ],
            },
            ["--loss_type", "exo_pair", "--label_smoothing", "0.1", "--beta", "0.2"],
        ),
    ],
)
def test_what_a_method_does_not_do_is_refused_and_the_way_on_trains(
    method: str, refused: dict[str, list[str]], instead: list[str], job: dict[str, Any], capsys: Any
) -> None:
    write(job, CHATS[:4])
    job |= {"--method": method, "--gradient-accumulation": 1, "--steps": 1, "--eval-split": 0.5}
    del job["--epochs"]
    for says, flags in refused.items():
        assert run(job, *flags) == 2
        assert says in capsys.readouterr().err
    assert run(job, *instead) == 0
