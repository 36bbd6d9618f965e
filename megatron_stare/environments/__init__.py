"""Environments. An environment controls everything between a prompt and the end of its response, in
one or several turns.

A user can define an environment in one file. The setting `rollout.environment` names the class of
the environment by dotted path.
"""

ENVIRONMENTS = {
    "single_turn": "megatron_stare.environments.single_turn.SingleTurn",
    "tools": "megatron_stare.environments.tools.Tools",
    "verifiers": "megatron_stare.environments.verifiers_library.Verifiers",
}
