"""Support for several ranks: gathered weights, gradients of all ranks, agreed fetches, and generations of all ranks."""
