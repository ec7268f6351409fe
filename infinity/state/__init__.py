"""Layout of a unit: its groups, the places of its parameters, and the formats of its states."""
