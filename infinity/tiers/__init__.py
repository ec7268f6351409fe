"""Where bytes rest and how they move: homes in RAM or the store, device slots, the window of spilled gradients."""
