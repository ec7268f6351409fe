"""Custom training loop with Accelerate."""

import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_cosine_schedule_with_warmup,
)

model_name = os.environ["MODEL"]
output_dir = os.environ["OUTPUT"]
steps = int(os.environ.get("STEPS", "8"))
dtype = os.environ.get("DTYPE", "float32")

set_seed(0)
accelerator = Accelerator(
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)

tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))
dataset = load_dataset("json", data_files=os.environ["DATA"], split="train")
dataset = dataset.map(
    lambda examples: tokenizer(examples["text"], truncation=True, max_length=128),
    batched=True,
    remove_columns=["text"],
)
collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
dataloader = DataLoader(dataset, shuffle=True, batch_size=2, collate_fn=collator)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=steps)

model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)

step = 0
if os.environ.get("RESUME"):
    accelerator.load_state(os.environ["RESUME"])
    step = int(os.environ["RESUME"].rsplit("-", 1)[1])
    dataloader = accelerator.skip_first_batches(dataloader, step * accelerator.gradient_accumulation_steps)

model.train()
losses = []
for batch in dataloader:
    if step == steps:
        break
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        accelerator.print(json.dumps({"step": step, "loss": sum(losses) / len(losses)}), flush=True)
        losses = []
        if step % 4 == 0:
            accelerator.save_state(os.path.join(output_dir, f"checkpoint-{step}"))

accelerator.unwrap_model(model).save_pretrained(output_dir, save_function=accelerator.save)
tokenizer.save_pretrained(output_dir)
