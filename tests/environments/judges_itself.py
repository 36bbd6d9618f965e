"""An environment that gives the rewards itself: 1 for a response whose number of
tokens is a multiple of 3."""

from pathlib import Path

from megatron_stare.environments.environment import Environment, Response


class JudgesItself(Environment):
    """One turn.

    Args:
        failing: prompts whose cursor is a multiple of this number get no reward; 0: none.
    """

    judges = True

    def __init__(self, config, tokenizer, *, failing: int = 0) -> None:
        super().__init__(config, tokenizer)
        self._failing = failing

    async def run(self, prompt, generate):
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids))
        made = response.trajectory()
        if self._failing and prompt.cursor % self._failing == 0:
            made.reward_status, made.verdict_detail = "crash", "the world ended"
        else:
            made.reward, made.reward_status = float(len(made) % 3 == 0), "ok"
        return made

    def close(self) -> None:
        Path("closed").touch()
