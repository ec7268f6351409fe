"""Offloaded units (their weights, updates and gradients), and the order in which units are fetched, evicted and
updated."""
