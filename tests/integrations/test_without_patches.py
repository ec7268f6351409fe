"""Ten architectures are loaded with an InfinityConfig, trained by a Trainer, saved, and read by plain transformers.
Nothing of a library is replaced meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import infinity
from infinity.coordinator import registry
from infinity.integrations.patches import active
from tests.integrations.test_architectures import OneBatch, language
from tests.integrations.test_plug_points import end
from tests.runtime.alike import tight

FEW = ("Qwen3", "GptOss")
"""A dense model, and one of which transformers converts the experts."""
NAMES = (*FEW, "Qwen3Moe", "Mistral", "Gemma3Text", "Phi3", "OPT", "GPTNeoX", "Olmo2", "DeepseekV3")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    end()


class NothingIsReplaced(TrainerCallback):
    """Looks at every event of a Trainer."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            assert active() == []
        return super().__getattribute__(name)


def trained(model: Any, batch: Any, output: Path, **ours: Any) -> list[float]:
    torch.manual_seed(1)
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=2,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        adam_epsilon=1e-3,  # gradients that are zero but for rounding move nothing
        logging_steps=1,
        save_steps=1,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    rows = [{"index": index} for index in range(4)]
    trainer = OneBatch(model, args, train_dataset=rows, data_collator=lambda _: batch, **ours)
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in NAMES])
def test_an_architecture_is_loaded_trained_saved_and_read_without_a_patch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, batch = language(name)()
    made.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    swap = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": tight(made),
        "nvme": {"paths": [str(tmp_path / "swap")]},
        "commit_every": 1,
    }
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = trained(theirs, batch, tmp_path / "theirs")
    assert active() == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=infinity.InfinityConfig(swap))
    options = {"lr": 1e-3, "eps": 1e-3}
    losses = trained(
        model,
        batch,
        tmp_path / "ours",
        optimizer_cls_and_kwargs=(infinity.hf.optimizer_factory, options),
        callbacks=[infinity.hf.Checkpoints(), NothingIsReplaced()],
    )
    assert registry.is_offloaded(model)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for folder in (tmp_path / "ours", tmp_path / "ours" / "checkpoint-2"):
        read, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(read.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert active() == []


MEASURE = """
import re, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
import infinity

def memory(kind):
    return int(re.search(rf"{kind}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def offloaded(path, swap):
    memory = {"device": "20MiB", "host": "48MiB"}
    config = infinity.InfinityConfig({"memory": memory, "nvme": {"paths": [swap]}, "commit_every": 0})
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    infinity.hf.optimizer_factory(model, lr=1e-5)
    return config

small, large, swap = sys.argv[1:]
offloaded(small, swap + "-small").close()  # what is imported is not counted
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
config = offloaded(large, swap + "-large")
print(memory("VmHWM") - before)
config.close()
"""


@pytest.mark.long
def test_loading_takes_two_units_more_than_the_budgets(tmp_path: Path) -> None:
    """All weights take 130 MiB, and a unit 8 MiB."""
    for name, layers in (("small", 1), ("large", 16)):
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=8,
            dtype=torch.bfloat16,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
    unit = sum(parameter.numel() for parameter in LlamaForCausalLM(config).model.layers[0].parameters()) * 2
    arguments = [str(tmp_path / name) for name in ("small", "large", "swap")]
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    grown = int(done.stdout.split()[-1])
    assert grown < (20 << 20) + (48 << 20) + 2 * unit
