"""State that still exists after the process has ended: commits, tracked objects of the training loop, and states of
random number generators."""
