"""Models whose frozen weights have the form of their checkpoint: what tests of all forms do with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import infinity
from infinity.coordinator import registry
from infinity.state.codec import parts_of
from tests.checkpoint.fp8 import batch
from tests.conftest import weights_of
from tests.models import loss_of

STEPS = 4


@pytest.fixture
def deferred(swap_config: Any) -> Callable[..., Any]:
    return lambda path, **options: infinity.load_pretrained(path, swap_config("nvme"), defer=True, **options)


@pytest.fixture
def offloaded(swap_config: Any) -> Iterator[Callable[..., Any]]:
    opened: list[Any] = []

    def offload(model: Any, **changes: Any) -> Any:
        infinity.offload(model, swap_config("nvme", **changes))
        opened.append(model)
        return model

    yield offload
    for model in opened:
        infinity.close(model)


def with_adapters(model: Any, targets: str | list[str] = "all-linear") -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora)


def trained(model: Any, steps: int = STEPS) -> list[float]:
    losses = []
    optimizer = infinity.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(steps):
        loss = loss_of(model, batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits_of(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=batch()["input_ids"]).logits.clone()
    return logits


def codecs_in(model: Any) -> set[str | None]:
    return {group.codec for unit in registry.coordinator_of(model).units for group in unit.full.groups}


def require_same(model: Any, another: Any) -> None:
    expected = weights_of(another)
    for name, value in weights_of(model).items():
        assert torch.equal(value, expected[name]), name


def stored_bytes(model: Any, unit: Any, index: int) -> bytes:
    """Read the home of a group from the store."""
    coordinator, home = registry.coordinator_of(model), unit.weights_home.groups[index]
    assert not home.in_memory
    memory = coordinator.resources.arena.lease(home.nbytes, "a test")
    try:
        coordinator.resources.store.read(home.extent, memory.view()).result()
        return bytes(memory.view())
    finally:
        memory.release()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def same_bytes_as_in_file(
    model: Any, tensors: Mapping[str, torch.Tensor], names: Mapping[str, Callable[[str], str]]
) -> int:
    """Compare the encoded parameters in the store with the tensors of a file. Return the number of parameters.

    `names` has for each part of the encoded form the name of its tensor, from the name of the parameter.
    """
    compared = 0
    for unit in registry.coordinator_of(model).units:
        for index, group in enumerate(unit.full.groups):
            if group.codec is None:
                continue
            stored, shapes = stored_bytes(model, unit, index), {spec.name: spec.shape for spec in group.specs}
            for name, (begin, _) in group.encoded.items():
                parts = parts_of(group.codec, shapes[name])
                assert parts.keys() == names.keys()
                for part, (at, nbytes) in parts.items():
                    tensor = tensors[names[part](name)].contiguous().reshape(-1).view(torch.uint8)
                    found = stored[begin + at : begin + at + nbytes]
                    assert digest(found) == digest(tensor.numpy().tobytes()), (name, part)
                compared += 1
    return compared
