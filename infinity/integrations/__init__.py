"""infinity at home in other libraries: what `infinity run` does to a script, and what a script can use itself."""
