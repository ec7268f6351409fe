"""A model's persistent buffers: read as they are, put back by their names, and no others."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from infinity.durable import module_buffers
from infinity.errors import ResumeError


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("none", None)


def model() -> nn.Sequential:
    made = nn.Sequential(Norm(), Norm())
    made[1].mean = made[0].mean  # shared
    made.register_buffer("steps", torch.tensor(4))
    return made


def test_persistent_buffers_have_their_full_names_a_shared_one_each_of_its() -> None:
    made = model()
    assert list(dict(module_buffers.named(made))) == ["steps", "0.mean", "1.mean"]
    assert module_buffers.reader(made)().keys() == dict(module_buffers.named(made)).keys()


def test_a_reader_gives_what_is_there_when_it_is_called() -> None:
    made = model()
    read = module_buffers.reader(made)
    made[0].mean = torch.ones(3)
    assert [read()[name].sum().item() for name in ("0.mean", "1.mean")] == [3.0, 0.0]
    made[0].mean = None
    assert "0.mean" not in read()


def test_a_reader_does_not_keep_the_model_alive() -> None:
    made = model()
    read, gone = module_buffers.reader(made), weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert read()["steps"] == 4


def test_values_come_back() -> None:
    made = model()
    saved = {name: buffer.clone() for name, buffer in module_buffers.named(made)}
    made[0].mean.add_(7), made.steps.add_(1)
    module_buffers.restore(made, saved)
    assert made[1].mean.sum() == 0
    assert made.steps == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"2.mean": torch.zeros(3)}, "buffer '2.mean' is only in the run that is resumed"),
        ({"steps": None}, "buffer 'steps' is .* here and NoneType in the run"),
        ({"steps": torch.zeros(2)}, r"buffer 'steps' is \(\), torch.int64 here and .*2,.* torch.float32"),
        ({"steps": torch.tensor(1.0)}, "torch.int64 here and .* torch.float32"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    made = model()
    with pytest.raises(ResumeError, match=message):
        module_buffers.restore(made, dict(module_buffers.named(made)) | change)


def test_a_buffer_that_the_run_did_not_have_is_named() -> None:
    made = model()
    saved = dict(module_buffers.named(made))
    del saved["0.mean"]
    with pytest.raises(ResumeError, match="buffer '0.mean' is only in the model"):
        module_buffers.restore(made, saved)
