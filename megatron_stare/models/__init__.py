"""What one has to know of a model: its shape, and how its tensors are named and cut."""
