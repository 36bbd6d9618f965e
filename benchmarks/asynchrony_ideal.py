"""Simulates the best that asynchrony.py's servers could do: the same responses, slots and times,
nothing in between.

The clock ticks every 2 ms. Responses are begun in the order of steps, by the server with the fewest
under way, and stand still while weights are swapped. Servers generate less than all of the time
only because they wait for a step's last responses, which no order of a bounded number of steps can
fill.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

TICK = 0.002  # seconds


@dataclass(frozen=True)
class Servers:
    """How much they have to do, and with what."""

    replicas: int
    slots: int
    prompts: int  # a step
    samples: int  # a prompt
    median: float  # tokens of a response
    longest: int
    token_s: float

    def wanted(self, request: str) -> int:
        """Tokens of a response, by its prompt's cursor and sample: 'cursor:sample'. The same in
        every run."""
        length = random.Random(request).lognormvariate(math.log(self.median), 1.0)
        return min(self.longest, max(1, round(length)))

    def seconds(self, step: int) -> list[float]:
        """Seconds of every response of a step, in the order in which the responses are asked
        for."""
        cursors = range((step - 1) * self.prompts, step * self.prompts)
        return [
            self.wanted(f"{cursor}:{sample}") * self.token_s
            for cursor in cursors
            for sample in range(self.samples)
        ]


def ideal(
    servers: Servers, steps: int, bound: int | None, training_s: float, sync_s: float
) -> dict[str, float]:
    """Steps a second and the share of time in which servers generate. bound: of staleness; None:
    synchronous."""
    waiting: deque[tuple[int, float]] = deque()
    # [step, seconds left] of each response
    active: list[list[list[float]]] = [[] for _ in range(servers.replicas)]
    left = dict.fromkeys(range(1, steps + 1), servers.prompts * servers.samples)
    sampled, published, busy, now = 0, 0, 0.0, 0.0
    step, phase, until = 1, "sampling", math.inf
    while step <= steps:
        # the weights of the step before it, or older ones by the bound
        newest = published + 1 + (bound or 0)
        if bound is None and phase != "sampling":
            newest = sampled
        while sampled < min(newest, steps):
            sampled += 1
            waiting.extend((sampled, seconds) for seconds in servers.seconds(sampled))
        while waiting and len(least := min(active, key=len)) < servers.slots:
            least.append(list(waiting.popleft()))
        now += TICK
        for server in active if phase != "sync" else ():
            busy += TICK * bool(server)
            for response in server:
                response[1] -= TICK
                if response[1] <= 1e-9:
                    left[int(response[0])] -= 1
            server[:] = [response for response in server if response[1] > 1e-9]
        if phase == "sampling" and not left[step]:
            phase, until = "training", now + training_s
        elif phase == "training" and now >= until:
            phase, until = "sync", now + sync_s
        elif phase == "sync" and now >= until:
            phase, published, step = "sampling", published + 1, step + 1
    return {
        "steps_a_second": round(steps / now, 4),
        "generating": round(busy / now / servers.replicas, 4),
    }
