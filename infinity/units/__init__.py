"""One offloaded unit (weights, update, gradients), and the order in which units are fetched, evicted and updated."""
