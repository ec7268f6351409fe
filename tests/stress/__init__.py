"""Short runs with random faults: late and unordered devices, exceptions, Ctrl-C, failed transfers, unusual loops.

Ctrl-C may come at any line of infinity's code. See test_stress.py.
"""
