"""What a script of transformers' and TRL's trainers gives them, beside infinity.InfinityConfig for `from_pretrained`.
Importing this module imports transformers."""

from infinity.integrations.plug_points import Checkpoints, optimizer_factory

__all__ = ["Checkpoints", "optimizer_factory"]
