"""Several ranks: who they are, the order of their collectives, and errors that reach all of them. Knows bytes, tensors
and ranks, and nothing of units or optimizers."""
