"""The connection to other libraries: the changes that `infinity run` makes for a script, and the classes that a script
can use itself.
"""
