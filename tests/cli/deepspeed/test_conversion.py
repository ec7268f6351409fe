"""Configs that public projects ship: each becomes a swap config that trains, and what it loses is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import infinity
from infinity.cli.deepspeed.config_reader import read
from infinity.cli.deepspeed.conversion import HINTS_MAX, ConfigConversion, convert, said, whole_number
from infinity.cli.deepspeed.conversion_report import swap_text, values_of
from infinity.cli.deepspeed.keys import LOST, KeyTreatment
from infinity.errors import ConfigError
from tests.cli.deepspeed.public import NVME, PUBLIC, Public
from tests.models import llama

ZERO = "zero_optimization"
MEMORY = {"device": "64MiB", "host": "256MiB"}


def written(values: Any, directory: Path, name: str = "ds_config.json") -> Path:
    path = directory / name
    path.write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
    return path


def converted(values: Any, directory: Path, name: str = "ds_config.json") -> ConfigConversion:
    return convert(read(written(values, directory, name)))


def fates(conversion: ConfigConversion) -> dict[str, KeyTreatment]:
    return {finding.shown: finding.fate for finding in conversion.findings}


def leaves(values: Any, conversion: ConfigConversion, prefix: str = "") -> list[str]:
    """Return the keys of a config, down to those whose value was converted as a whole."""
    found = {finding.shown for finding in conversion.findings}
    keys: list[str] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        keys += [name] if name in found or not isinstance(value, dict) else leaves(value, conversion, f"{name}.")
    return keys


def by_source(public: Public) -> str:
    return public.source.rpartition("/")[2]


def file_of(public: Public, directory: Path) -> Path:
    """Write the config as a file, with an existing directory for its NVMe, and return the file."""
    text = json.dumps(public.values).replace(NVME, str(directory / "swap"))
    return written(json.loads(text), directory, "config.yaml" if public.source.endswith(".yaml") else "ds_config.json")


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_each_key_of_a_public_config_has_one_fate_and_what_is_lost_is_exactly_this(
    public: Public, tmp_path: Path
) -> None:
    conversion = convert(read(file_of(public, tmp_path)))
    assert sorted(finding.shown for finding in conversion.findings) == sorted(leaves(public.values, conversion))
    assert tuple(finding.shown for finding in conversion.of(*LOST)) == public.lost
    assert tuple(finding.shown for finding in conversion.of(KeyTreatment.UNKNOWN)) == public.unknown
    lines = {line.key: line.value for line in conversion.lines}
    paths = {"nvme.paths": [str(tmp_path / "swap")]} if "nvme" in (public.weights, public.optimizer) else {}
    assert lines == {"weights": public.weights, "optimizer": public.optimizer} | paths | dict(public.also)


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_a_public_config_trains_two_steps_as_plain_torch_does(public: Public, tmp_path: Path) -> None:
    source = read(file_of(public, tmp_path))
    swap = tmp_path / "swap.yaml"
    swap.write_text(swap_text(convert(source), source) + f"memory: {json.dumps(MEMORY)}\n")
    torch.manual_seed(0)
    plain, batch = llama(layers=2)
    torch.manual_seed(0)
    ours, _ = llama(layers=2)
    model = infinity.offload(ours, swap)
    tiers = infinity.statistics(model).plan.placement
    for told, got in ((public.weights, tiers.weights.tier), (public.optimizer, tiers.optimizer.tier)):
        assert got == told or told == "auto"
    losses = []
    for trained, optim in (
        (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)),
        (model, infinity.AdamW(model.parameters(), lr=1e-2)),
    ):
        for _ in range(2):
            loss = trained(**batch).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        losses.append(trained(**batch).loss.item())
    infinity.close(model, discard=True)
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-4)
    assert losses[2] < losses[0]


# -- fates -------------------------------------------------------------------------------------------------------------


def test_findings_come_in_the_order_of_their_importance(tmp_path: Path) -> None:
    values = {
        "bf16": {"enabled": True},
        "flops_profiler": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "zero_quantized_weights": True, "zenflow": {"a": 1}},
        "nonsense": 1,
    }
    conversion = converted(values, tmp_path)
    assert [finding.shown for finding in conversion.findings] == [
        "zero_optimization.zenflow",
        "zero_optimization.zero_quantized_weights",
        "flops_profiler",
        "nonsense",
        "bf16.enabled",
        "zero_optimization.overlap_comm",
        "zero_optimization.stage",
    ]
    assert [finding.fate for finding in conversion.of(*LOST)] == list(LOST)


@pytest.mark.parametrize(
    ("values", "key", "fate"),
    [
        ({"flops_profiler": {"enabled": False}}, "flops_profiler", KeyTreatment.NOT_NEEDED),
        ({"flops_profiler": {}}, "flops_profiler", KeyTreatment.NOT_NEEDED),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler", KeyTreatment.WATCHING),
        ({"data_efficiency": {"enabled": True, "seed": 1}}, "data_efficiency", KeyTreatment.TRAINING),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention", KeyTreatment.TRAINING),
        ({"tensorboard": {"enabled": True}}, "tensorboard", KeyTreatment.SCRIPT),
        ({"tensorboard": {"enabled": False}}, "tensorboard", KeyTreatment.NOT_NEEDED),
        ({"fp16": {"enabled": False, "loss_scale": 8}}, "fp16.loss_scale", KeyTreatment.NOT_NEEDED),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, "fp16.loss_scale", KeyTreatment.TRAINING),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads",
            KeyTreatment.COST,
        ),
        ({"gradient_clipping": 0}, "gradient_clipping", KeyTreatment.SCRIPT),
        ({"gradient_clipping": "auto"}, "gradient_clipping", KeyTreatment.SCRIPT),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", KeyTreatment.TRAINING),
        ({"optimizer": {"type": "Adam"}}, "optimizer.type", KeyTreatment.SCRIPT),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": 1}}}, "optimizer.params.muon_lr", KeyTreatment.UNKNOWN),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type", KeyTreatment.TRAINING),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}},
            "scheduler.params.warmup_min_lr",
            KeyTreatment.TRAINING,
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0}}},
            "scheduler.params.warmup_min_lr",
            KeyTreatment.NOT_NEEDED,
        ),
        ({"zero_optimization": {"mics_shard_size": -1}}, "zero_optimization.mics_shard_size", KeyTreatment.NOT_NEEDED),
        ({"zero_optimization": {"mics_shard_size": 4}}, "zero_optimization.mics_shard_size", KeyTreatment.COST),
        ({"zero_optimization": {}}, "zero_optimization", KeyTreatment.NOT_NEEDED),
        ({"zero_optimization": None}, "zero_optimization", KeyTreatment.NOT_NEEDED),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", KeyTreatment.MAPPED),
        ({"zero_optimization": True}, "zero_optimization", KeyTreatment.MAPPED),
        ({"zero_optimization": {"offload_param": None}}, "zero_optimization.offload_param", KeyTreatment.NOT_NEEDED),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown", KeyTreatment.SCRIPT),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal", KeyTreatment.TRAINING),
        ({"steps_per_print": 1, "_note": "mine"}, "_note", KeyTreatment.NOT_NEEDED),
    ],
)
def test_a_key_that_is_off_is_not_lost(values: Any, key: str, fate: KeyTreatment, tmp_path: Path) -> None:
    assert fates(converted(values, tmp_path))[key] is fate


def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    values = {
        "zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1},
        "gradient_cliping": 1,
        "zzz": 1,
    }
    said = {finding.shown: finding.says for finding in converted(values, tmp_path).of(KeyTreatment.UNKNOWN)}
    assert said == {
        "zero_optimization.stage3_param_persitance_threshold": (
            "did you mean zero_optimization.stage3_param_persistence_threshold?"
        ),
        "gradient_cliping": "did you mean gradient_clipping?",
        "zzz": "infinity does not know this key of DeepSpeed or FSDP",
    }


@pytest.mark.parametrize(
    ("values", "key", "near"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"offload_params": {"device": "cpu"}}},
            "zero_optimization.offload_params",
            "zero_optimization.offload_param",
        ),
        (
            {"zero_optimization": {"offload_optimiser": {"device": "cpu"}}},
            "zero_optimization.offload_optimiser",
            "zero_optimization.offload_optimizer",
        ),
        ({"optimiser": {"type": "Adam"}}, "optimiser", "optimizer"),
        (
            {"zero_optimization": {"cpu_offload_parms": True}},
            "zero_optimization.cpu_offload_parms",
            "zero_optimization.cpu_offload_params",
        ),
    ],
)
def test_a_misspelled_section_is_named_with_the_section(values: Any, key: str, near: str, tmp_path: Path) -> None:
    (finding,) = converted({"steps_per_print": 1} | values, tmp_path).of(KeyTreatment.UNKNOWN)
    assert finding.shown == key
    assert finding.says == f"did you mean {near}?"


def test_a_file_with_nothing_but_a_misspelled_section_is_told_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Found: 'zero_optimisation' \(did you mean zero_optimization\?\)"):
        converted({"zero_optimisation": {"stage": 3}}, tmp_path)


def test_of_very_many_unknown_keys_only_the_first_have_a_hint(tmp_path: Path) -> None:
    values = {"steps_per_print": 1} | {f"train_batch_siz{number}": 1 for number in range(HINTS_MAX + 10)}
    unknown = converted(values, tmp_path).of(KeyTreatment.UNKNOWN)
    assert [bool(finding.says) for finding in unknown] == [True] * HINTS_MAX + [False] * 10


def test_the_swap_config_is_one_that_infinity_reads(tmp_path: Path) -> None:
    paths = ["/mnt/with space", "/mnt/010", "/mnt/é: #x", "/mnt/'q'", "~/swap", "1e9", "yes", "/mnt/\u2028x"]
    for path in paths:
        offload = {"device": "nvme", "nvme_path": path}
        file = written({"zero_optimization": {"stage": 3, "offload_param": offload}}, tmp_path)
        source = read(file)
        conversion = convert(source)
        swap = tmp_path / "swap.yaml"
        swap.write_text(swap_text(conversion, source))
        assert infinity.load_config(swap) == infinity.load_config(values_of(conversion.lines))
        assert list(map(str, infinity.load_config(swap).nvme.paths)) == [path]


# -- the swap config ---------------------------------------------------------------------------------------------------


def lines(values: Any, directory: Path) -> dict[str, object]:
    return {line.key: line.value for line in converted(values, directory).lines}


def why(values: Any, directory: Path) -> dict[str, str]:
    return {line.key: line.why for line in converted(values, directory).lines}


def zero(**values: object) -> dict[str, Any]:
    return {ZERO: values}


@pytest.mark.parametrize(
    ("values", "weights", "optimizer"),
    [
        ({"bf16": {"enabled": True}}, "auto", "auto"),
        (zero(stage=0), "auto", "auto"),
        (zero(stage=2), "auto", "auto"),
        (zero(stage=3), "auto", "auto"),
        (zero(stage="auto"), "auto", "auto"),
        (zero(stage=2, offload_optimizer={"device": "cpu"}), "auto", "host"),
        (zero(stage=3, offload_optimizer={"device": "cpu"}), "auto", "host"),
        (zero(stage=3, offload_param={"device": "cpu"}), "host", "auto"),
        (zero(stage=3, offload_param={"device": "none"}, offload_optimizer={"device": "auto"}), "auto", "auto"),
        (zero(stage=2, offload_param={"device": "cpu"}), "auto", "auto"),
        (zero(stage=2, cpu_offload=True), "auto", "host"),
        (zero(stage=3, cpu_offload=False, cpu_offload_params=True), "host", "auto"),
        (zero(stage="3", offload_param={"device": "cpu"}), "host", "auto"),
        (zero(stage=3.0, offload_param={"device": "cpu"}), "host", "auto"),
    ],
)
def test_what_is_offloaded_rests_there_and_the_rest_is_left_to_the_plan(
    values: Any, weights: str, optimizer: str, tmp_path: Path
) -> None:
    assert lines(values, tmp_path) == {"weights": weights, "optimizer": optimizer}


def test_of_two_names_of_one_setting_the_newer_one_is_taken(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    assert lines(zero(stage=2, cpu_offload=True, offload_optimizer=disk), tmp_path)["optimizer"] == "nvme"


def test_each_line_says_which_key_it_comes_from(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    values = zero(stage=3, offload_param=disk, offload_optimizer=disk) | {"aio": {"queue_depth": 16, "thread_count": 2}}
    assert why(values, tmp_path) == {
        "weights": "zero_optimization.offload_param.device: nvme",
        "optimizer": "zero_optimization.offload_optimizer.device: nvme",
        "nvme.paths": "zero_optimization.offload_param.nvme_path, zero_optimization.offload_optimizer.nvme_path",
        "nvme.queue_depth": "aio.queue_depth: 16 × aio.thread_count: 2",
    }


def test_states_on_the_gpus_are_a_remark_because_not_all_may_fit(tmp_path: Path) -> None:
    (remark,) = converted(zero(stage=2), tmp_path).remarks
    assert "the CPU updates the other units" in remark
    assert converted(zero(stage=2, offload_optimizer={"device": "cpu"}), tmp_path).remarks == []


# -- disks -------------------------------------------------------------------------------------------------------------


def test_two_disks_are_two_paths_and_one_disk_is_one(tmp_path: Path) -> None:
    one, two, link = tmp_path / "one", tmp_path / "two", tmp_path / "link"
    one.mkdir()
    link.symlink_to(one)

    def paths(first: Path, second: Path) -> object:
        devices = {
            "offload_param": {"device": "nvme", "nvme_path": str(first)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(second)},
        }
        return lines(zero(stage=3, **devices), tmp_path)["nvme.paths"]

    assert paths(one, two) == [str(one), str(two)]
    assert paths(one, one) == [str(one)]
    assert paths(one, link) == [str(one)]


def test_a_path_that_is_not_here_is_kept_and_said(tmp_path: Path) -> None:
    values = zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/nowhere/here"})
    assert lines(values, tmp_path)["nvme.paths"] == ["/nowhere/here"]
    assert any("/nowhere/here does not exist" in remark for remark in converted(values, tmp_path).remarks)


def test_a_path_that_nothing_is_offloaded_to_is_left_out(tmp_path: Path) -> None:
    values = zero(stage=3, offload_param={"device": "cpu", "nvme_path": "/local_nvme"}) | {"aio": {"block_size": 4096}}
    assert lines(values, tmp_path) == {"weights": "host", "optimizer": "auto"}
    found = fates(converted(values, tmp_path))
    assert found[f"{ZERO}.offload_param.nvme_path"] is KeyTreatment.NOT_NEEDED
    assert found["aio.block_size"] is KeyTreatment.NOT_NEEDED


@pytest.mark.parametrize(
    ("aio", "expected"),
    [
        ({}, {}),
        ({"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1}, {}),
        ({"block_size": 262144, "queue_depth": 32}, {"nvme.block": "256KiB", "nvme.queue_depth": 32}),
        ({"queue_depth": 8, "intra_op_parallelism": 4}, {"nvme.queue_depth": 32}),
        ({"intra_op_parallelism": 4}, {"nvme.queue_depth": 32}),
        ({"queue_depth": "auto", "thread_count": "4"}, {"nvme.queue_depth": 32}),
        ({"queue_depth": 4, "thread_count": 9, "intra_op_parallelism": 3}, {"nvme.queue_depth": 12}),
        ({"queue_depth": 1024, "intra_op_parallelism": 64}, {"nvme.queue_depth": 1024}),
        ({"block_size": 1000}, {}),
        ({"block_size": 1 << 40}, {}),
    ],
)
def test_of_the_disks_what_is_not_a_default_is_taken_over(aio: Any, expected: Any, tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    values = zero(stage=3, offload_param=disk) | {"aio": aio}
    got = lines(values, tmp_path)
    assert {key: value for key, value in got.items() if key in ("nvme.block", "nvme.queue_depth")} == expected
    inside = zero(stage=3, offload_param=disk, aio=aio)  # where several guides put it
    assert lines(inside, tmp_path) == got
    assert not converted(inside, tmp_path).of(KeyTreatment.UNKNOWN)


# -- ranks and forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (zero(zero_hpz_partition_size=8), ("ranks.gather", "node")),
        (zero(zero_quantized_nontrainable_weights=True), ("frozen", "int8")),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ("master", "none")),
        ({"bf16": {"enabled": "auto", "bf16_optimizer_states": True}}, ("moments", "bf16")),
        ({"activation_checkpointing": {"partition_activations": True}}, ("activations", "auto")),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, ("activations", "auto")),
        (
            {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
            ("activations", "host"),
        ),
    ],
)
def test_other_keys_become_a_line(values: Any, line: tuple[str, str], tmp_path: Path) -> None:
    assert lines(values, tmp_path) == {"weights": "auto", "optimizer": "auto", line[0]: line[1]}


@pytest.mark.parametrize(
    "values",
    [
        zero(zero_hpz_partition_size=1),
        zero(zero_quantized_nontrainable_weights=False),
        {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"activation_checkpointing": {"number_checkpoints": 0, "cpu_checkpointing": "auto"}},
    ],
)
def test_where_they_do_nothing_there_is_no_line(values: Any, tmp_path: Path) -> None:
    assert lines(values, tmp_path) == {"weights": "auto", "optimizer": "auto"}
    assert not converted(values, tmp_path).of(KeyTreatment.MAPPED)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (zero(stage=4), "zero_optimization.stage is 4; a whole number from 0 to 3"),
        (zero(stage="three"), "zero_optimization.stage is 'three'"),
        (zero(stage=True), "zero_optimization.stage is True"),
        (zero(stage=[3]), r"zero_optimization.stage is \[3\]"),
        (zero(stage=3, offload_param={"device": "gpu"}), "is 'gpu', not one of cpu, nvme, none"),
        (zero(stage=3, offload_param={"device": ["cpu"]}), "not one of cpu, nvme, none"),
        (zero(stage=3, offload_param="cpu"), "zero_optimization.offload_param is 'cpu'; it must have keys and values"),
        (zero(stage=3, offload_param={"device": "nvme"}), "is nvme, but nvme_path is missing"),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": "auto"}), "nvme_path is missing"),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": 3}), "nvme_path is 3"),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": ""}), "nvme_path: ''"),
        (zero(cpu_offload="perhaps"), "cpu_offload is 'perhaps', not one of true, false"),
        (zero(zero_hpz_partition_size=-1), "zero_hpz_partition_size is -1"),
        (
            zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/x"}) | {"aio": {"queue_depth": 1.5}},
            "aio.queue_depth is 1.5",
        ),
    ],
)
def test_a_value_that_decides_and_is_none_is_an_error_that_names_it(values: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        converted(values, tmp_path)


def test_numbers_are_read_as_deepspeed_writes_them() -> None:
    assert [whole_number(value) for value in (3, 3.0, "3", 1e9, 10**400)] == [3, 3, 3, 10**9, 10**400]
    assert [whole_number(value) for value in (1.5, True, None, "x", "٣", "9" * 400, 1e400, -1e400, [1])] == [None] * 9


def test_values_are_said_as_json_has_them() -> None:
    assert [said(value) for value in (True, None, 1e9, 2.5, "cpu", "a b", 1e400, "x" * 100)] == [
        "true", "null", "1000000000", "2.5", "cpu", "'a b'", "inf", f"'{'x' * 80}'… (100 characters)",
    ]  # fmt: skip
