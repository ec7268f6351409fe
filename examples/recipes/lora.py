"""Supervised fine-tuning of LoRA adapters with TRL's SFTTrainer."""

import os

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model_name = os.environ["MODEL"]
dtype = os.environ.get("DTYPE", "bfloat16")
every = int(os.environ.get("EVERY", "200"))

dataset = load_dataset("json", data_files=os.environ["DATA"], split="train")
dataset = dataset.train_test_split(test_size=0.125, seed=0)
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))

peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")

training_args = SFTConfig(
    output_dir=os.environ["OUTPUT"],
    max_steps=int(os.environ.get("STEPS", "1000")),
    per_device_train_batch_size=int(os.environ.get("BATCH", "4")),
    gradient_accumulation_steps=2,
    learning_rate=float(os.environ.get("RATE", "2e-4")),
    max_length=int(os.environ.get("LENGTH", "2048")),
    eval_strategy="steps",
    eval_steps=every,
    save_strategy="steps",
    save_steps=every,
    save_total_limit=3,
    logging_steps=1,
    bf16=dtype == "bfloat16",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)

trainer = SFTTrainer(
    model=model,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    processing_class=AutoTokenizer.from_pretrained(model_name),
    peft_config=peft_config,
)
trainer.train(resume_from_checkpoint=os.environ.get("RESUME"))
trainer.save_model()
trainer.save_state()
