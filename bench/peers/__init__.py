"""Contenders of bench/step_vs_peers.py: one worker per system, and the driver's code that runs the workers and reports
their measurements."""
