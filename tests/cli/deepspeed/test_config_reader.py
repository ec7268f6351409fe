"""Files that are read: JSON, Accelerate's YAML and what it names; and files that are something else."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import infinity
from infinity.cli.deepspeed.config_reader import FILE_BYTES_MAX, read
from infinity.cli.deepspeed.conversion import convert
from infinity.cli.deepspeed.conversion_report import report, swap_text
from infinity.cli.deepspeed.keys import LOST, KeyTreatment
from infinity.cli.finetune_options import build_finetune_parser
from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.strict_parsers import parse_yaml
from tests.cli.deepspeed.test_conversion import converted, fates, written
from tests.models import llama

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
    assert found["deepspeed_config.offload_param_device"] is KeyTreatment.MAPPED
    assert found["deepspeed_config.zero_stage"] is KeyTreatment.NOT_NEEDED
    assert found["deepspeed_config.offload_param_nvme_path"] is KeyTreatment.NOT_NEEDED
    assert found["mixed_precision"] is KeyTreatment.SCRIPT


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
    assert found["deepspeed_config.zero_stage"].fate is KeyTreatment.NOT_NEEDED
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
        assert fates(conversion)["zero_optimization.aio.queue_depth"] is KeyTreatment.NOT_NEEDED


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "found list"),
        ("3", "found int"),
        ("null", "found NoneType"),
        ("{}", "none of DeepSpeed's keys"),
        ('{"weights": "nvme"}', "looks like a swap config"),
        (
            '{"model_type": "llama", "hidden_size": 8}',
            "none of DeepSpeed's keys, such as zero_optimization. Found: 'model_type'",
        ),
        ('{"bf16": {}, "bf16": {}}', "'bf16' is given twice"),
        ('{"gradient_clipping": NaN}', "NaN is not a JSON number"),
        ('{"fp16": true}', "fp16 is True; it must have keys and values"),
        ('{"deepspeed": "ds.json", "output_dir": "x"}', "it names one: infinity convert ds.json"),
        ('{"distributed_type": "MULTI_GPU"}', "has no deepspeed_config; its distributed_type is 'MULTI_GPU'"),
        ('{"distributed_type": "FSDP", "fsdp_config": 3}', "fsdp_config is 3; it must have keys and values"),
        ('{"deepspeed_config": []}', r"deepspeed_config is \[\]; it must have keys and values"),
        ('{"deepspeed_config": {"deepspeed_config_file": 3}}', "deepspeed_config_file is 3"),
        (
            '{"deepspeed_config": {"deepspeed_config_file": "missing.json"}}',
            "cannot read the DeepSpeed config missing.json",
        ),
        ('{\n  // ZeRO\n  "bf16": {}}', "has comments, as in line 2.*hjson -j"),
        ('{"bf16": {}, # mine\n "fp16": {}}', "has comments, as in line 1, which JSON does not have"),
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


def test_where_nothing_says_where_states_rest_the_swap_configs_that_are_named_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(written({"distributed_type": "MULTI_GPU"}, tmp_path, "accelerate.yaml"))
    named = re.findall(r"`({.*?})`", str(error.value))
    assert len(named) == 2
    for text in named:
        load_config(parse_yaml(text.replace("DIRECTORY", str(tmp_path))))


FSDP = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "backward_prefetch": "BACKWARD_PRE",
    "cpu_ram_efficient_loading": True,
    "forward_prefetch": False,
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "SHARDED_STATE_DICT",
    "sync_module_states": True,
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "use_orig_params": True,
}
PREFIXED = {f"fsdp_{key}": value for key, value in FSDP.items()}


@pytest.mark.parametrize(
    ("values", "tier"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": PREFIXED | {"fsdp_offload_params": True}}, "host"),
        ({"distributed_type": "FSDP", "fsdp_config": PREFIXED | {"fsdp_offload_params": "false"}}, "auto"),
        ({"distributed_type": "FSDP", "deepspeed_config": {}, "fsdp_config": {"fsdp_version": 2}}, "auto"),
        ({"distributed_type": "FSDP"}, "auto"),
        (FSDP | {"cpu_offload": True, "activation_checkpointing": True}, "host"),
        (PREFIXED, "auto"),
    ],
    ids=str,
)
def test_a_config_of_fsdp_becomes_a_swap_config_and_all_of_its_keys_are_known(
    values: dict[str, Any], tier: str, tmp_path: Path
) -> None:
    path = written(values, tmp_path, "fsdp.json")
    conversion = convert(read(path))
    found = {line.key: line.value for line in conversion.lines}
    assert (found.pop("weights"), found.pop("optimizer")) == (tier, tier)
    assert found == ({"activations": "auto"} if values.get("activation_checkpointing") else {})
    assert not conversion.of(KeyTreatment.UNKNOWN, *LOST)
    load_config(parse_yaml(swap_text(conversion, read(path))))


def test_what_the_report_says_of_fsdp_can_be_done(tmp_path: Path) -> None:
    path = written(FSDP | {"cpu_offload": True, "offload_parms": True}, tmp_path, "fsdp.json")
    source = read(path)
    conversion = convert(source)
    said = report(conversion, source, None)
    assert "offload_parms: true - did you mean fsdp.offload_params?" in said
    assert "in place of `torchrun train.py ITS ARGUMENTS`" in said
    assert f"Remove `--fsdp_config {path}` and `--fsdp` from ITS ARGUMENTS" in said
    assert "deepspeed" not in said.replace("infinity's page on DeepSpeed", "").lower()
    keys = dict(re.findall(r"`(weights|optimizer): (nvme)`", said))
    place = re.findall(r"`nvme: ({.*?})`", said)[0].replace("DIRECTORY", str(tmp_path))
    load_config(keys | {"nvme": parse_yaml(place)})


def test_optimizers_that_compress_gradients_are_named_with_what_to_take(tmp_path: Path) -> None:
    params = {"lr": 1e-3, "var_freeze_step": 1000, "var_update_scaler": 16, "local_step_scaler": 1000}
    params |= {"local_step_clipper": 16, "cuda_aware": False, "comm_backend_name": "nccl", "freeze_step": 100}
    for kind in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb"):
        conversion = converted({"optimizer": {"type": kind, "params": params | {"max_coeff": 10.0}}}, tmp_path)
        assert not conversion.of(KeyTreatment.UNKNOWN)
        (says,) = (each.says for each in conversion.findings if each.shown == "optimizer.type")
        ours, theirs = says.partition("--optimizer ")[2].split(")")[0], says.partition("optim ")[2].split(" ")[0]
        assert build_finetune_parser().parse_args(["--optimizer", ours]).optimizer == "adamw"
        assert TrainingArguments(output_dir=str(tmp_path), optim=theirs, use_cpu=True).optim == "adamw_torch"


def test_a_schedule_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    (found,) = converted({"scheduler": {"type": "OneCycle"}}, tmp_path).of(*LOST)
    assert found.says == "infinity finetune has constant, linear and cosine; a script has torch's own"
    for name in "constant", "linear", "cosine":
        assert build_finetune_parser().parse_args(["--schedule", name]).schedule == name
    model = infinity.offload(llama(layers=1)[0], {"weights": "host", "optimizer": "host"})
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=1e-2, total_steps=4)
    assert schedule.get_last_lr()[0] < 1e-3
    infinity.close(model, discard=True)


def test_a_config_of_accelerate_does_not_name_another_one(tmp_path: Path) -> None:
    written({"deepspeed_config": {}}, tmp_path)
    with pytest.raises(ConfigError, match="another config file of Accelerate"):
        read(accelerate(tmp_path, deepspeed_config_file="ds_config.json"))


@pytest.mark.parametrize("given", ["checkpoint-5", "checkpoint-5/global_step5"])
def test_a_checkpoint_of_deepspeed_is_named_with_a_command_that_finds_its_script(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "checkpoint-5" / "global_step5"
    step.mkdir(parents=True)
    (step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (step.parent / "zero_to_fp32.py").write_text("import os, sys\nprint(os.listdir(sys.argv[1]), *sys.argv[2:])")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a checkpoint of DeepSpeed, not a config") as refused:
        read(Path(given))
    command = shlex.split(str(refused.value).split("`")[1])
    assert command[0] == "python"
    said = subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True, text=True).stdout
    assert "global_step5" in said
    assert said.endswith("OUT --safe_serialization\n")


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
