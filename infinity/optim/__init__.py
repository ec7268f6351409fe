"""The optimizer: a real torch.optim.Optimizer whose states are in the store."""
