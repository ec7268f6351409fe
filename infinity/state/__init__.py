"""What there is to place: units and their layout, and the plan that places them."""
