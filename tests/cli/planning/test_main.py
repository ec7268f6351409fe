"""`infinity plan` from the command line."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from infinity.cli.bench import survey, sweep
from infinity.cli.bench.main import main as bench
from infinity.cli.main import main
from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.main import _missing_here
from infinity.cli.planning.model import adapt
from infinity.cli.planning.scenario import GAIN_MIN, as_yaml, with_changes
from infinity.config import load_config
from infinity.errors import PlanError
from infinity.io.disk_profile import save_profile
from infinity.plan import local_rates
from infinity.plan.disk import DiskLimits
from infinity.state.training_step import BatchShape
from tests.cli.planning.scenarios import scenario_of
from tests.cli.planning.test_model import directory
from tests.io.test_store import measured
from tests.models import llama

H200 = ["--machine", "h200", "--batch-size", "4", "--sequence-length", "2048"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["plan", "--model", *arguments]) == code
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *arguments, "--json", code=code))
    return found


def test_the_first_line_says_whether_it_fits_how_fast_it_is_and_what_the_drives_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, _, step, *_ = said(capsys, "llama-3-8b", *H200, "--set", "optimizer=nvme").splitlines()
    assert step.startswith("one step of 8,192 tokens (--batch-size 4 × --sequence-length 2048), predicted: ")
    assert first.startswith("fits: ")
    for part in (
        "per step of 8,192 tokens",
        "bound by",
        "TB written per 1,000 steps",
        "of the drives' rated endurance",
    ):
        assert part in first


def test_a_model_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys, "llama-3-70b", "--machine", "consumer", "--set", "weights=host", "optimizer=host", "memory.host=48GiB",
        code=1,
    )  # fmt: skip
    first, second = text.splitlines()
    assert first.startswith("does not fit: memory.host is 48.00 GiB, but the plan needs")
    assert second.startswith("it fits with weights: auto, optimizer: auto, gradients: auto in the swap config: ")
    assert second.endswith(" min per step")


STAY = ["activations=keep", "recompute=blocks"]


def test_activations_without_room_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3-8b", "--machine", "consumer", "--set", *STAY]
    first, second = said(capsys, *options, "--sequence-length", "2048", "--batch-size", "64", code=1).splitlines()[:2]
    assert first.startswith("does not fit: activations need ")
    found = re.fullmatch(
        r"it fits with activations: nvme in the swap config, or with at most ([0-9,]+) tokens in a micro-batch", second
    )
    assert found is not None, second
    tokens = int(found[1].replace(",", ""))
    for code in (0, 1):
        said(capsys, *options, "--sequence-length", str(tokens + code), code=code)


def test_a_larger_share_of_the_device_is_named_where_activations_fit_then(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3-8b", "--machine", "h200", "--batch-size", "8", "--sequence-length", "2048"]
    second = said(capsys, *options, "--set", "memory.device=8GiB", *STAY, code=1).splitlines()[1]
    found = re.match(
        r"it fits with memory: {device: (\d+GiB)} in the swap config, .*or with at most [0-9,]+ tokens", second
    )
    assert found is not None, second
    said(capsys, *options, "--set", f"memory.device={found[1]}", *STAY)


def test_recomputing_is_only_proposed_where_the_activations_fit_then(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3-8b", "--machine", "consumer", "--batch-size", "8", "--set", "activations=keep"]
    few, many = (said(capsys, *options, "--sequence-length", length, code=1) for length in ("1024", "65536"))
    assert "recompute: blocks in the swap config" in few.splitlines()[1]
    assert "recompute: blocks" not in many.splitlines()[1]


def test_what_is_only_tried_leaves_the_model_as_it_is() -> None:
    scenario = scenario_of("llama-3-8b", "consumer")
    adapt(scenario.model, 8, experts=False)
    tried = scenario.outcome(with_changes(scenario.config, {"memory.device": "1536MiB", "activations": "recompute"}))
    assert tried.plan.budgets.limits.device == 1536 << 20
    assert not scenario.tiled
    assert replace(scenario, config=tried.config).outcome().plan.layout == tried.plan.layout
    assert scenario.tiled == {"lm_head": 3}  # which is what the run does


@pytest.mark.long
def test_the_model_is_not_copied_for_what_does_not_fit_in_tiles_either(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenario_of("llama-3-8b", "consumer")
    adapt(scenario.model, 8, experts=False)
    monkeypatch.delattr(copy, "deepcopy")
    with pytest.raises(PlanError):
        scenario.outcome(with_changes(scenario.config, {"memory.device": "64MiB"}))


def test_a_swap_file_that_the_disks_have_no_room_for_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = said(capsys, "llama-3-405b", "--machine", "consumer", code=1).splitlines()
    assert first.startswith("does not fit: the swap file takes ")
    assert "/mnt/nvme0 has room for 3.64 TiB" in first or "/mnt/nvme0 has room for 3725.29 GiB" in first
    assert others == []


@pytest.mark.parametrize("budgets", [{"host": "900TiB"}, {"host": "60GiB", "device": "60GiB"}])
def test_budgets_that_the_machine_does_not_have_are_named(budgets: dict[str, str]) -> None:
    """On the CPU both are RAM."""
    machine = replace(MACHINES["consumer"], name="this machine", up=0.0, decode=1e9)
    here = replace(
        scenario_of("llama-3-8b", "consumer"),
        machine=machine,
        device=torch.device("cpu"),
        config=load_config({"memory": budgets, "weights": "host", "optimizer": "host", "gradients": "host"}),
        disks=DiskLimits(0),
        batch=BatchShape(1, 128),
    )
    with pytest.raises(
        PlanError, match=r"RAM, because memory.host is .* and this machine has 64\.00 GiB|memory.host is 60"
    ):
        here.outcome()
    found = here.fits_if()
    assert found is not None
    assert as_yaml(found[0]).startswith("memory: {host: 32768MiB, device: 16384MiB}, ")
    assert here._ram_bytes(found[1].plan) <= machine.host_bytes


def test_what_this_machine_does_not_have_is_one_line_each(tmp_path: Path) -> None:
    machine = replace(MACHINES["consumer"], name="this machine")
    config = {"memory": {"host": "96GiB", "device": "8GiB"}, "nvme": {"paths": [str(tmp_path / "no" / "swap")]}}
    host, path = _missing_here(machine, load_config(config))
    assert host.startswith("memory.host is 96.00 GiB, and this machine has 64.00 GiB free: ")
    assert path.startswith(f"nvme.paths: there is no directory {tmp_path / 'no'}, ")
    here = {"memory": {"host": "48GiB", "device": "8GiB"}, "nvme": {"paths": [str(tmp_path / "swap")]}}
    assert list(_missing_here(machine, load_config(here))) == []


def test_what_is_measured_beside_other_work_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 60.0)
    assert local_rates._busy() == ", while other work used 60 % of the processors: the rates may be too low"
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 10.0)
    assert local_rates._busy() == ""


def test_a_change_that_fits_leaves_room_for_activations() -> None:
    small = scenario_of("llama-3-8b", "consumer", weights="host", optimizer="host")
    assert small.fits_if() is not None
    assert replace(small, batch=BatchShape(512, 2048)).fits_if() is None


def test_without_a_gpu_activations_and_weights_are_said_to_take_ram(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(1)[0].save_pretrained(tmp_path / "model")
    assert main(["plan", "--model", str(tmp_path / "model"), "--sequence-length", "16", "--cpu"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"memory.device \S+ \S+ of \S+ \S+ of RAM, for weights; activations take further RAM\n", text)
    assert re.search(r"\S+ \S+ of RAM is left for activations: at most", text)


@pytest.mark.long(kept="only here a plan says that a layer runs in tiles")
def test_a_layer_without_room_is_tiled_as_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "llama-3-8b", "--machine", "consumer", "--set", "memory.device=1536MiB", "--frozen", "bf16",
                "--lora", "8", "--sequence-length", "32")  # fmt: skip
    assert text.startswith("fits: ")
    assert "'lm_head' runs in 3 tiles: memory.device has no room for its weights at once" in text


def test_a_plan_says_how_many_experts_the_tokens_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 4096}
    options = [str(directory(tmp_path, **mixture)), "--machine", "consumer", "--batch-size", "1"]
    few, many = (said(capsys, *options, "--sequence-length", length) for length in ("2", "512"))
    assert "  experts      12 units of 3.00 MiB: only routed ones are fetched" in few
    assert "  routing       the 2 tokens of a micro-batch use about 44% of the experts, if all are chosen" in few
    assert "  routing       the 512 tokens of a micro-batch use all experts\n" in many
    together = said(capsys, *options, "--sequence-length", "512", "--set", "experts=together")
    assert "routing" not in together
    assert "experts" not in together


def test_copies_of_all_weights_are_read_once_a_step() -> None:
    def moved(**ranks: Any) -> Any:
        config = {"weights": "nvme", "optimizer": "nvme", "memory": {"device": "64GiB", "host": "1TiB"}}
        scenario = replace(scenario_of("llama-3-8b", "8xh200", **config, **ranks), device=torch.device("cpu"))
        return replace(scenario, ranks=8, batch=BatchShape(1, 2048, passes=4)).outcome().prediction.moved

    world, none = moved(), moved(ranks={"gather": "none"})
    assert none.weights < 0.3 * world.weights
    assert none.gathered < 0.3 * world.gathered


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ranks.wire=gloo", "several ranks on GPUs pass weights through memory that they share"),
        ("weights=device", "weights: device"),
    ],
)
def test_a_plan_refuses_what_ranks_with_devices_refuse(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["plan", "--model", "llama-3-8b", "--machine", "8xh200", "--set", setting, "optimizer=nvme"]
    assert main(options) == 1
    assert message in capsys.readouterr().out


def test_the_numbers_say_where_they_are_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_WIDTH_MAX", "_INNER_MAX", "_TOKENS_MAX"):  # what is measured is small: nobody looks at its rate
        monkeypatch.setattr(local_rates, name, 128)
    for name in ("_UPDATE_NUMEL", "_UPDATE_NUMEL_MAX"):
        monkeypatch.setattr(local_rates, name, 1 << 20)
    small = ["--lora", "8", "--frozen", "nf4", "--set", "memory.host=8GiB", "memory.device=2GiB"]
    of_this = said(capsys, "gpt-j-6b", "--cpu", "--swap-dir", str(tmp_path), *small)
    assert "adam      " in of_this
    assert "measured now" in of_this
    assert "assumed" in of_this
    there = said(capsys, "gpt-j-6b", "--machine", "h200")
    assert "measured now" not in there


@pytest.mark.long
def test_a_frozen_base_in_four_bits_is_read_twice_and_never_written(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["mgpt-13b", "--machine", "consumer", "--lora", "4", "--set", "weights=nvme", "optimizer=nvme"]
    bf16, nf4 = (told(capsys, *options, "--frozen", form) for form in ("bf16", "nf4"))
    assert nf4["step_bytes"]["weights"] < 0.32 * bf16["step_bytes"]["weights"]
    assert nf4["step_bytes"]["written"] < 0.02 * nf4["step_bytes"]["read"]
    assert nf4["trained_parameters"] < 0.01 * nf4["parameters"]


def test_micro_batches_through_a_layer_read_the_weights_once(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3-8b", "--machine", "consumer", "--set", "weights=nvme", "optimizer=nvme", "memory.device=12GiB"]
    one = told(capsys, *options)["step_bytes"]["weights"]
    together = told(capsys, *options, "--micro-batches", "8")["step_bytes"]["weights"]
    assert together == pytest.approx(one, rel=0.2)  # more activations leave less room to slots
    assert told(capsys, *options, "--gradient-accumulation", "8")["step_bytes"]["weights"] > 4 * one


def test_eight_ranks_have_an_eighth_each(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3-8b", "--machine", "8xh200", "--set", "weights=host", "optimizer=nvme"]
    one, eight = (told(capsys, *options, "--ranks", ranks) for ranks in ("1", "8"))
    assert eight["step_bytes"]["written"] == pytest.approx(one["step_bytes"]["written"] / 8, rel=0.01)
    assert eight["ranks"] == 8


def test_a_plan_for_what_this_machine_does_not_have_says_in_its_first_line_that_there_are_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(1)[0].save_pretrained(tmp_path / "model")
    there = ["plan", "--model", str(tmp_path / "model"), "--sequence-length", "16", "--cpu"]
    assert main(there) == 0
    assert capsys.readouterr().out.startswith("fits: ")
    assert main([*there, "--set", "memory.host=4000TiB", "--swap-dir", f"{tmp_path}/not/there"]) == 0
    first, *warnings = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("fits, with 2 warnings: ")
    assert "the plan is for a machine with more memory" in warnings[0]
    assert warnings[1].startswith(f"warning: nvme.paths: there is no directory {tmp_path}/not")
    assert warnings[1].endswith("A run would end with this error.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-9b"], "did you mean llama-3-8b?"),
        (["llama-3-8b", "--set", "moment=int8"], "moment"),
        (["llama-3-8b", "--set", "moments"], "write KEY=VALUE"),
        (["llama-3-8b", "--set", "moments.form=int8"], "moments"),
        (["llama-3-8b", "--frozen", "nf4"], "--frozen does nothing without --lora"),
        (["llama-3-8b", "--machine", "h100"], "h200"),
        (["llama-3-8b", "--machine", "h200", "--ranks", "8"], "each rank needs one"),
        (["/not/there"], "neither a directory nor one of"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def _every_config() -> Iterator[dict[str, Any]]:
    """Return all configs that alternatives are chosen from, enumerated by hand."""
    placements: list[dict[str, Any]] = [{}, {"weights": "auto", "optimizer": "auto"}]
    forms = [{}, {"moments": "bf16"}, {"moments": "int8"}]
    commits: list[dict[str, Any]] = [{}, {"commit_every": 0}]
    for chosen in itertools.product(placements, forms, commits):
        yield {key: value for each in chosen for key, value in each.items()}


def test_alternatives_are_the_best_of_a_search_through_all() -> None:
    scenario = scenario_of("llama-3-8b", "consumer", weights="nvme", optimizer="nvme")
    before = scenario.outcome()
    seconds = {}
    for changes in _every_config():
        try:
            found = scenario.outcome(with_changes(scenario.config, changes))
        except PlanError:
            continue
        seconds[tuple(changes.items())] = found.prediction.seconds
    worth = {key: each for key, each in seconds.items() if each <= (1 - GAIN_MIN) * before.prediction.seconds}
    chosen = scenario.alternatives(before)
    assert len(chosen) == 3
    assert chosen[0].outcome.prediction.seconds == pytest.approx(min(worth.values()))
    for each in chosen:
        assert worth[tuple(each.changes.items())] == pytest.approx(each.outcome.prediction.seconds)
    worst = chosen[-1].outcome.prediction.seconds
    for changes, taken in worth.items():  # what is as fast has a chosen one's changes and further ones
        assert taken >= worst * (1 - 1e-6) or any(set(each.changes.items()) <= set(changes) for each in chosen)


def test_all_micro_batches_through_a_layer_are_offered_where_they_save() -> None:
    scenario = replace(scenario_of("llama-3-8b", "consumer", weights="nvme"), batch=BatchShape(1, 2048, passes=8))
    offered = scenario.alternatives(scenario.outcome())
    assert any(each.changes.get("vertical") for each in offered)


def test_an_assumed_disk_is_measured_as_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_MEMORY_BYTES", 16 << 20)
    monkeypatch.setattr(survey, "_SAMPLE_BYTES", 16 << 20)
    monkeypatch.setattr(sweep, "DEPTHS", (1,))
    monkeypatch.setattr(sweep, "BLOCKS", (1 << 20,))
    monkeypatch.setattr(sweep, "_REPEATS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources: dict[str, str] = {}
    assumed = local_rates._disks([tmp_path], sources)
    assert sources == {"disk": "assumed: 1 NVMe drive; `infinity-bench --path DIRECTORY` measures them"}
    assert bench(["--path", str(tmp_path), "--size", "32MiB"]) == 0
    assert local_rates._disks([tmp_path], sources) != assumed
    assert sources["disk"].startswith("profiled by infinity-bench, ")


def test_each_rank_keeps_its_slice_of_frozen_weights_in_4_bits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["gpt-j-6b", "--machine", "8xh200", "--lora", "8", "--frozen", "nf4", "--ranks"]
    alone, several = (
        re.search(r"([\d.]+) M frozen weights as nf4 in ([\d.]+) (\w)iB", said(capsys, *options, ranks))
        for ranks in ("1", "8")
    )
    assert alone is not None
    assert several is not None
    assert alone[3] == "G"
    assert several[3] == "M"
    assert float(several[1]) == pytest.approx(float(alone[1]) / 8, rel=0.01)
    assert float(several[2]) == pytest.approx(float(alone[2]) * 1024 / 8, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 8])
def test_other_forms_are_proposed_for_a_base_in_bf16_and_not_for_one_in_fp8(ranks: int, tmp_path: Path) -> None:
    def forms(model: str) -> set[str]:
        scenario = replace(scenario_of(model, "8xh200"), ranks=ranks)
        scenario.model.requires_grad_(False)
        return {changes["frozen"] for changes in scenario.choices() if "frozen" in changes}

    published = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert forms(directory(tmp_path / "bf16")) == {"int8", "nf4"}
    assert forms(directory(tmp_path / "fp8", quantization_config=published)) == set()


def test_a_disk_with_a_profile_has_the_rates_of_the_profile(tmp_path: Path) -> None:
    save_profile(tmp_path, measured(3e9, tmp_path))
    sources: dict[str, str] = {}
    assert local_rates._disks([tmp_path], sources) == (3e9, 3e9, pytest.approx(1.0))
    assert sources == {"disk": "profiled by infinity-bench, 2026-11-21"}
