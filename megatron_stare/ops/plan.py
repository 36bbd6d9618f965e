"""Cuts a rollout batch into micro-batches: at most a budget of tokens each, balanced over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stare.batch import MicroBatchPlan
from megatron_stare.errors import ConfigError


def plan_micro_batches(lengths: Sequence[int], dp: int, budget: int) -> MicroBatchPlan:
    """The plan of one batch of right-padded micro-batches. Deterministic in its arguments.

    Samples are dealt to ranks in order of length, back and forth, so that ranks get equal work; each rank then fills
    micro-batches of similar lengths up to `budget` tokens, padding included. Ranks with fewer get empty ones.

    Args:
        lengths: tokens of every sample, prompt included.
        dp: data-parallel ranks.
        budget: tokens a micro-batch may hold, padding included.

    Raises:
        ConfigError: a sample is longer than the budget.
    """
    longest = max(lengths, default=0)
    if longest > budget:
        raise ConfigError(
            f"the longest sample has {longest} tokens, the budget of a micro-batch is {budget}",
            where="batch.micro_batch_tokens",
            fix=f"set it to at least {longest}",
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(dp)]
    for turn, sample in enumerate(order):
        lap, seat = divmod(turn, dp)
        shares[seat if lap % 2 == 0 else dp - 1 - seat].append(sample)
    ranks = [_fill(share, lengths, budget) for share in shares]
    most = max(len(micro_batches) for micro_batches in ranks)
    return MicroBatchPlan(tuple(tuple(r) + ((),) * (most - len(r)) for r in ranks))


def _fill(samples: list[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Samples come longest first, so the first of a micro-batch sets its padded length."""
    micro_batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for sample in samples:
        if current and lengths[current[0]] * (len(current) + 1) > budget:
            micro_batches.append(tuple(sorted(current)))
            current = []
        current.append(sample)
    return [*micro_batches, tuple(sorted(current))] if current else micro_batches
