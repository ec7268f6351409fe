"""What `make gpu-check` and `make gpu-bundle` are made of: the stages, the process around each, the bundle."""
