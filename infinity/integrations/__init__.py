"""The connection to other libraries: replacements that `infinity run` makes, and classes that scripts can use."""
