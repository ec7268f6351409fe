"""`infinity doctor`: checks of this machine, with a command that repairs each problem where there is one."""
