"""Where weights and states go, and the keys of the disks: each value of DeepSpeed's with the line that it becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.cli.deepspeed.keys import Fate
from infinity.cli.deepspeed.placement import said, whole_number
from infinity.errors import ConfigError
from tests.cli.deepspeed.test_conversion import converted, fates

ZERO = "zero_optimization"


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


def test_each_line_says_which_key_it_comes_from(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    values = zero(stage=3, offload_param=disk, offload_optimizer=disk) | {"aio": {"queue_depth": 16, "thread_count": 2}}
    assert why(values, tmp_path) == {
        "weights": "zero_optimization.offload_param.device: nvme",
        "optimizer": "zero_optimization.offload_optimizer.device: nvme",
        "nvme.paths": "zero_optimization.offload_param.nvme_path, zero_optimization.offload_optimizer.nvme_path",
        "nvme.queue_depth": "aio.queue_depth: 16 × aio.thread_count: 2",
    }


def test_states_on_the_gpus_are_a_remark_because_the_cpu_updates_them(tmp_path: Path) -> None:
    (remark,) = converted(zero(stage=2), tmp_path).remarks
    assert "the CPU updates them" in remark
    assert converted(zero(stage=2, offload_optimizer={"device": "cpu"}), tmp_path).remarks == ()


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
    assert any("/nowhere/here is not there" in remark for remark in converted(values, tmp_path).remarks)


def test_a_path_that_nothing_is_offloaded_to_is_left_out(tmp_path: Path) -> None:
    values = zero(stage=3, offload_param={"device": "cpu", "nvme_path": "/local_nvme"}) | {"aio": {"block_size": 4096}}
    assert lines(values, tmp_path) == {"weights": "host", "optimizer": "auto"}
    found = fates(converted(values, tmp_path))
    assert found[f"{ZERO}.offload_param.nvme_path"] is Fate.NOT_NEEDED
    assert found["aio.block_size"] is Fate.NOT_NEEDED


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
    assert not converted(inside, tmp_path).of(Fate.UNKNOWN)


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
    assert not converted(values, tmp_path).of(Fate.MAPPED)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (zero(stage=4), "zero_optimization.stage is 4; a whole number from 0 to 3"),
        (zero(stage="three"), "zero_optimization.stage is 'three'"),
        (zero(stage=True), "zero_optimization.stage is True"),
        (zero(stage=[3]), r"zero_optimization.stage is \[3\]"),
        (zero(stage=3, offload_param={"device": "gpu"}), "is 'gpu', and none of cpu, nvme, none"),
        (zero(stage=3, offload_param={"device": ["cpu"]}), "none of cpu, nvme, none"),
        (zero(stage=3, offload_param="cpu"), "zero_optimization.offload_param is 'cpu'; keys and values"),
        (zero(stage=3, offload_param={"device": "nvme"}), "is nvme, and no nvme_path"),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": "auto"}), "no nvme_path"),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": 3}), "nvme_path is 3"),
        (zero(stage=3, offload_param={"device": "nvme", "nvme_path": ""}), "nvme_path: ''"),
        (zero(cpu_offload="perhaps"), "cpu_offload is 'perhaps'; true or false"),
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
