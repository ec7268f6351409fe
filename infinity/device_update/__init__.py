"""Updates of states on a device, in torch operations, to the bits of the native kernel (csrc/cpu_adam)."""
