"""Files that are read: JSON, Accelerate's YAML and what it names; and files that are something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.deepspeed.conversion import convert
from infinity.cli.deepspeed.keys import Fate
from infinity.cli.deepspeed.reading import FILE_BYTES_MAX, read
from infinity.errors import ConfigError
from tests.cli.deepspeed.test_conversion import converted, fates, written

OFFLOADING = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": "auto"}


def accelerate(directory: Path, **inner: Any) -> Path:
    values = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": inner}
    return written(values, directory, "accelerate.yaml")


def lines(path: Path) -> dict[str, object]:
    return {line.key: line.value for line in convert(read(path)).lines}


def test_accelerates_names_are_deepspeeds(tmp_path: Path) -> None:
    path = accelerate(
        tmp_path,
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path=str(tmp_path),
        offload_param_device="cpu",
        offload_param_nvme_path="none",
    )
    assert lines(path) == {"weights": "host", "optimizer": "nvme", "nvme.paths": [str(tmp_path)]}
    found = fates(convert(read(path)))
    assert found["deepspeed_config.offload_param_device"] is Fate.MAPPED
    assert found["deepspeed_config.zero_stage"] is Fate.NOT_NEEDED
    assert found["deepspeed_config.offload_param_nvme_path"] is Fate.NOT_NEEDED
    assert found["mixed_precision"] is Fate.SCRIPT


def test_without_a_stage_accelerate_means_2_and_deepspeed_0(tmp_path: Path) -> None:
    path = accelerate(tmp_path, offload_optimizer_device="cpu")
    assert "stage 2" in {line.key: line.why for line in convert(read(path)).lines}["weights"]
    whys = {line.key: line.why for line in converted({"gradient_clipping": 1}, tmp_path).lines}
    assert "stage 0" in whys["weights"]


@pytest.mark.parametrize("link", ["ds_config.json", "{}/ds_config.json"])
def test_accelerate_names_a_deepspeed_config_beside_it_or_anywhere(link: str, tmp_path: Path) -> None:
    written(OFFLOADING, tmp_path)
    path = accelerate(tmp_path, deepspeed_config_file=link.format(tmp_path), zero3_init_flag=True)
    assert lines(path) == {"weights": "host", "optimizer": "auto"}
    source = read(path)
    assert (source.file, source.accelerate) == (str(tmp_path / "ds_config.json"), str(path))


def test_accelerate_fills_in_only_what_the_deepspeed_config_leaves_open(tmp_path: Path) -> None:
    written(OFFLOADING | {"train_batch_size": "auto"}, tmp_path)
    path = accelerate(tmp_path, deepspeed_config_file="ds_config.json", gradient_clipping=0.5, zero_stage=2)
    found = {finding.shown: finding for finding in convert(read(path)).findings}
    assert found["deepspeed_config.gradient_clipping"].value == "0.5"
    assert "gradient_clipping" not in found
    assert found["deepspeed_config.zero_stage"].fate is Fate.NOT_NEEDED
    assert found["zero_optimization.stage"].value == "3"
    assert lines(path)["weights"] == "host"


def test_a_key_in_two_places_is_read_where_deepspeed_looks(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": disk, "aio": {"queue_depth": 64}}
    for values in (
        {"zero_optimization": zero, "aio": {"queue_depth": 16}},
        {"aio": {"queue_depth": 16}, "zero_optimization": zero},
    ):
        conversion = converted(values, tmp_path)
        assert {line.key: line.value for line in conversion.lines}["nvme.queue_depth"] == 16
        assert fates(conversion)["zero_optimization.aio.queue_depth"] is Fate.NOT_NEEDED


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "found list"),
        ("3", "found int"),
        ("null", "found NoneType"),
        ("{}", "no key of one"),
        ('{"weights": "nvme"}', "looks like a swap config"),
        ('{"model_type": "llama", "hidden_size": 8}', "no key of one, such as zero_optimization. Found: 'model_type'"),
        ('{"bf16": {}, "bf16": {}}', "'bf16' is given twice"),
        ('{"gradient_clipping": NaN}', "NaN is no number of JSON"),
        ('{"fp16": true}', "fp16 is True; keys and values"),
        ('{"deepspeed": "ds.json", "output_dir": "x"}', "it names one: infinity convert 'ds.json'"),
        ('{"distributed_type": "FSDP"}', "has no deepspeed_config; its distributed_type is 'FSDP'"),
        ('{"deepspeed_config": []}', r"deepspeed_config is \[\]; keys and values"),
        ('{"deepspeed_config": {"deepspeed_config_file": 3}}', "deepspeed_config_file is 3"),
        (
            '{"deepspeed_config": {"deepspeed_config_file": "missing.json"}}',
            "cannot read the DeepSpeed config missing.json",
        ),
        ('{\n  // ZeRO\n  "bf16": {}}', "has comments, as in line 2.*hjson -j"),
        ('{"bf16": {}, # mine\n "fp16": {}}', "has comments, which JSON has not"),
        ('{"bf16": {},}', "not valid JSON"),
        ("{" * 100_000, "not valid JSON"),
    ],
)
def test_what_is_no_deepspeed_config_is_said_to_be_none(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        read(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_config_of_accelerate_does_not_name_another_one(tmp_path: Path) -> None:
    written({"deepspeed_config": {}}, tmp_path)
    with pytest.raises(ConfigError, match="config file of Accelerate again"):
        read(accelerate(tmp_path, deepspeed_config_file="ds_config.json"))


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "large", "latin"])
def test_a_file_that_cannot_be_read_is_an_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b" " * (FILE_BYTES_MAX + 1))
    elif kind == "latin":
        path.write_bytes(b'{"\xe9": 1}')
    with pytest.raises(ConfigError):
        read(path)
