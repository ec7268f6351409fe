"""LightningModules without any reference to infinity. Tests import this file on demand: Lightning takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from transformers import AutoModelForCausalLM

import infinity


class Language(pl.LightningModule):
    """Module that fine-tunes a model. The module loads this model or gets it as an argument."""

    def __init__(self, source: Path | nn.Module) -> None:
        super().__init__()
        loads = isinstance(source, Path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto") if loads else source
        self.model.train()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.model(**batch).loss)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(**batch).logits

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class InHalf(Language):
    """Module for training in fp16, in which the eps and the moments of plain AdamW would be 0."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class OwnData(Language):
    """Module with a batch size that a callback may set."""

    def __init__(self, source: Path, rows: Any) -> None:
        super().__init__(source)
        self.rows, self.batch_size = rows, 4

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, batch_size=self.batch_size)


class ClippedByValue(Language):
    """Module that clips gradients in the way that the error for Lightning's option recommends."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        with infinity.gathered(self.model, grads=True):
            nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)


class Lion(Language):
    """Module with an optimizer of infinity."""

    def configure_optimizers(self) -> Any:
        return infinity.Lion(self.parameters(), lr=1e-4)


class Clipping(Language):
    """Module with an optimizer of infinity that clips gradients."""

    def configure_optimizers(self) -> Any:
        return infinity.AdamW(self.parameters(), lr=1e-3, max_grad_norm=1e-3)


class Small(pl.LightningModule):
    """Module with its own parameters, in layers that training_step calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.scale = nn.Parameter(torch.ones(32))
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embed(batch["input_ids"]) * self.scale))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(float(loss))
        return loss

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.head(self.embed(batch["input_ids"]) * self.scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TrainsWhatIsNotFrozen(Small):
    """Module for gradual unfreezing, in the form of Lightning's documentation."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


class GrowingRate(Small):
    """Module with a learning rate that grows with each step, or that Tuner.lr_find grows."""

    def __init__(self, growth: Any) -> None:
        super().__init__()
        self.growth = growth

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        if self.growth is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.growth)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Averaging(pl.Callback):
    """Callback that keeps a moving average of all weights."""

    def __init__(self) -> None:
        self.averages: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, value in infinity.state_dict(pl_module):
            self.averages[name] = torch.lerp(self.averages.get(name, value), value, 0.5)


class Unfreezing(BaseFinetuning):
    """Callback that trains only the head in the first epoch, and the head and the embeddings in later epochs."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.embed)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embed, optimizer, lr=3e-2)


class TwoOptimizers(pl.LightningModule):
    """Module that optimizes its layers by hand, with two optimizers."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.automatic_optimization = False
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        logits = batch["input_ids"]
        for layer in self.children():
            logits = layer(logits)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.AdamW(parameters[:1], lr=1e-2), torch.optim.AdamW(parameters[1:], lr=1e-3)]


class StepsByHand(Language):
    """Module without automatic optimization."""

    def __init__(self, source: Path | nn.Module) -> None:
        super().__init__(source)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        self.manual_backward(self.model(**batch).loss)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
