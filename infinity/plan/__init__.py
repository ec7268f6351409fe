"""Deciding where states live: what the machine has, what the formulas say."""
