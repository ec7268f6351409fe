"""Record of a model's modules and parameters, to detect modules and parameters that were replaced."""

from __future__ import annotations

import weakref

from torch import nn

from infinity.errors import ModelError


class ModelStructure:
    """The modules and parameters of a model when it was offloaded. A module that replaces another has no hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._children = [
            (weakref.ref(parent), name, weakref.ref(child))
            for parent in model.modules()
            for name, child in parent._modules.items()
            if child is not None
        ]
        self._parameters = [
            (weakref.ref(module), name, id(parameter))
            for module in model.modules()
            for name, parameter in module._parameters.items()
        ]

    def changed(self) -> str:
        """Return the name of the first replaced module or parameter; "" when none was replaced."""
        for parent, name, child in self._children:
            module = parent()
            if module is not None and module._modules.get(name) is not child():
                return name
        for owner, name, identity in self._parameters:
            module = owner()
            if module is not None and id(module._parameters.get(name)) != identity:
                return name
        return ""

    def require_unchanged(self) -> None:
        """Check that no module or parameter was replaced.

        Raises:
            ModelError: a module or parameter was replaced. The message names the module or parameter.
        """
        name = self.changed()
        if not name:
            return
        raise ModelError(
            f"'{name}' was replaced after infinity.offload (by get_peft_model, merge_and_unload, a parametrization, or "
            "an assignment), so its weights are not in the store. Change the model before infinity.offload (with "
            "infinity.load_pretrained(defer=True): between the two calls). Or make the optimizer after the change and "
            "before the first forward: making the optimizer offloads the model again. To save a merged PEFT model, "
            "call merged.save_pretrained(directory) in the same `with infinity.gathered(model):` as the merge."
        )
