"""One offloaded model: the interface for hooks, optimizers and use-cases."""
