"""Estimates over the responses to held-out problems: pass@k, maj@k, intervals, and the record of an
evaluation."""
