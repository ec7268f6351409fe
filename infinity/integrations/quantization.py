"""A script asks for quantized weights with bitsandbytes: what infinity does instead, and says in a line of log."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import nn

from infinity.config import SwapConfig
from infinity.errors import NotAvailableError
from infinity.state.frozen import FrozenName, given

logger = logging.getLogger(__name__)

_HEAD = "lm_head"
"""A module that stays as it is anyway."""


def is_left_to_transformers(quantization: Any) -> bool:
    """Whether a quantization_config asks for weights that are decoded while they are loaded."""
    return bool(_value(quantization, "dequantize"))


def form_of(quantization: Any) -> FrozenName | None:
    """The form in which the frozen weights of a model rest instead of what a script asks for.

    Args:
        quantization: the quantization_config that from_pretrained is given: an object of transformers, or its dict.

    Returns:
        None, if it asks for nothing.

    Raises:
        NotAvailableError: it is not one of bitsandbytes.
    """
    if quantization is None:
        return None
    method = _value(quantization, "quant_method")
    if method is not None and str(getattr(method, "value", method)) != "bitsandbytes":
        named = method if isinstance(quantization, dict) else type(quantization).__name__
        if str(method) == "infinity":
            raise NotAvailableError(
                f"from_pretrained(quantization_config={named}): `infinity run` has a swap config already. Leave the "
                "quantization_config and what a Trainer has of infinity.hf out, or start the script without "
                "`infinity run`."
            )
        raise NotAvailableError(
            f"from_pretrained(quantization_config={named}): infinity quantizes weights to NF4 or int8. Leave the "
            "quantization_config out, and set frozen: nf4 or int8 in the swap config: weights that are not trained "
            "then rest in 4 or 8 bits."
        )
    if _value(quantization, "load_in_4bit"):
        return "nf4"
    return "int8" if _value(quantization, "load_in_8bit") else None


class Forms:
    """In which form the frozen weights of each model rest, where the script says that."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, FrozenName] = weakref.WeakKeyDictionary()

    def loaded(self, model: nn.Module, quantization: Any, config: SwapConfig) -> None:
        """A model was loaded, and the script gave this quantization_config for it. A line of log says what comes of
        it."""
        form = form_of(quantization)
        if form is None:
            return
        asked = "load_in_4bit=True" if form == "nf4" else "load_in_8bit=True"
        if config.frozen != "auto":
            done = f"the swap config says `frozen: {config.frozen}`, and that is done instead"
        elif any(given(parameter) is not None for parameter in model.parameters()):
            done = "the checkpoint is quantized already, and its frozen weights rest as they are in it"
        else:
            self._of[model] = form
            done = f"{_RESTS[form]} (`frozen: {form}`), and are decoded when they are used{_others(quantization)}"
        logger.warning("infinity: BitsAndBytesConfig(%s): %s. bitsandbytes has no part in it.", asked, done)

    def copied(self, model: nn.Module, another: nn.Module) -> None:
        """What is known of a model is known of its copy."""
        if model in self._of:
            self._of[another] = self._of[model]

    def changes(self, model: nn.Module, config: SwapConfig) -> dict[str, Any]:
        """What the script changes in the swap config of a model, which may be one that was put around a loaded one."""
        found = [self._of[each] for each in model.modules() if each in self._of]
        return {"frozen": found[0]} if found and config.frozen == "auto" else {}


_RESTS: dict[str, str] = {
    "nf4": "frozen weights of this model rest in 4 bits, as NF4 with nested scales",
    "int8": "frozen weights of this model rest in 8 bits, in infinity's own linear form",
}


def _others(quantization: Any) -> str:
    """What else is not as the script asks for it."""
    said = ""
    if _value(quantization, "load_in_4bit") and _value(quantization, "bnb_4bit_quant_type") != "nf4":
        said += "; there is no fp4, and NF4 takes the same space"
    skipped = [name for name in _value(quantization, "llm_int8_skip_modules") or () if _HEAD not in name]
    if skipped:
        said += f"; llm_int8_skip_modules={skipped} is not heeded"
    return said


def _value(quantization: Any, name: str) -> Any:
    return quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, None)
