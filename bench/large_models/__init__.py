"""Training of models that are larger than memory: checkpoints made shard by shard, and runs under a memory limit."""
