"""Running an offloaded model: hooks on forward and backward, what autograd saves, and the guards around it."""
