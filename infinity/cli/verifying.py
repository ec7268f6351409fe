"""`--verify-output`: a check that the saved model computes the logits of the trained model without infinity."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity import _native
from infinity.checkpoint.load_pretrained import load_config_of
from infinity.checkpoint.merged_adapters import computing_merged
from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.finetuned_model import class_of, named, with_saved_adapters
from infinity.cli.optimizers import DTYPES
from infinity.coordinator import registry
from infinity.errors import InfinityError, NotAvailableError
from infinity.state.codec import Codec, decode, encode, encoded_bytes

_ALIGNMENT = 64
"""Alignment in bytes of tensors that torch allocates in host memory."""


@dataclass(frozen=True)
class ExpectedResults:
    """Results of the trained model. The saved model must have the same results.

    Attributes:
        logits: logits of a batch.
        encoded: codecs of the weights that infinity kept encoded, by name of the parameter.
    """

    logits: torch.Tensor
    encoded: dict[str, Codec]


def require_possible(options: FinetuneOptions) -> None:
    """If --verify-output is given, check that the output can be loaded without infinity.

    Raises:
        NotAvailableError: the output cannot be loaded without infinity.
    """
    if not (options.verify_output and _has_adapters(options)):
        return
    if options.lora_experts:
        raise NotAvailableError(
            "--verify-output compares bits, and PEFT rounds adapters of experts in another order than infinity: leave "
            "--verify-output out, or give --merge"
        )
    config = load_config_of(options.model, **named(options))
    if getattr(config, "quantization_config", None) is not None:
        raise NotAvailableError(
            "--verify-output of adapters of a quantized model is not available yet; leave --verify-output out, or give "
            "--merge"
        )


def expected_of(model: Any, options: FinetuneOptions, batch: Any) -> ExpectedResults:
    """Compute the results of an offloaded model. All ranks call this.

    Args:
        model: the offloaded model.
        options: options of the run. With --merge, the model computes with merged adapters, because the output has
            merged adapters.
        batch: sequences that the logits are computed for."""
    with computing_merged(model) if options.merge else nullcontext():
        return ExpectedResults(logits_of(model, batch), _encoded(model))


def logits_of(model: Any, batch: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(**batch.inputs_of(model)).logits
    return logits


def verify(directory: Path, options: FinetuneOptions, batch: Any, expected: ExpectedResults) -> None:
    """Check that the saved model computes the expected logits.

    Args:
        directory: the output.
        options: options of the run.
        batch: sequences that the logits are computed for.
        expected: results of the trained model.

    Raises:
        InfinityError: a logit differs.
        NotAvailableError: the device has no room for the complete model.
    """
    plain = _moved(_load_plainly(directory, options, expected.encoded), expected.logits.device)
    plain.config.use_cache = False
    _align(plain)
    again = logits_of(plain, batch)
    if not torch.equal(again, expected.logits):
        difference = (again.float() - expected.logits.float()).abs().max().item()
        raise InfinityError(f"the saved model's logits differ from the trained one's by up to {difference}")
    loaded = (
        "adapters, loaded by PEFT, give" if _has_adapters(options) else "model, loaded by plain transformers, gives"
    )
    print(f"verified: the saved {loaded} the trained model's logits, bit for bit")


def _moved(model: Any, device: torch.device) -> Any:
    """Move a plain model to the device of the trained model.

    On another device the results might differ in some bits.
    """
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise NotAvailableError(
            f"--verify-output: the saved model is complete, but {device} has no room for it without infinity, so the "
            "two models cannot be compared; leave the option out"
        ) from error


def _align(model: nn.Module) -> None:
    """Copy each weight that is not aligned in memory to aligned memory.

    If the weight of a head with one output is not aligned, torch adds in another order.
    """
    for parameter in model.parameters():
        if parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


def _has_adapters(options: FinetuneOptions) -> bool:
    """Return whether the output contains adapters instead of a model."""
    return options.lora is not None and not options.merge


def _encoded(model: nn.Module) -> dict[str, Codec]:
    places = ((name, registry.find(parameter)) for name, parameter in model.named_parameters())
    codecs = ((name, place[1].group.codec) for name, place in places if place is not None)
    return {name: codec for name, codec in codecs if codec is not None}


def _load_plainly(directory: Path, options: FinetuneOptions, encoded: dict[str, Codec]) -> Any:
    """Load the output without infinity.

    Args:
        directory: the output, which contains a model or adapters.
        options: options of the run.
        encoded: codecs of the weights that infinity kept encoded, by name. They are used only if the output contains
            adapters.
    """
    kind, more = class_of(options)
    if not _has_adapters(options):
        return kind.from_pretrained(directory, trust_remote_code=bool(options.trust_remote_code))
    base = kind.from_pretrained(options.model, dtype=DTYPES[options.dtype], **named(options), **more)
    model = with_saved_adapters(base, directory)
    for name, codec in encoded.items():
        _round(model.get_parameter(name), name, codec)
    return model


def _round(parameter: nn.Parameter, name: str, codec: Codec) -> None:
    """Encode and decode a weight. The adapters were trained with this rounded weight."""
    data = torch.empty(encoded_bytes(codec, parameter.shape), dtype=torch.uint8)
    encode(name, parameter.detach().reshape(-1), codec, data.numpy().data, _native.ThreadPool(1))
    with torch.no_grad():
        parameter.copy_(decode(data, codec, parameter.shape, parameter.dtype))
