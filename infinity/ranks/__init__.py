"""Several ranks: their identity, the order of their collectives, and errors that reach all of them.

This package deals with bytes, tensors and ranks. The package does not know units or optimizers.
"""
