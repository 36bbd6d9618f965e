"""Computes the metrics of a step and the alerts that these metrics raise, and passes both to every
sink."""
