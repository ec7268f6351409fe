"""The optimizers: real subclasses of torch.optim.Optimizer whose states are in the store."""
