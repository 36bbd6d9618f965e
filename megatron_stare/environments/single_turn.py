"""Defines the environment in which the policy answers a prompt in one turn."""

from __future__ import annotations

from megatron_stare.environments.environment import Environment, Generate, Response
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory


class SingleTurn(Environment):
    """Environment in which a response is one turn of the policy, without tokens of the
    environment."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids))
        return response.trajectory()
