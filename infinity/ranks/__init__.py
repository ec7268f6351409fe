"""Several ranks: their identity, the order of their collectives, and errors that all ranks raise.

This package knows bytes, tensors and ranks, but no units and no optimizers.
"""
