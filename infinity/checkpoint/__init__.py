"""Loading and saving of models: tensors are streamed from safetensors files to the store, and back."""
