"""The policy model: attention, norms, activations, the output head, routing replay."""
