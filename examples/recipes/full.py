"""Fine-tune all parameters of a causal language model with transformers' Trainer."""

import os

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

model_name = os.environ["MODEL"]
dtype = os.environ.get("DTYPE", "bfloat16")
length = int(os.environ.get("LENGTH", "2048"))
every = int(os.environ.get("EVERY", "200"))

tokenizer = AutoTokenizer.from_pretrained(model_name)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))

dataset = load_dataset("json", data_files=os.environ["DATA"], split="train")
dataset = dataset.train_test_split(test_size=0.125, seed=0)


def preprocess(examples):
    return tokenizer(examples["text"], truncation=True, max_length=length)


tokenized = dataset.map(preprocess, batched=True, remove_columns=["text"])

training_args = TrainingArguments(
    output_dir=os.environ["OUTPUT"],
    max_steps=int(os.environ.get("STEPS", "1000")),
    per_device_train_batch_size=int(os.environ.get("BATCH", "4")),
    gradient_accumulation_steps=2,
    learning_rate=float(os.environ.get("RATE", "1e-5")),
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
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

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=tokenized["train"],
    eval_dataset=tokenized["test"],
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
)
trainer.train(resume_from_checkpoint=os.environ.get("RESUME"))
trainer.save_model()
trainer.save_state()
