"""A model that is closed, or that nobody has any more, leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.coordinator import registry
from tests.models import llama
from tests.processes import run_script


def test_a_collected_model_leaves_no_swap_file(swap_config: Any) -> None:
    config = swap_config()
    model, batch = llama()
    model = infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters())
    model(**batch).loss.backward()
    optim.step()
    assert Path(config["nvme"]["paths"][0]).exists()
    del model, optim
    gc.collect()
    assert not Path(config["nvme"]["paths"][0]).exists()


def test_a_model_that_is_gone_leaves_nothing_in_memory(swap_config: Any) -> None:
    """Its coordinator, and with it the arena, goes with the model; not with the next process."""
    model, batch = llama()
    model = infinity.offload(model, swap_config("nvme", commit_every=1))
    optim = infinity.AdamW(model.parameters())
    infinity.track(torch.optim.lr_scheduler.ConstantLR(optim), model=model)
    model(**batch).loss.backward()
    optim.step()
    coordinator = weakref.ref(registry.coordinator_of(model))
    infinity.close(model)
    del model, optim
    gc.collect()
    assert coordinator() is None


_CLOSED = """
import gc, signal, sys, torch, infinity
def handlers(): return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
before = handlers()
models = [infinity.offload(torch.nn.Linear(4, 4), {"weights": "host", "optimizer": "host"}) for _ in range(2)]
for model in models:
    model(torch.ones(1, 4)).sum().backward()
    infinity.close(model)
    assert (handlers() == before) == (model is models[-1])
infinity.close(model)
assert handlers() == before
dropped = infinity.offload(torch.nn.Linear(4, 4), {"weights": "host", "optimizer": "host"})
dropped(torch.ones(1, 4))
assert handlers() != before
del dropped, model, models
gc.collect()
assert handlers() == before
try:
    infinity.offload(torch.nn.Linear(4, 4, device="meta"), {"weights": "host", "optimizer": "host"})
except infinity.ModelError:
    assert handlers() == before
else:
    raise SystemExit("offloaded without values")
"""


def test_when_the_last_model_is_closed_the_signal_handlers_are_the_users_own() -> None:
    ended = run_script(_CLOSED)
    assert ended.returncode == 0, ended.stderr
