"""Models larger than the memory they are trained in: checkpoints made shard by shard, runs under a memory limit."""
