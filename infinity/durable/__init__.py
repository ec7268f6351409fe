"""What survives the process: commits, the tracked objects of a training loop, its random numbers."""
