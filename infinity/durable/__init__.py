"""State that survives the process: commits, tracked objects of the training loop and RNG states."""
