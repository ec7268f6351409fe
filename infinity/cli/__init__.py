"""The command line `infinity`."""
