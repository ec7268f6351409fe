"""`infinity finetune` under torchrun: the ranks share the batches of a step, and end in the bits of one process with
all of them; whatever one of them cannot do ends all."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from infinity.checkpoint import save_pretrained
from infinity.cli import finetune, finished_run, output, run_report
from infinity.cli.main import main
from infinity.cli.step_watch import StepCallback
from infinity.cli.trainers import FinetuneSFTTrainer
from infinity.errors import InfinityError
from infinity.io.directory import FINISHED_NAME
from infinity.sharded.rank_stores import counts_in, steps_of
from tests.cli.test_evaluation import evaluations
from tests.cli.test_finetune import TEXT, run, tokenizer
from tests.cli.test_step_watch import of_tensorboard, saved
from tests.models import VOCABULARY
from tests.processes import Forked
from tests.ranks import workers

Job = dict[str, Any]
BATCHES = 4
"""Batches of a step, over all ranks."""
FEW = {"--steps": 3}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A small run of one process, whose layers are larger than the smallest slice of a rank."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return named(tmp_path, "one", 1)


def named(folder: Path, name: str, ranks: int, **overrides: Any) -> Job:
    config: dict[str, Any] = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "32MiB", "host": "256MiB"},
        "nvme": {"paths": [str(folder / f"swap-{name}")]},
        "commit_every": 1,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config | overrides))
    return {
        "--model": folder / "model",
        "--data": folder / "text.txt",
        "--config": folder / f"{name}.yaml",
        "--output": folder / f"out-{name}",
        "--steps": 6,
        "--sequence-length": 16,
        "--batch-size": 2,
        "--gradient-accumulation": BATCHES // ranks,
        "--lr": 3e-3,
        "--dtype": "fp32",
    }


def on_rank(arguments: list[str], act: str = "", rank: int = -1) -> int:
    """Args: act: what `rank` does, of those below."""
    run_report._plot = _no_picture
    of_rank, ranks = str(workers.dist.get_rank()), str(workers.dist.get_world_size())
    os.environ.update(RANK=of_rank, LOCAL_RANK=of_rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    AcceleratorState._reset_state(reset_partial_state=True)
    if rank == int(workers.dist.get_rank()):
        ACTS[act]()
    return main(arguments)


def _no_picture(*_: Any) -> None:
    """Drawing takes as long as several steps."""


def at_step(number: int, act: Callable[[], object]) -> None:
    """Args: act: done before the forward of this step."""
    begins = StepCallback.on_step_begin

    def acting(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step + 1 == number:
            act()
        begins(self, args, state, control, **named)

    StepCallback.on_step_begin = acting  # type: ignore[method-assign]


def is_asked_to_stop() -> None:
    """In the third step; as torchrun does it, where there are several ranks."""

    def ask() -> None:
        for _ in range(2 if workers.dist.get_world_size() > 1 else 1):
            os.kill(os.getpid(), signal.SIGTERM)

    at_step(3, ask)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed() -> None:
    """In the fifth step."""
    at_step(5, dies)


def has_a_loss_that_is_no_number() -> None:
    compute, calls = FinetuneSFTTrainer.compute_loss, itertools.count(1)

    def bad(*given: Any, **named: Any) -> Any:
        return compute(*given, **named) * (float("nan") if next(calls) == 3 else 1.0)

    FinetuneSFTTrainer.compute_loss = bad  # type: ignore[method-assign]


def cannot_write_the_output() -> None:
    def full(self: Any, saved: Any) -> None:
        raise OSError(28, "No space left on device")

    output.OutputDirectory._put_in_place = full  # type: ignore[method-assign]


def cannot_save() -> None:
    def full(*_: Any) -> None:
        raise InfinityError("no space left")

    save_pretrained.write_weights = full


def cannot_close() -> None:
    def fail(model: Any) -> None:
        raise OSError(5, "Input/output error")

    finetune.close = fail


def reads_other_text() -> None:
    read = finetune.read

    def other(*arguments: Any) -> Any:
        data = read(*arguments)
        data.trained.digest = "another"
        return data

    finetune.read = other


def is_killed_before_the_stores_go() -> None:
    def die(*_: Any) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    finished_run._remove = die


def is_killed_at_once() -> None:
    at_step(1, dies)


ACTS = {
    each.__name__: each
    for each in (
        is_asked_to_stop,
        is_killed,
        has_a_loss_that_is_no_number,
        cannot_write_the_output,
        cannot_save,
        cannot_close,
        reads_other_text,
        is_killed_before_the_stores_go,
        is_killed_at_once,
    )
}


def arguments_of(job: Job, *flags: str) -> list[str]:
    return ["finetune", *(str(part) for item in job.items() for part in item), *flags]


def curve(folder: Path) -> list[list[str]]:
    """Step, loss, learning rate and norm."""
    with (folder / "loss.csv").open() as file:
        return [row[:4] for row in csv.reader(file)]


def require_same(folder: Path, other: str, one: str = "one") -> None:
    assert curve(folder / f"out-{other}") == curve(folder / f"out-{one}")
    weights = [(folder / f"out-{name}" / "model.safetensors").read_bytes() for name in (one, other)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_end_in_the_bits_of_one_process_with_their_batches(ranks: int, job: Job, tmp_path: Path) -> None:
    assert run(job | FEW, "--verify-output") == 0
    given = named(tmp_path, "all", ranks) | FEW
    assert workers.run(ranks, on_rank, arguments_of(given, "--verify-output")) == [0] * ranks
    require_same(tmp_path, "all")
    assert os.listdir(tmp_path / "swap-all") == [FINISHED_NAME]
    assert workers.run(ranks, on_rank, arguments_of(given, "--resume")) == [0] * ranks, "nothing is left to do"


@pytest.mark.long
def test_ranks_train_adapters_save_them_and_write_samples_as_one_process_does(job: Job, tmp_path: Path) -> None:
    (tmp_path / "apart.txt").write_text(TEXT[:900])
    flags = ["--lora", "4", "--eval-data", str(tmp_path / "apart.txt"), "--eval-steps", "2", "--save-best"]
    flags += ["--sample", "the quick", "--sample-tokens", "5", "--save-every", "3", "--logger", "tensorboard"]
    assert run(job, *flags) == 0
    begun = arguments_of(named(tmp_path, "all", 2), *flags)
    assert workers.run(2, on_rank, begun, "is_asked_to_stop", 1) == [128 + signal.SIGTERM] * 2
    assert workers.run(2, on_rank, ["finetune", "--resume", str(tmp_path / "swap-all")]) == [0, 0]
    for file in ("adapter_model.safetensors", "samples.jsonl"):
        assert (tmp_path / "out-all" / file).read_bytes() == (tmp_path / "out-one" / file).read_bytes()
    assert curve(tmp_path / "out-all") == curve(tmp_path / "out-one")
    assert evaluations(tmp_path / "out-all") == evaluations(tmp_path / "out-one")
    models = [saved(tmp_path / f"out-{name}") for name in ("one", "all")]
    assert models[0] == models[1]
    assert "checkpoint-3" in models[0]
    steps = [step for step, _ in of_tensorboard(tmp_path / "out-all")["train/loss"]]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_ranks_learn_pairs_of_answers_as_one_process_does(method: str, job: Job, tmp_path: Path) -> None:
    rows = [{"prompt": "the fox", "chosen": " red" * (1 + i % 3), "rejected": " dog" * (1 + i % 4)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    some = FEW | {"--data": tmp_path / "rows.jsonl", "--method": method, "--eval-split": 0.2}
    assert run(job | some, "--verify-output") == 0
    assert workers.run(2, on_rank, arguments_of(named(tmp_path, "all", 2) | some, "--verify-output")) == [0, 0]
    require_same(tmp_path, "all")
    losses = [
        json.loads((tmp_path / f"out-{name}" / "report.json").read_text())["evaluations"][-1]["loss"]
        for name in ("one", "all")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert os.listdir(tmp_path / "swap-all") == [FINISHED_NAME]


@pytest.mark.long
@pytest.mark.parametrize("frozen", ["bf16", "nf4"])
def test_ranks_write_a_merged_model_as_one_process_does(frozen: str, job: Job, tmp_path: Path) -> None:
    flags = ["--lora", "4", "--merge", "--save-every", "2", "--verify-output", "--frozen", frozen]
    assert run(job | FEW, *flags) == 0
    assert workers.run(2, on_rank, arguments_of(named(tmp_path, "all", 2) | FEW, *flags)) == [0, 0]
    require_same(tmp_path, "all")
    assert saved(tmp_path / "out-all") == saved(tmp_path / "out-one")


def logged(arguments: list[str]) -> list[str]:
    """Return the lines that infinity logs in a run."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infinity").addHandler(handler)
    assert on_rank(arguments) == 0
    return lines


