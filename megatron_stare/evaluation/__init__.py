"""Evaluates the responses to held-out problems. Computes pass@k, maj@k and confidence intervals,
and builds the record of an evaluation."""
