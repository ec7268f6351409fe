"""Worker with transformers' Trainer under `infinity run`: a checkpoint loaded by from_pretrained, and Trainer's own
training loop.

Trainer also does the clipping and the learning rate schedule. Trainer runs in a separate thread, which waits for its
turn before every step.
"""

from __future__ import annotations

import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import infinity
from infinity.config import load_config
from infinity.integrations.launcher import installed
from peers.protocol import Contender, serve
from peers.workload import Job

_STEPS = 1 << 20  # more steps than are ever requested


class _Turns(TrainerCallback):
    """Callback that lets Trainer make one step for each call of `step`."""

    def __init__(self) -> None:
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: BaseException | None = None
        self._over = False
        self._ready = threading.Semaphore(0)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._ready.release()

    def ready(self) -> None:
        self._ready.acquire()
        if self.failure is not None:
            raise self.failure

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin.acquire()
        if self._over:
            raise KeyboardInterrupt

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._end.release()

    def step(self) -> None:
        self._begin.release()
        self._end.acquire()
        if self.failure is not None:
            raise self.failure

    def finish(self) -> None:
        self._over = True
        self._begin.release()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self._ready.release()
        self._end.release()


class _OneBatch(Trainer):
    """Trainer that keeps the loss of the last step."""

    last: torch.Tensor

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.last = loss.detach()
        return loss


def setup(job: Job) -> Contender:
    """Write the model to a checkpoint, and train the model as a script does. Options: keys of the swap config."""
    work, closing = job.workload, ExitStack()
    directory = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=Path(job.swap_dir).parent)))
    work.build_model().save_pretrained(directory / "model")
    config = {
        "gradients": "host",
        "activations": "recompute" if work.recompute else "keep",
        "nvme": {"paths": [job.swap_dir]},
        "commit_every": 0,
        **job.options,
    }
    closing.enter_context(installed(load_config(config)))
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    tokens = work.build_batch()[0]
    args = TrainingArguments(
        output_dir=str(directory / "output"),
        max_steps=_STEPS,
        per_device_train_batch_size=work.batch,
        learning_rate=work.lr,
        adam_beta1=work.beta1,
        adam_beta2=work.beta2,
        adam_epsilon=work.eps,
        weight_decay=work.weight_decay,
        max_grad_norm=work.max_grad_norm or 0.0,
        lr_scheduler_type="constant",
        bf16=work.dtype == "bfloat16",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    turns, rows = _Turns(), [{"input_ids": tokens, "labels": tokens}] * 64
    trainer = _OneBatch(model, args, train_dataset=rows, callbacks=[turns])

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:
            turns.fail(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()

    def step() -> float:
        turns.step()
        return float(trainer.last)

    def close() -> None:
        turns.finish()
        thread.join()
        closing.close()

    turns.ready()  # returns as soon as the model is offloaded
    plan = infinity.statistics(model).plan
    facts = {
        "package": str(Path(infinity.__file__).parent),
        "numel": plan.layout.numel,
        "host_bytes": plan.host_bytes,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "plan": plan.describe(),
    }
    return Contender(step, lambda: infinity.synchronize(model), None, facts, dict, close)


if __name__ == "__main__":
    serve(setup)
