"""Direct preference optimization with TRL's DPOTrainer and a reference model."""

import os

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model_name = os.environ["MODEL"]
dtype = os.environ.get("DTYPE", "bfloat16")

tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))
ref_model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))
train_dataset = load_dataset("json", data_files=os.environ["DATA"], split="train")

training_args = DPOConfig(
    output_dir=os.environ["OUTPUT"],
    max_steps=int(os.environ.get("STEPS", "1000")),
    per_device_train_batch_size=int(os.environ.get("BATCH", "2")),
    gradient_accumulation_steps=2,
    learning_rate=float(os.environ.get("RATE", "1e-6")),
    beta=0.1,
    max_length=int(os.environ.get("LENGTH", "1024")),
    save_strategy="steps",
    save_steps=int(os.environ.get("EVERY", "200")),
    save_total_limit=3,
    logging_steps=1,
    bf16=dtype == "bfloat16",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)

trainer = DPOTrainer(
    model=model,
    ref_model=ref_model,
    args=training_args,
    train_dataset=train_dataset,
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=os.environ.get("RESUME"))
trainer.save_model()
trainer.save_state()
