"""Deciding where states rest and lie: what the machine has, what the states take, and the plan that comes of it."""
