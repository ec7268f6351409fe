"""Optimizers: subclasses of torch.optim.Optimizer whose states are kept in the store."""
