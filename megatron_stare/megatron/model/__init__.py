"""Defines the policy model: attention, norms, activations, the output head and routing replay."""
