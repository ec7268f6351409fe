"""What a unit is: its groups, the places of its parameters, and what is recorded of it."""
