"""Worlds small enough to enumerate: every response is a path through a tree of choices.

A world has P prompts. A response to a prompt makes T choices among A actions, so a prompt has
A^T responses and (A^T - 1) / (A - 1) states, one for each prefix. The policy is a softmax over
logits of its own for each state. A response is right if its reward is 1.

Prompts learn from each other as they do in a network: a share of each prompt's gradient is replaced
by the mean gradient of all prompts at the same prefix (`coupling`). Without that share, a prompt
that is never solved would never change.

Shape legend: K seeds, each a world of its own; P prompts; V states of a prompt; L = A^T responses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class World:
    """K worlds of one kind.

    logits: [K, P, V, A] float64, of the policy before training.
    rewards: [K, P, L] float64 in [0, 1], of every response.
    later: rewards from step `changes_at` on; None: the rewards never change.
    coupling: share of the mean gradient of all prompts in a prompt's own, in [0, 1].
    """

    name: str
    logits: Tensor
    rewards: Tensor
    coupling: float
    later: Tensor | None = None
    changes_at: int = 0

    @property
    def actions(self) -> int:
        return int(self.logits.shape[-1])

    @property
    def depth(self) -> int:
        """T, the number of choices of a response."""
        depth, leaves = 0, 1
        while leaves < self.rewards.shape[-1]:
            depth, leaves = depth + 1, leaves * self.actions
        return depth

    def rewards_at(self, step: int) -> Tensor:
        """Returns the rewards [K, P, L] that a step's responses get. Steps count from 0."""
        return self.rewards if self.later is None or step < self.changes_at else self.later


def first_state(actions: int, level: int) -> int:
    """Returns the number of the first state of a level: states are numbered level by level, and in
    a level by their prefix, read as a number to the base A."""
    return (actions**level - 1) // (actions - 1)


def states(actions: int, depth: int) -> int:
    """Returns V."""
    return first_state(actions, depth)


def _priors(shape: tuple[int, ...], spread: float, generator: torch.Generator) -> Tensor:
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def _solutions(
    seeds: int, prompts: int, leaves: int, share: float, generator: torch.Generator
) -> Tensor:
    """[K, P, L] float64: 1 for a random share of the responses, at least one of each prompt."""
    drawn = torch.rand((seeds, prompts, leaves), generator=generator, dtype=torch.float64)
    right = (drawn < share).double()
    best = drawn.argmin(-1, keepdim=True)
    return right.scatter(-1, best, 1.0)


def bandit(
    seeds: int,
    *,
    prompts: int = 16,
    actions: int = 16,
    hard: float = 0.25,
    coupling: float = 0.5,
    spread: float = 1.0,
    seed: int = 0,
) -> World:
    """One choice. Arm 0 is right for most prompts; for the share `hard` one other arm is right, a
    different one for each prompt."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.zeros((seeds, prompts, actions), dtype=torch.float64)
    rewards[..., 0] = 1.0
    number = round(hard * prompts)
    for k in range(seeds):
        arms = 1 + torch.randperm(actions - 1, generator=generator)[:number]
        rewards[k, :number, 0] = 0.0
        rewards[k, torch.arange(number), arms] = 1.0
    logits = _priors((seeds, prompts, 1, actions), spread, generator)
    return World("bandit", logits, rewards, coupling)


def tree(
    seeds: int,
    *,
    prompts: int = 8,
    actions: int = 8,
    depth: int = 3,
    share: float = 0.02,
    coupling: float = 0.5,
    spread: float = 1.5,
    seed: int = 0,
) -> World:
    """Responses with shared prefixes, of which a random share is right."""
    generator = torch.Generator().manual_seed(seed)
    rewards = _solutions(seeds, prompts, actions**depth, share, generator)
    shape = (seeds, prompts, states(actions, depth), actions)
    return World("tree", _priors(shape, spread, generator), rewards, coupling)


def rare(
    seeds: int,
    *,
    prompts: int = 8,
    actions: int = 8,
    depth: int = 3,
    safe: float = 0.5,
    common: float = 0.3,
    better: float = 0.05,
    rarity: float = 3.0,
    coupling: float = 0.5,
    spread: float = 0.5,
    seed: int = 0,
) -> World:
    """A rare strategy that pays late. Responses that begin with any action but the last get the
    reward `safe` with the share `common`; those that begin with the last action are right (1) with
    the smaller share `better`. The last action's logit is `rarity` below the others at first."""
    generator = torch.Generator().manual_seed(seed)
    leaves = actions**depth
    safe_ones = _solutions(seeds, prompts, leaves, common, generator) * safe
    right = _solutions(seeds, prompts, leaves // actions, better, generator)
    rewards = safe_ones.clone()
    rewards[..., -(leaves // actions) :] = right
    logits = _priors((seeds, prompts, states(actions, depth), actions), spread, generator)
    logits[..., 0, -1] -= rarity
    return World("rare", logits, rewards, coupling)


def changing(
    seeds: int,
    *,
    prompts: int = 8,
    actions: int = 8,
    depth: int = 3,
    share: float = 0.05,
    changes_at: int = 200,
    coupling: float = 0.5,
    spread: float = 1.0,
    seed: int = 0,
) -> World:
    """Responses that are right until step `changes_at` are wrong from then on, and others are
    right."""
    generator = torch.Generator().manual_seed(seed)
    leaves = actions**depth
    first = _solutions(seeds, prompts, leaves, share, generator)
    later = _solutions(seeds, prompts, leaves, share, generator) * (1 - first)
    none = later.sum(-1, keepdim=True) == 0
    other = first.argmin(-1, keepdim=True)
    later = torch.where(none, torch.zeros_like(later).scatter(-1, other, 1.0), later)
    logits = _priors((seeds, prompts, states(actions, depth), actions), spread, generator)
    return World("changing", logits, first, coupling, later, changes_at)


WORLDS = {"bandit": bandit, "tree": tree, "rare": rare, "changing": changing}


@dataclass(frozen=True)
class Exact:
    """Values of a policy without sampling error; all [K] float64, means over the prompts.

    entropy: mean entropy of a response's choices, nats.
    reward: expected reward.
    pass_at: probability that one of k responses is right, by k.
    """

    entropy: Tensor
    reward: Tensor
    pass_at: dict[int, Tensor]


def evaluate(world: World, logits: Tensor, step: int, ks: tuple[int, ...] = (1, 16, 64)) -> Exact:
    """Enumerates every response of the policy `logits` [K, P, V, A]."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    entropies = -(p * log_p).sum(-1)
    seeds, prompts = logits.shape[:2]
    reach = torch.ones((seeds, prompts, 1), dtype=torch.float64)
    entropy = torch.zeros((seeds, prompts), dtype=torch.float64)
    for level in range(world.depth):
        first = first_state(world.actions, level)
        here = slice(first, first + world.actions**level)
        entropy += (reach * entropies[:, :, here]).sum(-1)
        reach = (reach[..., None] * p[:, :, here]).flatten(2)
    rewards = world.rewards_at(step)
    solved = (reach * (rewards >= 1)).sum(-1).clamp(0, 1)
    return Exact(
        entropy=(entropy / world.depth).mean(-1),
        reward=(reach * rewards).sum(-1).mean(-1),
        pass_at={k: (1 - (1 - solved) ** k).mean(-1) for k in ks},
    )
