"""Evaluates the responses to held-out problems. Computes pass@k, maj@k and intervals, and makes the
record of an evaluation."""
