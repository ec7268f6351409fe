"""Parts of `make gpu-check` and `make gpu-bundle`: the stages, the process around each stage, the bundle."""
