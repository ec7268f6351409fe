"""Fine-tune a causal language model with a LightningModule."""

import os

import lightning as L
import torch
from datasets import load_dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

model_name = os.environ["MODEL"]
output_dir = os.environ["OUTPUT"]
steps = int(os.environ.get("STEPS", "8"))
dtype = os.environ.get("DTYPE", "float32")


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))
        self.model.train()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


L.seed_everything(0)
tokenizer = AutoTokenizer.from_pretrained(model_name)
dataset = load_dataset("json", data_files=os.environ["DATA"], split="train")
dataset = dataset.map(
    lambda examples: tokenizer(examples["text"], truncation=True, max_length=128),
    batched=True,
    remove_columns=["text"],
)
collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
dataloader = StatefulDataLoader(dataset, batch_size=2, collate_fn=collator)

module = LanguageModel()
trainer = L.Trainer(
    accelerator="cpu" if not torch.cuda.is_available() else "auto",
    devices=1,
    max_steps=steps,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    log_every_n_steps=1,
    logger=CSVLogger(output_dir),
    callbacks=[ModelCheckpoint(output_dir, filename="checkpoint-{step}", every_n_train_steps=4, save_top_k=-1)],
)
trainer.fit(module, dataloader, ckpt_path=os.environ.get("RESUME"))
module.model.save_pretrained(output_dir)
tokenizer.save_pretrained(output_dir)
