"""`infinity doctor`: whether this machine is ready, what is missing, and the command that mends it."""
