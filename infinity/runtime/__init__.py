"""Running an offloaded model: hooks on forward and backward, tensors that autograd saves, and guards around both."""
