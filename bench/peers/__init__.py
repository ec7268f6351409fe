"""The contenders of bench/step_vs_peers.py: one worker per system, and what the driver needs to run and report them."""
