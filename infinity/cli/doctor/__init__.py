"""`infinity doctor`: checks of this machine, with a report.

If a shell command can repair a problem, the report shows the command.
"""
