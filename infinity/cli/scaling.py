"""`--dtype`, and loss scaling: fp16 gradients that are small would be zero without it."""

from __future__ import annotations

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_scaler(model: nn.Module, *, wanted: bool) -> torch.amp.GradScaler:
    """For a model with trainable fp16 weights; for others it is disabled and does nothing."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    enabled = wanted and any(parameter.dtype == torch.float16 for parameter in trained)
    if enabled:
        print("fp16 weights: the loss is scaled (--no-loss-scale switches that off)", flush=True)
    device = next((parameter.device.type for parameter in trained), "cpu")
    return torch.amp.GradScaler(device, enabled=enabled)
