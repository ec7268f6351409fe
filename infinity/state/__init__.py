"""Layout of a unit: its groups, the places of its parameters, and the forms that its states have."""
