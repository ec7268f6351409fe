"""A reward model, trained on preferences with TRL's RewardTrainer."""

import os

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer

model_name = os.environ["MODEL"]
dtype = os.environ.get("DTYPE", "bfloat16")

set_seed(0)  # the new head is initialised with random values
model = AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=1, dtype=getattr(torch, dtype))

training_args = RewardConfig(
    output_dir=os.environ["OUTPUT"],
    max_steps=int(os.environ.get("STEPS", "1000")),
    per_device_train_batch_size=int(os.environ.get("BATCH", "2")),
    gradient_accumulation_steps=2,
    learning_rate=float(os.environ.get("RATE", "1e-5")),
    max_length=int(os.environ.get("LENGTH", "1024")),
    save_strategy="steps",
    save_steps=int(os.environ.get("EVERY", "200")),
    save_total_limit=3,
    logging_steps=1,
    bf16=dtype == "bfloat16",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)

trainer = RewardTrainer(
    model=model,
    args=training_args,
    train_dataset=load_dataset("json", data_files=os.environ["DATA"], split="train"),
    processing_class=AutoTokenizer.from_pretrained(model_name),
)
trainer.train(resume_from_checkpoint=os.environ.get("RESUME"))
trainer.save_model()
trainer.save_state()
