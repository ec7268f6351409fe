"""The adapters of a PEFT model are saved as PEFT saves them: its own loaders give the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import infinity
from infinity.errors import InfinityError, ModelError, ReleasedParameterError
from tests.models import Batch, llama

if TYPE_CHECKING:
    from peft import LoraConfig

Offload = Callable[..., Any]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint to put adapters on."""
    llama()[0].save_pretrained(tmp_path / "base")
    return tmp_path / "base"


BATCH: Batch = llama()[1]


def lora(**options: Any) -> LoraConfig:
    """Adapters that change the logits from the beginning."""
    from peft import LoraConfig

    return LoraConfig(
        **{"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    )


def prompt_tuning() -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")


def loaded(adapters: Path) -> Any:
    """By peft alone, with the base that they name."""
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(adapters)


def on(base: Path, config: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=BATCH["input_ids"]).logits


def step(model: Any) -> None:
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    model.train()(**BATCH).loss.backward()
    optimizer.step()


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": partial(lora, use_dora=True),
    "with a head": partial(lora, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]),
    "on the embeddings": partial(lora, target_modules=["embed_tokens", "q_proj"]),
    "prompt tuning": prompt_tuning,
}


@pytest.mark.covering(most=3)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_peft_loads_trained_adapters_to_the_same_logits(
    config: Callable[[], Any], base: Path, offload: Offload, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = offload(on(base, config()))
    step(model)
    infinity.save_pretrained(model, tmp_path / "adapters")
    expected = logits(model)
    assert torch.equal(logits(loaded(tmp_path / "adapters")), expected)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(PeftModel.from_pretrained(plain, tmp_path / "adapters")), expected)


def test_the_files_are_those_that_peft_writes(base: Path, offload: Offload, tmp_path: Path) -> None:
    model = on(base, lora())
    model.save_pretrained(tmp_path / "plain")
    infinity.save_pretrained(offload(model), tmp_path / "offloaded")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "offloaded").iterdir())
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "offloaded" / name).read_bytes(), name


def test_adapters_in_a_model_that_alone_is_offloaded_are_saved(base: Path, offload: Offload, tmp_path: Path) -> None:
    model = on(base, lora())
    offload(model.base_model.model)
    infinity.save_pretrained(model, tmp_path / "adapters")
    assert torch.equal(logits(loaded(tmp_path / "adapters")), logits(model))


def test_weights_of_the_base_stay_in_the_store(base: Path, offload: Offload, tmp_path: Path) -> None:
    model = offload(on(base, lora(target_modules=["layers.0.self_attn.q_proj"])), memory={"device": "1MiB"})
    before = infinity.statistics(model).weight_bytes_read
    infinity.save_pretrained(model, tmp_path / "adapters")
    statistics = infinity.statistics(model)
    assert statistics.weight_bytes_read - before < 4 * statistics.numel


def test_what_peft_computes_of_weights_is_not_written_as_a_placeholder(
    base: Path, offload: Offload, tmp_path: Path
) -> None:
    from peft import VBLoRAConfig

    computed = VBLoRAConfig(
        target_modules=["q_proj"], num_vectors=8, vector_length=16, save_only_topk_weights=True, task_type="CAUSAL_LM"
    )
    model = offload(on(base, computed))
    with pytest.raises(ModelError, match=r"Call model\.save_pretrained\(directory\) in `with infinity\.gathered"):
        infinity.save_pretrained(model, tmp_path / "adapters")
    with infinity.gathered(model):
        model.save_pretrained(tmp_path / "adapters")
    torch.testing.assert_close(logits(loaded(tmp_path / "adapters")), logits(model))  # it stores logarithms


def test_every_adapter_is_saved_and_a_later_save_replaces_it(base: Path, offload: Offload, tmp_path: Path) -> None:
    model = on(base, lora())
    model.add_adapter("other", lora(r=4))
    offload(model)
    infinity.save_pretrained(model, tmp_path / "adapters")
    step(model)
    (tmp_path / "adapters" / "notes").write_text("of the user")
    infinity.save_pretrained(model, tmp_path / "adapters")
    assert (tmp_path / "adapters" / "notes").read_text() == "of the user"
    for directory, name in ((tmp_path / "adapters", "default"), (tmp_path / "adapters" / "other", "other")):
        model.set_adapter(name)
        assert torch.equal(logits(loaded(directory)), logits(model)), name


def test_a_failing_save_leaves_the_earlier_one(
    base: Path, offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig

    model = offload(on(base, lora()))
    infinity.save_pretrained(model, tmp_path / "adapters")
    before = {path: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    step(model)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LoraConfig, "save_pretrained", full)
    with pytest.raises(InfinityError, match="No space left on device"):
        infinity.save_pretrained(model, tmp_path / "adapters")
    assert {path: path.read_bytes() for path in (tmp_path / "adapters").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "base", "swap"]


def test_a_peft_model_that_is_not_offloaded_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"PeftModelForCausalLM is not offloaded: call infinity\.offload"):
        infinity.save_pretrained(on(base, lora()), tmp_path / "adapters")


def test_pefts_own_save_writes_the_same_tensors(base: Path, offload: Offload, tmp_path: Path) -> None:
    model = offload(on(base, lora()))
    model.save_pretrained(tmp_path / "theirs")
    infinity.save_pretrained(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def test_a_model_that_is_merged_outside_of_gathered_names_gathered(base: Path, offload: Offload) -> None:
    with pytest.raises(ReleasedParameterError, match=r"with infinity\.gathered\(model, module\)"):
        offload(on(base, lora())).merge_and_unload()


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_merged_and_saved_in_gathered_has_the_logits_of_the_adapters(
    write: bool, base: Path, offload: Offload, tmp_path: Path
) -> None:
    model = offload(on(base, lora()))
    step(model)
    expected = logits(model)
    with infinity.gathered(model, write=write):
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected)
    with pytest.raises(
        ModelError, match=r"call merged\.save_pretrained\(directory\) in the same `with infinity\.gathered"
    ):
        logits(merged)


def test_the_config_names_the_base(base: Path, offload: Offload, tmp_path: Path) -> None:
    infinity.save_pretrained(offload(on(base, lora())), tmp_path / "adapters")
    assert json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )
