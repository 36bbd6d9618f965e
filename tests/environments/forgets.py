"""Example of docs/environments.md: the policy answers again and remembers the end of its first
answer alone."""

from megatron_stare.environments.environment import Environment, Response


class Forgets(Environment):
    """Two turns in two branches: the second follows the prompt and the first turn's last tokens."""

    @classmethod
    def branches(cls, settings):
        return True

    async def run(self, prompt, generate):
        response = Response(prompt)
        first = response.sampled(
            await generate(response.context, max_new_tokens=self.config.rollout.max_new_tokens // 2)
        )
        kept = first.tokens[-4:].tolist()
        response.begin_branch((*prompt.token_ids, *kept), text=" ... ")
        response.sampled(await generate(response.context, branch=response.branch))
        return response.trajectory()
