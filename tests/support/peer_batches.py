"""A batch in the shape of other trainers, [B, T] with padding, and our loss of it with its
gradients."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.config.load import build_method
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import Prompt, TokenBatch
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory, sampled_trajectory

DOCS = Path(__file__).parents[2] / "docs"
# by prompt
REWARDS = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.2, 0.9, 0.4, 0.0]]
GROUPS = [group for group, rewards in enumerate(REWARDS) for _ in rewards]


@dataclass(frozen=True)
class Padded:
    """[B, T] each, float64. mask: 1 where a token is the policy's; tool observations and padding
    are 0."""

    now: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    entropy: Tensor
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """[B] tokens that count."""
        return self.mask.sum(1)


def padded(width: float = 0.8, *, moved: bool = True, seed: int = 3) -> Padded:
    """Responses of 4 to 13 tokens, each with an observation inside; `width` is how far policies are
    apart, nats.

    moved: False is a batch's first update, where the policy is the one of the log-prob pass.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * (torch.rand(len(GROUPS), 13, generator=generator, dtype=torch.float64) - 0.5)

    lengths = torch.randint(4, 14, (len(GROUPS), 1), generator=generator)
    mask = torch.arange(13) < lengths
    mask[:, 2] = False
    old = -2.5 + noise(4.6)
    now = old + noise(width) if moved else old.clone()
    found = Padded(
        now, old, old + noise(width), old + noise(width), 1.2 + noise(2.0), mask.double()
    )
    # float32's values, which both sides can hold
    return Padded(*(x.float().double() for x in vars(found).values()))


def rollout_batch(batch: Padded) -> RolloutBatch:
    """The batch's responses with their rewards, without what is behind their last token."""
    samples: list[Trajectory] = []
    numbers = [number for rewards in REWARDS for number in range(len(rewards))]
    rewards = [reward for rewards in REWARDS for reward in rewards]
    for row, (group, number) in enumerate(zip(GROUPS, numbers, strict=True)):
        length = int(batch.mask[row].nonzero().max()) + 1
        sample = sampled_trajectory(
            Prompt(group, str(group), "", "", (1,)),
            number,
            [2] * length,
            [0.0] * length,
            finish_reason="stop",
        )
        sample.loss_mask = batch.mask[row, :length].bool()
        sample.reward, sample.reward_status = rewards[row], "ok"
        samples.append(sample)
    return RolloutBatch.from_trajectories(samples, step=1)


def advantages(settings: dict[str, Any], batch: Padded) -> Tensor:
    """[B] of the method."""
    return build_method(settings).judge(rollout_batch(batch)).advantages


def our_loss(
    settings: dict[str, Any], batch: Padded, surprisal: str = "old"
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the whole batch as one update, and its gradients [B, T] in `now` and `entropy`.

    surprisal: "current" selects by the policy that is updated, as `statistics.surprisal` does.
    """
    method, records = build_method(settings), rollout_batch(batch)
    judged = method.judge(records)
    row, position = batch.mask.nonzero(as_tuple=True)
    now, entropy = (x.float().requires_grad_() for x in (batch.now, batch.entropy))

    def tokens(x: Tensor) -> Tensor:
        return x[row, position].float()

    held = TokenBatch(
        log_prob=tokens(batch.old),
        old_log_prob=tokens(batch.old),
        rollout_log_prob=tokens(batch.rollout),
        entropy=tokens(batch.entropy),
        advantage=judged.advantages[row].float(),
        loss_mask=torch.ones_like(row, dtype=torch.bool),
        sequence=row,
        position=position,
        index=torch.arange(len(row)),
        num_sequences=len(GROUPS),
        sequence_lengths=batch.lengths.long(),
        reference_log_prob=tokens(batch.reference),
        groups=records.groups,
        rewards=records.rewards,
        penalties=method.shaped_rewards(records) - records.rewards,
        num_groups=len(REWARDS),
        max_length=batch.mask.shape[1],
        step=1,
        selection_log_prob=tokens(batch.now) if surprisal == "current" else None,
    )
    statistics = gather_statistics(lambda known: method.requests(held, known), None)
    state = {
        name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
    }
    trained = replace(held, log_prob=now[row, position], current_entropy=entropy[row, position])
    scale = method.coefficients(trained, statistics)
    losses = method.token_loss(trained, statistics, state).loss
    total = torch.where(scale > 0, scale * losses, 0.0).sum()
    slopes = torch.autograd.grad(total, (now, entropy), allow_unused=True, materialize_grads=True)
    return total.detach().double(), slopes[0].double(), slopes[1].double()


def assert_equal(
    got: tuple[Tensor, Tensor, Tensor], loss: Tensor, now: Tensor, entropy: Tensor | None = None
) -> None:
    """Our loss and gradients are those that autograd finds of a peer's loss in its leaves."""
    leaves = [now] if entropy is None else [now, entropy]
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    largest = float(wanted[0].abs().max())
    assert largest > 1e-4  # or all would be equal to nothing
    torch.testing.assert_close(got[0], loss.detach().double(), rtol=1e-5, atol=1e-5 * largest)
    for mine, theirs in zip(got[1:], wanted, strict=False):
        torch.testing.assert_close(mine, theirs.double(), rtol=1e-4, atol=1e-5 * largest)


def row_of(page: str, key: str) -> list[str]:
    """The cells of the row of a table in docs/ whose first cell names `key`."""
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) > 2 and f"`{key}`" in cells[1]:
            return cells[1:-1]
    raise AssertionError(f"docs/{page} has no row of {key}")
