"""LoRA and its like on a base that is offloaded: the base is only read."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import infinity
from infinity.coordinator import registry
from tests.conftest import weights_of
from tests.integrations.conftest import Launch
from tests.models import llama, qwen3_moe

Rows = list[dict[str, torch.Tensor]]
LORA: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj"]},
    "DoRA": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "all linear and the embeddings": {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]},
}
IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
KINDS = ["LoRA", "DoRA", "IA3", "all linear and the embeddings"]


def adapted(model: Any, kind: str = "LoRA") -> Any:
    import peft

    made = peft.IA3Config(**IA3) if kind == "IA3" else peft.LoraConfig(r=4, **LORA[kind])
    made.task_type = "CAUSAL_LM"
    return peft.get_peft_model(model, made)


def trainer(model: Any, rows: Rows, output: Path, **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    return Trainer(model, args, train_dataset=rows)


def log_of(trainer: Trainer) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("kind", [pytest.param("LoRA", marks=pytest.mark.long), *KINDS[1:]])
def test_adapters_on_an_offloaded_base_train_as_on_a_plain_one(
    kind: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    from peft import PeftModel

    logs, logits = [], []
    for context in (nullcontext(), launch()):
        with context:
            torch.manual_seed(0)
            model = adapted(AutoModelForCausalLM.from_pretrained(checkpoint), kind)
            one = trainer(model, rows, tmp_path / "out")
            one.train()
            logs.append(log_of(one))
            model.save_pretrained(tmp_path / f"adapters{len(logs)}")
        plain = AutoModelForCausalLM.from_pretrained(checkpoint)
        reloaded = PeftModel.from_pretrained(plain, tmp_path / f"adapters{len(logs)}").eval()
        logits.append(reloaded(input_ids=rows[0]["input_ids"][None]).logits.detach())
    torch.testing.assert_close(logs[1], logs[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


def test_lora_reads_its_base_twice_a_step_and_writes_none_of_it(launch: Launch, tmp_path: Path) -> None:
    """4 bytes per parameter of a bf16 base: once for the forward, once for the backward that recomputes."""
    torch.manual_seed(0)
    llama(layers=12)[0].bfloat16().save_pretrained(tmp_path / "base")
    ids = torch.randint(0, 96, (1, 16), generator=torch.Generator().manual_seed(1))
    with launch(memory={"device": "360KiB", "host": "64MiB"}, commit_every=0, activations="recompute"):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = adapted(base)
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        coordinator, seen = registry.coordinator_of(model), []
        for _ in range(4):
            model(input_ids=ids, labels=ids).loss.backward()
            optim.step()
            optim.zero_grad()
            infinity.synchronize(model)
            found = infinity.statistics(model)
            seen.append((found.read_bytes, found.written_bytes))
        layout = coordinator.plan.layout
        frozen = layout.numel - layout.trainable_numel
        read, written = (after - before for before, after in zip(seen[-2], seen[-1], strict=True))
        print(f"{read / frozen:.2f} B read and {written / frozen:.2f} B written per parameter of the base")
        pages = 4096 * 4 * len(layout.units)  # each state of a unit's adapters takes whole pages
        assert read <= 4 * frozen + 2 * 4 * layout.trainable_numel + pages
        assert read >= 3 * frozen
        assert written <= 14 * layout.trainable_numel + pages
        groups = [group for unit in coordinator.units for group in unit.full.groups if not group.trainable]
        assert sum(group.numel for group in groups) >= frozen
        stored = [states for unit in coordinator.resources.units for states in unit.states.values()]
        assert len(stored) == 12  # the adapters of each layer have states, and nothing else has


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("recomputed", [False, True])
def test_adapters_of_experts_train_as_on_a_plain_base(recomputed: bool, tmp_path: Path) -> None:
    """PEFT registers a parametrization of the stack of experts in each forward, which sets the stack to itself."""
    import peft

    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "512KiB", "host": "64MiB"},
        "nvme": {"paths": [str(tmp_path / "swap")]},
    }
    losses, weights = list[list[float]](), list[dict[str, torch.Tensor]]()
    for kind in (torch.optim.AdamW, infinity.AdamW):
        torch.manual_seed(0)
        base, batch = qwen3_moe()
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS, init_lora_weights=False)
        model: Any = peft.get_peft_model(base, lora).train()
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if kind is infinity.AdamW:
            infinity.offload(model, config)
        optim = kind([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
        losses.append([])
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses[-1].append(loss.item())
        with torch.inference_mode():
            losses[-1].append(model(**batch).loss.item())
        weights.append(weights_of(model) if kind is infinity.AdamW else {**model.state_dict()})
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-6, atol=1e-6)
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items() if "lora_" not in name)
    stack = next(parameter for name, parameter in model.named_parameters() if name.endswith("gate_up_proj"))
    owner = next(module for module in model.modules() if module._parameters.get("gate_up_proj") is stack)

    def write(module: torch.nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            stack.add_(1.0)

    def train() -> None:
        model(**batch).loss.backward()
        optim.step()

    owner.register_forward_pre_hook(write)
    with pytest.raises(infinity.ModelError, match=r"gate_up_proj' of unit .* was changed outside infinity"):
        train()
    infinity.close(model)


def test_adapters_are_attached_between_load_pretrained_and_offload(
    checkpoint: Path, rows: Rows, tmp_path: Path
) -> None:
    config = {"weights": "nvme", "optimizer": "nvme", "nvme": {"paths": [str(tmp_path / "swap")]}, "commit_every": 0}
    losses = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        if offloaded:
            base = infinity.load_pretrained(checkpoint, config, dtype=torch.float32, defer=True)
        else:
            base = AutoModelForCausalLM.from_pretrained(checkpoint).train()
        model = adapted(base)
        if offloaded:
            infinity.offload(model, config)
        kind = infinity.AdamW if offloaded else torch.optim.AdamW
        optim = kind([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
        for row in rows[:3]:
            loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
    infinity.close(model)
    torch.testing.assert_close(losses[3:], losses[:3], rtol=2e-6, atol=1e-6)


def test_weights_that_were_frozen_before_offload_have_no_states(checkpoint: Path) -> None:
    model = infinity.load_pretrained(checkpoint, {"weights": "host", "optimizer": "host"}, defer=True)
    model.model.layers.requires_grad_(False)
    infinity.offload(model, {"weights": "host", "optimizer": "host"})
    layout = registry.coordinator_of(model).plan.layout
    assert layout.trainable_numel == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert layout.trainable_numel < layout.numel / 2
    infinity.close(model)


def test_a_deferred_model_resumes(checkpoint: Path, rows: Rows, tmp_path: Path) -> None:
    config = {"weights": "nvme", "optimizer": "nvme", "nvme": {"paths": [str(tmp_path / "swap")]}, "commit_every": 1}
    model = infinity.load_pretrained(checkpoint, config, defer=True)
    infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss.backward()
    optim.step()
    expected = weights_of(model)
    infinity.close(model)
    again = infinity.resume(infinity.load_pretrained(checkpoint, config, defer=True), config)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(again).items())
    infinity.close(again)


def test_the_line_of_a_model_says_how_much_of_it_is_trained_and_where_it_rests(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launch():
        model = adapted(AutoModelForCausalLM.from_pretrained(checkpoint))
        every = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        trainer(model, rows, tmp_path / "out").train()
        in_place = registry.coordinator_of(model).plan.budgets.limits.in_place
    trained, numel = sum(size for size, grad in every if grad), sum(size for size, _ in every)
    assert trained < numel
    assert (
        f"infinity: PeftModelForCausalLM, trained: {trained:,} of {numel:,} parameters: weights on nvme, "
        "optimizer states on nvme; it takes "
    ) in caplog.text
    assert ("of device memory" in caplog.text) is not in_place
