"""Forms of weights for scripts that ask for quantization by bitsandbytes.

infinity quantizes frozen weights itself, in a form of its own, and a log line names this form.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from infinity.config import SwapConfig
from infinity.errors import NotAvailableError
from infinity.state.frozen_codecs import FrozenName, encoded_form

logger = logging.getLogger(__name__)

_HEAD = "lm_head"
"""Name of the module that is never quantized."""
_READ_HERE = ("compressed-tensors", "fp8", "mxfp4")
"""Methods of quantization whose checkpoints infinity reads if a script asks transformers to decode them."""


def is_left_to_transformers(quantization: Any) -> bool:
    """Return whether a quantization_config asks transformers to decode the weights while it loads them.

    infinity reads some forms itself: transformers computes the size of the blocks of FP8 from the shapes, and would
    decode all weights of the model before the first step.
    """
    return bool(_value(quantization, "dequantize")) and not _is_decoded_here(quantization)


def _is_decoded_here(quantization: Any) -> bool:
    """Return whether a quantization_config asks for the decoded weights of a checkpoint whose form infinity reads."""
    method = _value(quantization, "quant_method")
    return bool(_value(quantization, "dequantize")) and str(getattr(method, "value", method)) in _READ_HERE


def form_of(quantization: Any) -> FrozenName | None:
    """Return the form in which infinity stores a model's frozen weights if the script asks for quantized weights.

    Args:
        quantization: the quantization_config of from_pretrained: an object of transformers, or its dict.

    Returns:
        The form; None if the script asks for no quantization, or for the decoded weights of a checkpoint.

    Raises:
        NotAvailableError: the quantization_config is another one, and not for bitsandbytes.
    """
    if quantization is None or _is_decoded_here(quantization):
        return None
    method = _value(quantization, "quant_method")
    if method is not None and str(getattr(method, "value", method)) != "bitsandbytes":
        named = method if isinstance(quantization, dict) else type(quantization).__name__
        if str(method) == "infinity":
            raise NotAvailableError(
                f"from_pretrained(quantization_config={named}): `infinity run` has a swap config already. Remove the "
                "quantization_config and a Trainer's arguments from infinity.hf, or start the script without `infinity "
                "run`."
            )
        raise NotAvailableError(
            f"from_pretrained(quantization_config={named}): infinity quantizes weights to NF4 (4 bits) or int8 "
            "(8 bits) only. Remove the quantization_config, and set frozen: nf4 or frozen: int8 in the swap config. "
            "infinity then quantizes the weights that are not trained."
        )
    if _value(quantization, "load_in_4bit"):
        return "nf4"
    return "int8" if _value(quantization, "load_in_8bit") else None


class QuantizedForms:
    """The form of frozen weights of each model for which a script gave a quantization_config."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, FrozenName] = weakref.WeakKeyDictionary()

    def loaded(self, model: nn.Module, quantization: Any, config: SwapConfig) -> None:
        """Register a loaded model for which the script gave this quantization_config.

        A log line says which form infinity uses instead.
        """
        form = form_of(quantization)
        if form is None:
            return
        asked = "load_in_4bit=True" if form == "nf4" else "load_in_8bit=True"
        if config.frozen != "auto":
            done = f"the swap config says `frozen: {config.frozen}`, which is used instead"
        elif any(encoded_form(parameter) is not None for parameter in model.parameters()):
            done = "the checkpoint is quantized already, and its frozen weights keep the checkpoint's form"
        else:
            self._of[model] = form
            done = f"{_RESTS[form]} (`frozen: {form}`), and are decoded when they are used{_others(quantization)}"
        logger.warning("infinity: BitsAndBytesConfig(%s): %s. bitsandbytes is not used.", asked, done)

    def copied(self, model: nn.Module, another: nn.Module) -> None:
        """Use the form of a model also for a copy of the model."""
        if model in self._of:
            self._of[another] = self._of[model]

    def changes(self, model: nn.Module, config: SwapConfig) -> dict[str, Any]:
        """Return the changes of the swap config that follow from a model's quantization_config.

        The model may be a wrapper around a loaded model.
        """
        found = [self._of[each] for each in model.modules() if each in self._of]
        return {"frozen": found[0]} if found and config.frozen == "auto" else {}


_RESTS: dict[str, str] = {
    "nf4": "frozen weights of this model are stored in 4 bits, as NF4 with nested scales",
    "int8": "frozen weights of this model are stored in 8 bits, in infinity's own linear form",
}


def _others(quantization: Any) -> str:
    """Return text that names the settings of a quantization_config that infinity ignores."""
    said = ""
    if _value(quantization, "load_in_4bit") and _value(quantization, "bnb_4bit_quant_type") != "nf4":
        said += "; fp4 is not available, and NF4 takes the same space"
    skipped = [name for name in _value(quantization, "llm_int8_skip_modules") or () if _HEAD not in name]
    if skipped:
        said += f"; llm_int8_skip_modules={skipped} is ignored"
    return said


def _value(quantization: Any, name: str) -> Any:
    return quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, None)
