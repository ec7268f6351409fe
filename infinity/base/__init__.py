"""What every layer may use: Ctrl-C between transitions, and the clock of a run."""
