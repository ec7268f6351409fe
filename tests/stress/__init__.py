"""Short runs with everything that may go wrong at random: a device that answers late and in any order, exceptions,
Ctrl-C at any line, failed transfers, loops that do not what was expected. See test_stress.py."""
