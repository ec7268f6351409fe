"""A script that asks for DeepSpeed under `infinity run` is told in one line what to take out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from transformers import HfArgumentParser, TrainingArguments

from infinity.cli.main import main
from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed_errors import refuse_argument
from tests.integrations.conftest import Launch
from tests.test_front_door import HEAVY

RUN = f"""
import json, sys
from infinity.cli.main import main
code = main(json.loads(sys.argv[1]))
print(code, *[name for name in {HEAVY} if name in sys.modules and name != "pydantic"])
"""


def test_a_script_with_deepspeed_on_its_command_line_is_refused_in_one_line_before_torch_is_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "swap.yaml").write_text("weights: host")
    (tmp_path / "train.py").write_text("raise AssertionError")
    script = ["--output_dir", "out", "--deepspeed", "ds config.json"]
    line = json.dumps(["run", str(tmp_path / "swap.yaml"), str(tmp_path / "train.py"), *script])
    ended = subprocess.run([sys.executable, "-c", RUN, line], capture_output=True, text=True)
    assert ended.stderr == (
        "error: --deepspeed 'ds config.json': under `infinity run` infinity offloads "
        "the model, without DeepSpeed. Remove --deepspeed; `infinity convert 'ds config.json' -o "
        "swap.yaml` converts a DeepSpeed config to a swap config.\n"
    )
    assert ended.stdout == "2\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--deepspeed=ds.json", "^--deepspeed ds.json: "),
        ("--deepspeed", "^--deepspeed: .*`infinity convert FILE"),
        ("--deepspeed --deepspeed_config ds.json", "^--deepspeed: .*`infinity convert FILE"),
        ("--deepspeed {}", "^--deepspeed: .*`infinity convert FILE"),
    ],
)
def test_each_form_of_the_argument_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_argument(["--lr", "1", *given.split()])


def test_arguments_that_leave_deepspeed_out_are_not_refused() -> None:
    refuse_argument(["--deepspeed=", "--deepspeed", "", "--deepspeed_port", "1", "deepspeed"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ds_config.json", "^deepspeed='ds_config.json' .*Remove deepspeed=; `infinity convert ds_config.json -o"),
        ({"zero_optimization": {"stage": 3}}, r"^deepspeed=\{...\} .*`infinity convert FILE -o swap.yaml`"),
        ('{"zero_optimization": {"stage": 3}}', r"^deepspeed=\{...\} .*`infinity convert FILE -o swap.yaml`"),
    ],
)
def test_arguments_with_deepspeed_are_refused_and_plain_ones_are_not(
    given: Any, said: str, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        assert TrainingArguments(str(tmp_path / "out")).deepspeed is None
        with pytest.raises(ConfigError, match=said):
            TrainingArguments(str(tmp_path / "out"), deepspeed=given)


def test_the_deepspeed_plugin_of_accelerate_is_refused(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    with launch():
        with pytest.raises(ConfigError, match="deepspeed_plugin= of the Accelerator.*`infinity convert ds.json -o"):
            DeepSpeedPlugin(hf_ds_config="ds.json")
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        with pytest.raises(ConfigError, match="Remove --use_deepspeed, or distributed_type: DEEPSPEED, of accelerate;"):
            HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([])


def test_fsdp_is_refused_and_its_config_is_one_that_can_be_converted(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text('{"cpu_offload": true}')
    with launch():
        with pytest.raises(
            ConfigError, match=rf"Remove --fsdp and --fsdp_config, .*`infinity convert {file} -o"
        ) as refused:
            TrainingArguments(str(tmp_path / "out"), fsdp="full_shard auto_wrap", fsdp_config=str(file))
        with pytest.raises(ConfigError, match=r"Remove --use_fsdp, .*`infinity convert FILE -o"):
            FullyShardedDataParallelPlugin()
        TrainingArguments(str(tmp_path / "out"))
    command = str(refused.value).partition("`infinity convert ")[2].partition("`")[0]
    assert main(["convert", *command.replace("swap.yaml", str(tmp_path / "swap.yaml")).split()]) == 0
    assert load_config(tmp_path / "swap.yaml").weights == "host"
