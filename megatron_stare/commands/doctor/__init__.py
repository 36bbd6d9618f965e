"""`megatron-stare doctor`: what a machine or a cluster lacks for a run, each finding with its mend.

`facts.py` and `node_probe.py` look, `checks_*.py` judge what was seen and touch nothing,
`examine.py` brings them together.
"""
