"""An environment that kills its process at a prompt, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megatron_stare.environments.environment import Generate
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory


class Deadly(SingleTurn):
    """The file that KILL_AT names holds the prompt's cursor; it is gone afterwards."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        order = Path(os.environ["KILL_AT"])
        if order.exists() and prompt.cursor >= int(order.read_text()):
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(prompt, generate)
