"""`infinity doctor`: checks of this machine. If a command can repair a problem, the report shows the command."""
