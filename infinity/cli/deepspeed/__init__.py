"""`infinity convert`: conversion of a DeepSpeed config to a swap config. keys.py has the treatment of every key."""
