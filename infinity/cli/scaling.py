"""`--dtype`, and loss scaling, without which small fp16 gradients would be rounded to zero."""

from __future__ import annotations

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_scaler(model: nn.Module, *, wanted: bool) -> torch.amp.GradScaler:
    """A scaler for the model's loss. It is disabled, and does nothing, unless the model has trainable fp16 weights."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    enabled = wanted and any(parameter.dtype == torch.float16 for parameter in trained)
    if enabled:
        print("fp16 weights: the loss is scaled (--no-loss-scale switches that off)", flush=True)
    device = next((parameter.device.type for parameter in trained), "cpu")
    return torch.amp.GradScaler(device, enabled=enabled)
