"""Reports what a machine or cluster lacks for a run, with a remedy for each finding
(`megatron-stare doctor`).

`facts.py` and `node_probe.py` collect facts. Most checks in `checks_*.py` evaluate these facts.
`examine.py` runs the collection and the checks.
"""
