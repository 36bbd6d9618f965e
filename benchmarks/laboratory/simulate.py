"""Trains tabular policies in the worlds of worlds.py, all seeds at once.

A step samples G responses to each prompt from the policy, computes group advantages, and makes one
or several updates by plain gradient ascent on the method's objective. The learning rate is in
logits: with advantage 1 on every token, one update moves the logits of a state that all responses
of a prompt visit by `lr` times the mean of (one_hot(action) - p) over these responses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor
from twins import Tokens, Twin, group_advantages
from worlds import World, evaluate, first_state

from megatron_stare.algorithms.sensitivity import critical_surprisal, second_moment, sensitivity


@dataclass(frozen=True)
class Settings:
    """Settings of a training.

    group: G, responses to a prompt.
    updates: updates of a step, each on its own share of the prompts; from the second on the policy
        is no longer the one that sampled, so clips act.
    every: steps between two exact evaluations.
    """

    steps: int = 400
    group: int = 8
    lr: float = 0.5
    updates: int = 1
    every: int = 20
    seed: int = 0


@dataclass(frozen=True)
class History:
    """Exact values over the training, [E, K] at the steps `at`; before the first step at 0.

    gate: [E, K] share of the steps since the evaluation before in which a gate was open; NaN for
        methods without a gate.
    logits: [K, P, V, A] of the trained policy.
    """

    at: list[int]
    entropy: Tensor
    reward: Tensor
    pass_at: dict[int, Tensor]
    gate: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Sample:
    """A step's responses. N = P G T tokens, response by response.

    state, action: [K, N] int64; `state` counts over all prompts' states.
    old_log_prob, entropy, advantage: [K, N].
    phi: [K, N], or None if it was not asked for.
    log_p: [K, N, A] log-probs of all actions at the tokens' states.
    """

    state: Tensor
    action: Tensor
    old_log_prob: Tensor
    entropy: Tensor
    advantage: Tensor
    log_p: Tensor
    phi: Tensor | None = None

    def of_prompts(self, first: int, last: int, each: int) -> Sample:
        """Returns the tokens of some prompts, of `each` tokens a prompt."""
        rows = slice(first * each, last * each)
        columns = (getattr(self, each.name) for each in fields(self))
        return Sample(*(None if column is None else column[:, rows] for column in columns))


def sample(
    world: World,
    logits: Tensor,
    step: int,
    group: int,
    generator: torch.Generator,
    *,
    with_phi: bool = False,
) -> Sample:
    """Samples G responses to every prompt of every seed."""
    seeds, prompts, states, actions = logits.shape
    offset = (torch.arange(prompts) * states)[None, :, None]
    prefix = torch.zeros((seeds, prompts, group), dtype=torch.int64)
    columns: list[tuple[Tensor, ...]] = []
    log_p: list[Tensor] = []
    for level in range(world.depth):
        state = (offset + first_state(actions, level) + prefix).flatten(1)
        here = log_softmax_at(logits, state)
        p = here.exp()
        drawn = torch.rand(state.shape, generator=generator, dtype=torch.float64)
        action = (p.cumsum(-1) < drawn[..., None]).sum(-1).clamp_max(actions - 1)
        log_prob = here.gather(-1, action[..., None])[..., 0]
        column = [state, action, log_prob, entropy := -(p * here).sum(-1)]
        if with_phi:
            s2 = second_moment((p * p).sum(-1), (p * p * here).sum(-1), entropy)
            column.append(sensitivity(log_prob, entropy, s2))
        columns.append(tuple(column))
        log_p.append(here)
        prefix = prefix * actions + action.view_as(prefix)
    rewards = world.rewards_at(step).gather(-1, prefix)
    advantage = group_advantages(rewards).flatten(1)
    stacked = [torch.stack(each, -1).flatten(1) for each in zip(*columns, strict=True)]
    advantage = advantage.repeat_interleave(world.depth, -1)
    return Sample(*stacked[:4], advantage, torch.stack(log_p, 2).flatten(1, 2), *(stacked[4:]))


def gradient(
    world: World,
    logits: Tensor,
    batch: Sample,
    twin: Twin,
    state: dict[str, Tensor],
    *,
    moved: bool = True,
) -> Tensor:
    """[K, P, V, A] gradient of the method's objective on a mini-batch, before coupling. `moved` may
    be False if `logits` are those of the policy that sampled."""
    actions = logits.shape[-1]
    here = log_softmax_at(logits, batch.state) if moved else batch.log_p
    log_prob = here.gather(-1, batch.action[..., None])[..., 0]
    p = here.exp()
    critical = None
    if twin.needs_critical:
        # of the policy that is updated; with one update a step it is the one that sampled
        entropy = -(p * here).sum(-1)
        s2 = second_moment((p * p).sum(-1), (p * p * here).sum(-1), entropy)
        critical = critical_surprisal(entropy, s2)
    tokens = Tokens(
        log_prob, batch.old_log_prob, batch.entropy, batch.advantage, critical, batch.phi
    )
    slope = twin.slope(tokens, state)
    rows = -slope[..., None] * p
    # as scatter_add_ along the actions, which takes 20 times as long
    places = torch.arange(slope.numel()) * actions + batch.action.flatten()
    rows.view(-1).index_add_(0, places, slope.flatten())
    if (factor := twin.bonus(state)) is not None:
        entropy = -(p * here).sum(-1, keepdim=True)
        # the entropy's gradient in the logits is -p (ln p + H)
        rows -= factor[:, None, None] / batch.state.shape[1] * p * (here + entropy)
    total = torch.zeros_like(logits)
    flat = rows_of(logits, batch.state).flatten()
    total.view(-1, actions).index_add_(0, flat, rows.view(-1, actions))
    return total


def rows_of(logits: Tensor, state: Tensor) -> Tensor:
    """[K, N] row of each token's state in the table `logits` with all seeds' states below each
    other."""
    seeds, prompts, states, _ = logits.shape
    return torch.arange(seeds)[:, None] * (prompts * states) + state


def log_softmax_at(logits: Tensor, state: Tensor) -> Tensor:
    """[K, N, A] log-probs at the tokens' states."""
    table = logits.view(-1, logits.shape[-1])
    return torch.log_softmax(table[rows_of(logits, state)], -1)


