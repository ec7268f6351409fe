"""Tools for every layer: deferral of Ctrl-C, the interface to devices, facts about the machine, the clock of a run."""
