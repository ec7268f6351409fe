"""Supervised fine-tuning of LoRA adapters with TRL's SFTTrainer."""

import os

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model_name = os.environ["MODEL"]
dtype = os.environ.get("DTYPE", "float32")

dataset = load_dataset("json", data_files=os.environ["DATA"], split="train")
dataset = dataset.train_test_split(test_size=0.125, seed=0)
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))

peft_config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")

training_args = SFTConfig(
    output_dir=os.environ["OUTPUT"],
    max_steps=int(os.environ.get("STEPS", "8")),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    max_length=128,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=4,
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
