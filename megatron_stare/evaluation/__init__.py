"""Evaluates a policy on held-out problems. Computes pass@k, maj@k and confidence intervals from the
policy's responses, and builds the record of an evaluation."""
