"""The methods, one small file each: pure tensor maths that knows nothing of ranks.

A method names the whole-batch statistics it needs and, given their values, computes its loss token by token
(`method.py` is the contract). A user's own is named in YAML by its dotted path.
"""

METHODS = {
    "grpo": "megatron_stare.algorithms.grpo.Grpo",
    "stare": "megatron_stare.algorithms.stare.Stare",
}
