"""An environment that acts at random, and notes under which context every turn was sampled."""

import json
import os
import random

from megatron_stare.environments.environment import Environment, Response


class Wanders(Environment):
    """Up to five turns of random limits and stop strings, with words, branches or nothing between
    them. Its choices follow from the prompt and from what was sampled."""

    @classmethod
    def branches(cls, settings):
        return True

    async def run(self, prompt, generate):
        drawn = random.Random(prompt.cursor)
        response, turns = Response(prompt), []
        words = self.tokenizer("0+1=2;", add_special_tokens=False).input_ids
        for _ in range(drawn.randint(1, 5)):
            context = response.context
            turn = response.sampled(
                await generate(
                    context,
                    max_new_tokens=drawn.choice([1, 3, 6, 9]),
                    stop=drawn.choice([(), ("1",), ("+", "22")]),
                    branch=response.branch,
                )
            )
            turns.append([list(context), turn.tokens.tolist()])
            between = drawn.choice(["words", "branch", "nothing"])
            if between == "words":
                response.observed(drawn.choices(words, k=drawn.randint(1, 4)))
            elif between == "branch":
                kept = [token for token in context if drawn.random() < 0.5][:12]
                response.begin_branch([*prompt.token_ids, *kept])
        line = json.dumps({"cursor": prompt.cursor, "turns": turns})
        with open(os.environ["EPISODES"], "a") as log:
            log.write(line + "\n")
        return response.trajectory()
