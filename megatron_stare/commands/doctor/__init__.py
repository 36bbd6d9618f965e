"""Reports what a machine or cluster lacks for a run, with a remedy for each finding
(`megatron-stare doctor`).

`facts.py` and `node_probe.py` collect facts about machines. Most checks in `checks_*.py` evaluate
the collected facts. `examine.py` collects the facts and runs the checks.
"""