def coupled(gradients: Tensor, coupling: float) -> Tensor:
    """Replaces, in place, a share of each prompt's gradient by the mean of all prompts' at the same
    prefix."""
    mean = gradients.mean(1, keepdim=True)
    return gradients.mul_(1 - coupling).add_(mean.mul_(coupling))


def train(world: World, twin: Twin, settings: Settings) -> History:
    """Trains all seeds of a world by one method."""
    logits = world.logits.clone()
    seeds, prompts = logits.shape[:2]
    generator = torch.Generator().manual_seed(settings.seed)
    state = twin.start(seeds)
    each = settings.group * world.depth  # tokens of a prompt
    bounds = [prompts * i // settings.updates for i in range(settings.updates + 1)]
    at, found, gates = [0], [evaluate(world, logits, 0)], [torch.full((seeds,), torch.nan)]
    opened = torch.zeros(seeds, dtype=torch.float64)
    for step in range(settings.steps):
        batch = sample(world, logits, step, settings.group, generator, with_phi=twin.needs_phi)
        state = twin.control(state, batch.entropy.mean(-1))
        opened += state.get("gate", opened * torch.nan)
        for first, last in pairwise(bounds):
            part = batch.of_prompts(first, last, each)
            # an update's objective is a mean over its tokens: of (last - first) T of them a state
            # that all responses of a prompt visit has one
            scale = settings.lr * (last - first) * world.depth
            slope = gradient(world, logits, part, twin, state, moved=first > 0)
            logits += coupled(slope, world.coupling).mul_(scale)
        if (step + 1) % settings.every == 0:
            at.append(step + 1)
            found.append(evaluate(world, logits, step))
            gates.append(opened / settings.every)
            opened = torch.zeros_like(opened)
    return History(
        at,
        torch.stack([each.entropy for each in found]),
        torch.stack([each.reward for each in found]),
        {k: torch.stack([each.pass_at[k] for each in found]) for k in found[0].pass_at},
        torch.stack(gates),
        logits,
    )
