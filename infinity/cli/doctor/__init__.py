"""`infinity doctor`: checks of this machine, each problem with the command that repairs it, if there is one."""
