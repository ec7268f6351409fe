"""One offloaded model: all that hooks and optimizers call."""