def test_adapters_begin_with_the_same_values_on_all_ranks_and_the_report_counts_the_whole_model(
    job: Job, tmp_path: Path
) -> None:
    given = named(tmp_path, "all", 2) | {"--steps": 1}
    told = workers.run(2, logged, arguments_of(given, "--lora", "4"))
    assert "with different values" not in " ".join(line for lines in told for line in lines)
    report = json.loads((tmp_path / "out-all" / "report.json").read_text())
    numel = sum(parameter.numel() for parameter in LlamaForCausalLM.from_pretrained(tmp_path / "model").parameters())
    assert report["parameters"] == numel + report["trained_parameters"]


def refused(arguments: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        return on_rank(arguments), errors.getvalue()


def test_rank_0_alone_says_that_the_store_has_a_run(job: Job, tmp_path: Path) -> None:
    given = named(tmp_path, "all", 2) | {"--steps": 1}
    assert workers.run(2, on_rank, arguments_of(given, "--keep-store")) == [0, 0]
    (first, told), (second, nothing) = workers.run(2, refused, arguments_of(given | {"--output": tmp_path / "other"}))
    assert (first, second) == (2, 2)
    assert told.count("contains the generations of an earlier run") == 1
    assert "error" not in nothing


@pytest.mark.long
def test_a_run_that_one_rank_is_asked_to_stop_goes_on_with_other_ranks(job: Job, tmp_path: Path, capsys: Any) -> None:
    assert run(job) == 0
    begun = arguments_of(named(tmp_path, "all", 2))
    assert workers.run(2, on_rank, begun, "is_asked_to_stop", 1) == [128 + signal.SIGTERM] * 2
    store = tmp_path / "swap-all"
    assert steps_of(store, 2) == {3}
    resumed = ["finetune", "--resume", str(store)]
    assert workers.run(3, on_rank, resumed) == [2, 2, 2]
    assert steps_of(store, 2) == {3}, "3 ranks cannot share 4 batches"
    assert workers.run(4, on_rank, resumed) == [0] * 4
    require_same(tmp_path, "all")
    assert counts_in(store) == []


@pytest.mark.long(kept="only here a rank is killed in a step, and the store of ranks goes on in one process")
def test_a_run_of_one_process_goes_on_with_ranks_and_back(job: Job, tmp_path: Path) -> None:
    assert run(job) == 0
    first = named(tmp_path, "all", 1) | {"--steps": 6}
    assert workers.run(1, on_rank, arguments_of(first), "is_asked_to_stop", 0) == [128 + signal.SIGTERM]
    store = tmp_path / "swap-all"
    assert counts_in(store) == [1]
    stopped = workers.ended(2, on_rank, ["finetune", "--resume", str(store)], "is_killed", 1)
    assert [each.exitcode for each in stopped] == [0, -signal.SIGKILL]
    assert stopped[0].value == 1
    assert main(["finetune", "--resume", str(store)]) == 0
    require_same(tmp_path, "all")


@pytest.mark.long
def test_ranks_that_keep_no_generations_end_in_the_same_bits(job: Job, tmp_path: Path) -> None:
    assert run(job | FEW) == 0
    in_memory = {"weights": "host", "optimizer": "host", "nvme": {}, "commit_every": 0}
    begun = arguments_of(named(tmp_path, "all", 2, **in_memory) | FEW, "--verify-output")
    assert workers.run(2, on_rank, begun) == [0, 0]
    require_same(tmp_path, "all")


@pytest.mark.long
def test_what_is_said_of_the_end_of_a_run_is_not_believed_of_the_next(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "swap-all"
    begun = arguments_of(named(tmp_path, "all", 2))
    ended = workers.ended(2, on_rank, begun, "is_killed_before_the_stores_go", 0)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL, 0]
    assert (store / FINISHED_NAME).exists()
    assert counts_in(store) == [2]
    longer = ["finetune", "--resume", str(store), "--steps", "7", "--output", str(tmp_path / "longer")]
    assert workers.ended(2, on_rank, longer, "is_killed_at_once", 1)[1].exitcode == -signal.SIGKILL
    assert not (store / FINISHED_NAME).exists()
    assert workers.run(2, on_rank, ["finetune", "--resume", str(store)]) == [2, 1], "its output is there"
    assert workers.run(2, on_rank, longer) == [0, 0]
    assert len(curve(tmp_path / "longer")) == 8


def test_what_an_interrupted_removal_left_of_other_ranks_goes_with_the_next_resume(job: Job, tmp_path: Path) -> None:
    store = tmp_path / "swap-all"
    assert workers.run(2, on_rank, arguments_of(named(tmp_path, "all", 2) | FEW, "--keep-store")) == [0, 0]
    shutil.copytree(store, tmp_path / "aside")
    longer = ["finetune", "--resume", str(store), "--output", str(tmp_path / "longer"), "--steps"]
    assert main([*longer, "4"]) == 0
    for name in ("rank-00000-of-00002", "rank-00001-of-00002"):
        shutil.copytree(tmp_path / "aside" / name, store / name, ignore=shutil.ignore_patterns("generation-*"))
    assert counts_in(store) == [1, 2]
    shutil.rmtree(tmp_path / "longer")
    assert main([*longer, "5"]) == 0
    assert counts_in(store) == [1]


def test_a_rank_that_reads_other_text_is_noticed(job: Job, tmp_path: Path) -> None:
    begun = arguments_of(named(tmp_path, "all", 2))
    assert workers.run(2, on_rank, begun, "reads_other_text", 1) == [2, 2]
    assert not (tmp_path / "out-all").exists()


def test_the_model_is_complete_where_another_rank_fails_after_it_was_saved(job: Job, tmp_path: Path) -> None:
    begun = arguments_of(named(tmp_path, "all", 2) | FEW)
    assert workers.run(2, on_rank, begun, "cannot_close", 1) == [1, 1]
    (made,) = tmp_path.glob(".out-all-*")
    AutoModelForCausalLM.from_pretrained(made / "model")


@pytest.mark.long
def test_a_run_goes_on_with_more_steps_and_no_other_learning_rate(job: Job, tmp_path: Path) -> None:
    begun = arguments_of(named(tmp_path, "all", 2), "--keep-store")
    assert workers.run(2, on_rank, begun) == [0, 0]
    shutil.rmtree(tmp_path / "out-all")
    longer = ["finetune", "--resume", str(tmp_path / "swap-all"), "--steps", "7", "--lr", "3e-3"]
    assert workers.run(2, on_rank, longer) == [0, 0]
    assert len(curve(tmp_path / "out-all")) == 8
    again = ["finetune", "--resume", str(tmp_path / "swap-all"), "--steps", "8", "--output", str(tmp_path / "more")]
    assert workers.run(2, on_rank, [*again, "--lr", "1"]) == [2, 2]
    assert workers.run(2, on_rank, again) == [0, 0]


def test_a_loss_of_one_rank_that_is_no_number_skips_the_step_of_all(job: Job, tmp_path: Path) -> None:
    begun = arguments_of(named(tmp_path, "all", 2))
    assert workers.run(2, on_rank, begun, "has_a_loss_that_is_no_number", 1) == [0, 0]
    rows = curve(tmp_path / "out-all")
    assert [row[3] == "nan" for row in rows[1:]] == [False, True, False, False, False, False]


@pytest.mark.parametrize("act", [pytest.param("cannot_write_the_output", marks=pytest.mark.long), "cannot_save"])
def test_an_output_that_cannot_be_written_ends_all_ranks_and_can_be_written_again(
    act: str, job: Job, tmp_path: Path
) -> None:
    assert run(job | FEW) == 0
    codes = workers.run(2, on_rank, arguments_of(named(tmp_path, "all", 2) | FEW), act, 0)
    assert codes[0] == 1
    assert main(["finetune", "--resume", str(tmp_path / "swap-all")]) == 0
    require_same(tmp_path, "all")


@pytest.mark.long
def test_torchrun_ends_the_others_when_a_rank_is_killed_and_the_run_goes_on(job: Job, tmp_path: Path) -> None:
    assert run(job) == 0
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "infinity",
    ]
    begun = [*launcher, *arguments_of(named(tmp_path, "all", 2))]
    with subprocess.Popen(begun, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step 1/"):
            assert process.poll() is None, process.communicate()[1]
        ranks = psutil.Process(process.pid).children()
        killed = next(each for each in ranks if each.environ()["RANK"] == "1")
        killed.kill()
        process.communicate(timeout=100)
        assert process.returncode != 0
    assert [each for each in ranks if each.is_running()] == []
    assert not (tmp_path / "out-all").exists()
    resumed = [*launcher, "finetune", "--resume", str(tmp_path / "swap-all")]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 6/6") == 1, "rank 0 speaks for all"
    require_same(tmp_path, "all")


@pytest.mark.long(kept="only here ranks have no more than what torchrun gives its processes")
def test_processes_that_are_started_as_torchrun_does_it_are_ranks_and_the_first_speaks_for_all(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(job | FEW) == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in of_rank.items():
            monkeypatch.setenv(name, str(value))
        started.append(Forked(main, arguments_of(named(tmp_path, "all", 2) | FEW), apart=True))
    said, errors = zip(*(each.finished() for each in started), strict=True)
    assert [each.returncode for each in started] == [0, 0], errors
    assert said[0].count("step 3/3") == 1
    assert said[1] == ""
    require_same(tmp_path, "all")


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(2, marks=pytest.mark.long(kept="only here the ranks share an odd number of held-out rows")),
        pytest.param(4, marks=pytest.mark.long),
    ],
)
def test_ranks_count_each_token_once_in_losses_of_answers_and_of_held_out_rows(
    ranks: int, job: Job, tmp_path: Path
) -> None:
    """Answers of other lengths on each rank. Of 2 ranks one has fewer held-out rows than the other, of 4 some none."""
    rows = [{"prompt": "the lazy", "completion": "fox jumps " * (1 + index % 7)} for index in range(24)]
    for name, those in (("rows", rows), ("apart", rows[2:5])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in those))
    options = {"--data": tmp_path / "rows.jsonl", "--eval-data": tmp_path / "apart.jsonl", "--eval-steps": 2} | FEW
    assert run(job | options, "--no-packing") == 0
    expected = losses_and_evaluations(tmp_path / "out-one")
    given = arguments_of(named(tmp_path, "all", ranks) | options, "--no-packing")
    assert workers.run(ranks, on_rank, given) == [0] * ranks
    assert losses_and_evaluations(tmp_path / "out-all") == pytest.approx(expected, rel=1e-6)


def seed_of_first_step(arguments: list[str]) -> int:
    """Return the seed of torch's random numbers on this rank."""
    seeds: list[int] = []
    at_step(1, lambda: seeds.append(torch.initial_seed()))
    assert on_rank(arguments) == 0
    return seeds[0]


def test_each_rank_draws_random_numbers_of_its_own(job: Job, tmp_path: Path) -> None:
    given = named(tmp_path, "all", 2) | {"--steps": 1, "--seed": 7}
    assert workers.run(2, seed_of_first_step, arguments_of(given)) == [7, 8]


def losses_and_evaluations(folder: Path) -> list[float]:
    report = json.loads((folder / "report.json").read_text())
    return [float(loss) for _, loss, *_ in curve(folder)[1:]] + [each["loss"] for each in report["evaluations"]]
