"""`infinity-bench`: measurement of the disks, the recommended settings, and their effect on a training step."""
