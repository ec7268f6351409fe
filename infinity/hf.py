"""Helpers for scripts that use the trainers of transformers and TRL. Importing this module imports transformers.

infinity.InfinityConfig is another helper, for `from_pretrained`.
"""

from infinity.integrations.plug_points import Checkpoints, optimizer_factory

__all__ = ["Checkpoints", "optimizer_factory"]
