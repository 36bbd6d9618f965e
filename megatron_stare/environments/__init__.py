"""Environments: everything between a prompt and the end of its response, in one turn or several.

A user's own environment is one file, named in YAML by its dotted path (`rollout.environment`).
"""

ENVIRONMENTS = {
    "single_turn": "megatron_stare.environments.single_turn.SingleTurn",
    "tools": "megatron_stare.environments.tools.Tools",
}
