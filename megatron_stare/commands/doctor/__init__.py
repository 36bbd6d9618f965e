"""Reports what a machine or cluster lacks for a run, with a remedy for each finding
(`megatron-stare doctor`).

`facts.py` and `node_probe.py` collect facts. The checks in `checks_*.py` mostly evaluate these
facts. `examine.py` runs the collection and the checks.
"""
