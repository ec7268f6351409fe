"""A model that is closed, or that nobody has any more, leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
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


def test_a_resumed_run_that_discards_its_store_leaves_no_directory(swap_config: Any) -> None:
    config = swap_config(commit_every=1)
    model, batch = llama()
    model = infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters())
    model(**batch).loss.backward()
    optim.step()
    infinity.close(model)
    place = Path(config["nvme"]["paths"][0])
    assert place.exists()
    infinity.close(infinity.resume(llama()[0], config), discard=True)
    assert not place.exists()


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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def trained(offload: Any, tier: str) -> Any:
    model = offload(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))), tier)
    optim = infinity.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optim.step()
    optim.zero_grad()
    infinity.synchronize(model)
    return model


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_closed_model_that_is_referred_to_gives_its_memory_back(tier: str, offload: Any) -> None:
    """In a notebook, the next offload is planned with the free memory."""
    model = trained(offload, tier)
    arena, before = registry.coordinator_of(model).resources.arena, resident_bytes()
    used = arena.nbytes if tier == "host" else 8 << 20
    infinity.close(model)
    assert before - resident_bytes() > min(used, 64 << 20) // 2
    assert model[0].weight.shape == (1024, 1024)


def test_a_view_of_weights_that_somebody_holds_stays_as_it_is(offload: Any) -> None:
    kept: list[torch.Tensor] = []

    class Showing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight.detach()[:4])
            return super().forward(x)

    model = offload(torch.nn.Sequential(Showing(64, 64), torch.nn.Linear(64, 64)), "host")
    with torch.no_grad():
        model(torch.ones(1, 64))
    values = kept[0].clone()
    infinity.close(model)
    assert torch.equal(kept[0], values)
