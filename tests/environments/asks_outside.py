"""An environment with a tool outside of the run: each call is a line of the file that TOOL_LOG
names. The tool kills the process that asks it, once, where the file that KILL_IN names holds the
prompt's cursor."""

import json
import os
import signal
from pathlib import Path

from megatron_stare.environments.environment import Environment, Response


class AsksOutside(Environment):
    """Two turns, between which a tool is asked that never answers twice the same."""

    idempotent = False

    async def run(self, prompt, generate):
        response = Response(prompt)
        first = response.sampled(
            await generate(prompt.token_ids, max_new_tokens=self.config.rollout.max_new_tokens // 2)
        )
        said = await generate.call(
            self.tool, [prompt.cursor, first.text], idempotent=self.idempotent
        )
        response.observed(self.tokenizer(said, add_special_tokens=False).input_ids, text=said)
        response.sampled(await generate(response.context))
        return response.trajectory()

    async def tool(self, request, call):
        log = Path(os.environ["TOOL_LOG"])
        with log.open("a") as out:
            out.write(json.dumps([call, *request]) + "\n")
        order = Path(os.environ["KILL_IN"])
        if order.exists() and request[0] >= int(order.read_text()):
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return f";{len(log.read_text().splitlines()) % 10}+"  # the next answer is another


class AsksIdempotently(AsksOutside):
    idempotent = True
