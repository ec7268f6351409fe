"""Group relative policy optimization with TRL's GRPOTrainer and a reward on the characters of a completion."""

import json
import os

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model_name = os.environ["MODEL"]
dtype = os.environ.get("DTYPE", "float32")
output_dir = os.environ["OUTPUT"]


def reward_unique_letters(completions, completion_ids, **kwargs):
    """Return the share of a completion's characters that are letters, plus 0.1 for each different character."""
    with open(os.path.join(output_dir, "completions.jsonl"), "a") as file:
        file.writelines(json.dumps(list(ids)) + "\n" for ids in completion_ids)
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isalpha() for c in text) / max(len(text), 1) + 0.1 * len(set(text)) for text in texts]


os.makedirs(output_dir, exist_ok=True)
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype))

training_args = GRPOConfig(
    output_dir=output_dir,
    max_steps=int(os.environ.get("STEPS", "8")),
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    learning_rate=1e-4,
    save_strategy="steps",
    save_steps=4,
    logging_steps=1,
    bf16=dtype == "bfloat16",
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
)

trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward_unique_letters,
    args=training_args,
    train_dataset=load_dataset("json", data_files=os.environ["DATA"], split="train"),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=os.environ.get("RESUME"))
trainer.save_model()
trainer.save_state()
