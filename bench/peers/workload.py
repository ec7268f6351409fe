"""The training that all contenders do: the model, the batch and the optimizer's settings.

The driver and every worker import this module.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Workload:
    """One training step, the same for every contender.

    Attributes:
        layers, hidden, intermediate, heads, vocabulary: the Llama model's shape.
        kv_heads: 0: as many as heads.
        tied: the embedding and the head share one weight.
        experts: number of experts of a layer, each of which has the width `intermediate`; 0: a Llama, without experts.
        chosen: number of experts that compute a token.
        batch, tokens: the shape of a synthetic batch; every step uses the same values.
        micro_batches: batches of a step, whose gradients are summed.
        dtype: torch's name for the dtype of the weights.
        lora: rank of the adapters of all linear layers and experts, which are trained on a frozen model; 0: the model
            itself is trained.
        recompute: every contender recomputes activations in its backward, layer by layer.
        seed: seed of the weights and of the batch.
        lr, beta1, beta2, eps, weight_decay, max_grad_norm: AdamW and its clipping; None: gradients are not clipped.
    """

    layers: int = 16
    hidden: int = 1024
    intermediate: int = 2816
    heads: int = 16
    vocabulary: int = 8192
    batch: int = 1
    tokens: int = 256
    micro_batches: int = 1
    dtype: str = "bfloat16"
    recompute: bool = False
    lora: int = 0
    kv_heads: int = 0
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    seed: int = 1234
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0

    @property
    def numel(self) -> int:
        """Number of parameters of the model, without the few parameters of the norms."""
        kv_share = (self.kv_heads or self.heads) / self.heads
        expert = 3 * self.hidden * self.intermediate
        per_layer = int((2 + 2 * kv_share) * self.hidden**2) + (self.experts or 1) * expert
        return self.layers * per_layer + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def betas(self) -> tuple[float, float]:
        return (self.beta1, self.beta2)

    def config(self) -> Any:
        """Return the model's config of transformers: a LlamaConfig, or with experts a Qwen3MoeConfig."""
        from transformers import LlamaConfig, Qwen3MoeConfig

        mixture = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.intermediate,
            "head_dim": self.hidden // self.heads,
            "norm_topk_prob": True,
        }
        kind, more = (Qwen3MoeConfig, mixture) if self.experts else (LlamaConfig, {})
        return kind(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(self.tokens, 256),
            tie_word_embeddings=self.tied,
            use_cache=False,
            **more,
        )

    def build_model(self) -> nn.Module:
        """Return a randomly initialised model of this dtype in training mode; with adapters if `lora` is set."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(self.config(), dtype=getattr(torch, self.dtype)).train()
        if self.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.lora:
            from peft import LoraConfig, get_peft_model

            targets: dict[str, Any] = {"target_modules": "all-linear"}
            if self.experts:
                targets["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
            model = get_peft_model(model, LoraConfig(r=self.lora, task_type="CAUSAL_LM", **targets))
            model.to(getattr(torch, self.dtype))
        return model

    def build_batch(self) -> torch.Tensor:
        """Return token ids (batch, tokens), int64, which are also the labels."""
        return self.build_batches()[0]

    def build_batches(self) -> list[torch.Tensor]:
        """Return `build_batch` for each micro-batch."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        shape = self.batch, self.tokens
        return [torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(self.micro_batches)]


WORKLOADS = {"256": Workload(), "2048": Workload(batch=4, tokens=512, recompute=True)}
"""Workloads by tokens per step."""

SMALL = Workload(layers=2, hidden=256, intermediate=704, heads=4, vocabulary=2048, tokens=64)


@dataclass(frozen=True)
class Job:
    """Job of a worker, which the driver passes as an argument.

    Attributes:
        workload: the training.
        swap_dir: an empty directory for this worker; '' if the contender swaps nothing.
        options: settings of this contender.
    """

    workload: Workload
    swap_dir: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        fields = json.loads(text)
        return cls(Workload(**fields.pop("workload")), **fields)
