"""Tools for every layer: Ctrl-C between transitions, the device seam, facts about the machine, the clock of a run."""
