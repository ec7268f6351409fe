"""Models in and out: streamed from safetensors to the store, and back."""
