"""Helpers for scripts that use the trainers of transformers and TRL. Importing this module imports transformers.

A further helper, for `from_pretrained`, is infinity.InfinityConfig.
"""

from infinity.integrations.plug_points import Checkpoints, optimizer_factory

__all__ = ["Checkpoints", "optimizer_factory"]
