"""Helpers for scripts that use the trainers of transformers and TRL. Importing this module imports transformers.

infinity.InfinityConfig, for `from_pretrained`, is the third of these helpers.
"""

from infinity.integrations.plug_points import Checkpoints, optimizer_factory

__all__ = ["Checkpoints", "optimizer_factory"]
