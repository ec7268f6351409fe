"""Parts of `make gpu-check` and `make gpu-bundle`: the stages, the runner of each stage's process, and the bundle."""
