"""One offloaded unit and its surroundings: weights, update and gradients; prefetch, eviction and the order of both."""
