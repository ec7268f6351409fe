"""Planning: the machine's resources, the sizes of the states, and the plan that says where each state is kept."""
