"""Token batches for tests, with every field a method may read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import Method
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics

STEP = 7


def token_batch(
    rewards: list[float],
    *,
    method: Method | None = None,
    group_size: int = 4,
    longest: int = 12,
    seed: int = 0,
    lengths: list[int] | None = None,
    off_policy: float = 0.3,
) -> TokenBatch:
    """Responses with these rewards, `group_size` a prompt, with advantages of `method`; log_prob
    carries gradient."""
    generator = torch.Generator().manual_seed(seed)
    number = len(rewards)
    scored = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.arange(number) // group_size
    if lengths is None:
        lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
    counts = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(number), counts)
    tokens = len(sequence)
    position = torch.arange(tokens) - (counts.cumsum(0) - counts)[sequence]

    def noise() -> Tensor:
        return torch.rand(tokens, generator=generator)

    old = -8 * noise() ** 3
    counted = torch.ones(number, dtype=torch.bool)
    advantages = (
        torch.zeros(number)
        if method is None
        else method.advantages(scored, groups, counted).float()
    )
    return TokenBatch(
        log_prob=(old + off_policy * (noise() - 0.5)).requires_grad_(),
        old_log_prob=old,
        rollout_log_prob=old + 0.5 * (noise() - 0.5),
        entropy=2 * noise(),
        advantage=advantages[sequence],
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        sequence=sequence,
        position=position,
        index=torch.arange(tokens),
        num_sequences=number,
        current_entropy=2 * noise(),
        sequence_lengths=counts,
        reference_log_prob=old + noise() - 0.5,
        sum_p2=(sum_p2 := noise()),
        sum_p2_log_p=-sum_p2 * noise(),
        groups=groups,
        rewards=scored,
        num_groups=int(groups.max()) + 1,
        max_length=int(counts.max()) if number else 0,
        step=STEP,
    )


def ask(method: Method, batch: TokenBatch) -> Statistics:
    return gather_statistics(lambda known: method.requests(batch, known), None)


def state_of(method: Method, statistics: Statistics | None = None) -> dict[str, Tensor]:
    state = {
        name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
    }
    return state if statistics is None else method.control(state, statistics)


def loss_and_gradient(
    method: Method, batch: TokenBatch, parts: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The training loss and its gradient in log_prob [N], summed over micro-batches (`parts`: rows
    of each)."""
    statistics = ask(method, batch)
    state = state_of(method, statistics)
    leaf = batch.log_prob.detach().clone().requires_grad_()
    total = torch.zeros(())
    for rows in [torch.arange(len(leaf))] if parts is None else parts:
        micro = replace(batch, log_prob=leaf).select(rows)
        scale = method.coefficients(micro, statistics)
        loss = method.token_loss(micro, statistics, state).loss
        total = total + torch.where(scale > 0, scale * loss, 0.0).sum()
    gradient = (
        torch.autograd.grad(total, leaf, allow_unused=True)[0] if total.requires_grad else None
    )
    return total.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def by_sequence(batch: TokenBatch) -> list[Tensor]:
    """Rows of micro-batches of one response each, the last first."""
    return [
        (batch.sequence == i).nonzero().squeeze(1) for i in reversed(range(batch.num_sequences))
    ]


def softmax_batch(
    rewards: list[float], *, length: int = 8, vocabulary: int = 5
) -> tuple[Tensor, TokenBatch]:
    """Logits [N, vocabulary] of tokens that have a distribution each, and the batch sampled from
    them."""
    generator = torch.Generator().manual_seed(3)
    batch = token_batch(rewards, method=Grpo(), lengths=[length] * len(rewards))
    logits = 1.5 * torch.randn(
        len(batch.index), vocabulary, generator=generator, dtype=torch.float64
    )
    log_p = logits.log_softmax(-1)
    drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
    batch.old_log_prob = log_p.gather(-1, drawn)[:, 0]
    batch.entropy = -(log_p.exp() * log_p).sum(-1)
    batch.sum_p2 = (2 * log_p).exp().sum(-1)
    batch.sum_p2_log_p = ((2 * log_p).exp() * log_p).sum(-1)
    batch.advantage = batch.advantage.double()
    leaf = logits.clone().requires_grad_()
    batch.log_prob = leaf.log_softmax(-1).gather(-1, drawn)[:, 0]
    return leaf, batch
