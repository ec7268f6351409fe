"""`infinity-bench`: what the disks can do, which settings to use, and what that means for a training step."""
