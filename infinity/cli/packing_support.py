"""A check that a model keeps the examples of one sequence separate."""

from __future__ import annotations

from typing import Any

import torch

from infinity.cli.batches import TokenBatch
from infinity.errors import ModelError

_LENGTHS = 6, 9
_SHARE_MAX = 0.1


def require_separates(model: Any) -> None:
    """Check that the second of two examples in one sequence does not depend on the first. All ranks call this.

    The logits of the two examples in one sequence are compared with the logits of the same examples in separate
    sequences. The tolerance is a fraction of the difference that occurs without any separation. To measure this
    difference, the logits are also computed for the two examples joined into one.

    Raises:
        ModelError: the model does not separate the examples.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(sum(_LENGTHS)) * 7919 + 11) % vocabulary
    examples = ids.split(_LENGTHS)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    training = model.training
    model.eval()
    with torch.no_grad():
        apart = torch.cat([model(**TokenBatch(each[None]).inputs_of(model)).logits[0] for each in examples])
        packed = model(**TokenBatch(ids[None], positions=positions[None]).inputs_of(model)).logits[0]
        joined = model(**TokenBatch(ids[None]).inputs_of(model)).logits[0]
    model.train(training)
    seen, without = ((each.float() - apart.float()).abs().max().item() for each in (packed, joined))
    if seen > _SHARE_MAX * without:
        raise ModelError(
            f"{type(model).__name__} mixes the examples of one sequence: the logits of an example differ by up to "
            f"{seen:.3g} after another example, and by {without:.3g} without any separation. Give --no-packing: each "
            "sequence then has one example and padding."
        )
