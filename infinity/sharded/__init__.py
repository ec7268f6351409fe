"""What several ranks change of a model: shared homes, gradients of all ranks, agreed fetches, generations of all."""
