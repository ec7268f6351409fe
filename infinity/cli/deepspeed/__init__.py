"""`infinity convert`: DeepSpeed's config as a swap config. keys.py says what becomes of every key."""
