"""Example of docs/environments.md: the policy answers, is told to go on, and answers again."""

from megatron_stare.environments.environment import Environment, Response


class CheckAgain(Environment):
    """Two turns, with a few tokens said in between, on which the policy is not trained."""

    async def run(self, prompt, generate):
        response = Response(prompt)
        response.sampled(
            await generate(prompt.token_ids, max_new_tokens=self.config.rollout.max_new_tokens // 2)
        )
        said = self.tokenizer(";0+", add_special_tokens=False).input_ids
        response.observed(said, text=";0+")
        response.sampled(await generate(response.context))
        return response.trajectory()
