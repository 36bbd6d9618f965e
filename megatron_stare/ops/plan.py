"""Splits a rollout batch into micro-batches with a bounded number of tokens, and balances the work
over the data-parallel ranks.

The plan is made once per rollout batch. The plan depends only on the samples' lengths and, with
mini-batches, on the samples' prompt groups. The log-prob pass and the training pass use the same
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import MicroBatchPlan


@dataclass(frozen=True)
class PlanRules:
    """Rules of a micro-batch plan.

    `data_parallel`: number of data-parallel ranks. Each data-parallel rank takes different samples.
    `budget`: largest number of tokens in a micro-batch, including padding.
    `packed`: if True, the sequences of a micro-batch are concatenated. If `packed` is False, each
        sequence is right-padded to the length of the micro-batch's longest sequence.
    `multiple`: a number that divides every rank's number of micro-batches. For virtual pipelines,
        `multiple` is the number of pipeline stages.
    `each`: number of tokens. Every sequence is padded to a length that is a multiple of `each`. For
        context parallelism, `each` is twice the number of context-parallel ranks.
    `cost`: function that maps the number of tokens in a sequence to the work for this sequence
        (ModelFamily.cost). By default, the work for a sequence is its number of tokens.
    `mini_batch_prompts`: number of prompt groups in the mini-batch of an optimizer step, or None
        for all prompt groups of the rollout batch.
    """

    data_parallel: int
    budget: int
    packed: bool
    multiple: int = 1
    each: int = 1
    cost: Callable[[int], float] = float
    mini_batch_prompts: int | None = None


def plan_micro_batches(lengths: Sequence[int], rules: PlanRules) -> MicroBatchPlan:
    """Returns the plan of one batch. Equal arguments give equal plans.

    Samples are assigned longest first. Each sample goes to the rank with the least work so far.
    Each rank then fills micro-batches. Empty micro-batches are then added until all ranks have the
    same number of micro-batches, which is a multiple of rules.multiple. The loss of an empty
    micro-batch has coefficient 0.

    Args:
        lengths: number of tokens of every sample, including the prompt.

    Raises:
        ConfigError: a sample is longer than the budget.
    """
    lengths = [length + -length % rules.each for length in lengths]
    longest = max(lengths, default=0)
    if longest > rules.budget:
        padded = f", padded to a multiple of {rules.each}" if rules.each > 1 else ""
        raise ConfigError(
            f"the longest sample has {longest} tokens{padded}, the budget of a micro-batch is"
            f" {rules.budget}",
            where="batch.micro_batch_tokens",
            fix=f"set it to at least {longest}",
        )
    shares: list[list[int]] = [[] for _ in range(rules.data_parallel)]
    work = [0.0] * rules.data_parallel
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = work.index(min(work))
        shares[rank].append(sample)
        work[rank] += rules.cost(lengths[sample])
    fill = _fill_packed if rules.packed else _fill_padded
    ranks = [fill(share, lengths, rules.budget) for share in shares]
    most = max(1, max(len(micro_batches) for micro_batches in ranks))
    most += -most % rules.multiple
    return MicroBatchPlan(tuple(tuple(r) + ((),) * (most - len(r)) for r in ranks))


def plan_mini_batches(
    lengths: Sequence[int], groups: Sequence[int], rules: PlanRules
) -> MicroBatchPlan:
    """Returns one plan for a rollout batch with several optimizer steps. The batch is split into
    mini-batches, one for each optimizer step. All samples of a micro-batch belong to the same
    mini-batch.

    Args:
        lengths: number of tokens of every sample, including the prompt.
        groups: number of every sample's prompt group, from 0 without gaps. Consecutive groups form
            a mini-batch.

    Raises:
        ConfigError: a sample is longer than the budget.
    """
    prompts = rules.mini_batch_prompts or max(groups) + 1
    mini_batch = [group // prompts for group in groups]
    ranks: list[tuple[tuple[int, ...], ...]] = [()] * rules.data_parallel
    sizes = []
    for number in range(max(mini_batch) + 1):
        samples = [sample for sample, of in enumerate(mini_batch) if of == number]
        plan = plan_micro_batches([lengths[sample] for sample in samples], rules)
        sizes.append(plan.micro_batches)
        for rank, micro_batches in enumerate(plan.ranks):
            ranks[rank] += tuple(
                tuple(samples[i] for i in micro_batch) for micro_batch in micro_batches
            )
    return MicroBatchPlan(tuple(ranks), tuple(sizes))


def _fill_padded(samples: list[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Fills padded micro-batches. The samples are sorted from the longest to the shortest, so the
    first sample of a micro-batch determines the padded length."""
    micro_batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for sample in samples:
        if current and lengths[current[0]] * (len(current) + 1) > budget:
            micro_batches.append(tuple(sorted(current)))
            current = []
        current.append(sample)
    return [*micro_batches, tuple(sorted(current))] if current else micro_batches


def _fill_packed(samples: list[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Fills packed micro-batches. The samples are sorted from the longest to the shortest, and each
    sample goes into the first micro-batch with enough room. The number of micro-batches is at most
    11/9 n + 6/9, where n is the smallest number of micro-batches that can hold the samples."""
    micro_batches: list[list[int]] = []
    # free tokens of the micro-batches that can still hold the shortest sample
    room: dict[int, int] = {}
    shortest = lengths[samples[-1]] if samples else 0
    for sample in samples:
        fits = next((i for i, free in room.items() if free >= lengths[sample]), None)
        if fits is None:
            fits = len(micro_batches)
            micro_batches.append([])
            room[fits] = budget
        micro_batches[fits].append(sample)
        room[fits] -= lengths[sample]
        if room[fits] < shortest:
            del room[fits]
    return [tuple(sorted(micro_batch)) for micro_batch in micro_batches]
