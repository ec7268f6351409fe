"""Planning of where states rest: the machine's resources, the bytes of the states, and the plan made from both."""
