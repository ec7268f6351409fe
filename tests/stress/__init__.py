"""Short runs with random faults: late and unordered devices, exceptions, Ctrl-C, failed transfers, unusual loops.

Ctrl-C may be at any line. See test_stress.py.
"""
