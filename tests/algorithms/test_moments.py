"""GTPO and GRPO-S where responses are dropped by a filter or truncated, against sums by hand in
float64, on one rank and on four."""

from __future__ import annotations

import statistics as plain
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import random_batch, save_model
from support.steps import log_prob_pass
from support.token_batches import loss_and_gradient, token_batch

from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.grpo_s import GrpoS
from megatron_stare.algorithms.gtpo import Gtpo
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.rollout_batch import RolloutBatch

VETO = Correction(level="sequence", veto=0.5)
METHODS: dict[str, Gtpo | GrpoS] = {
    "gtpo": Gtpo(correction=VETO, alpha2=0.4),
    "grpo_s": GrpoS(correction=VETO, beta2=0.4),
}
# four groups of four: of the first the only right answer is dropped; of the second one of two; of
# the third a wrong one is dropped and a right one truncated; of the last the only wrong one is
# truncated
REWARDS = [1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0]
DROPPED, TRUNCATED = [0, 4, 10], [8, 15]
# of each response; the last rank holds none
OWNER = torch.tensor([2, 0, 1, 1, 0, 2, 1, 0, 2, 2, 0, 1, 1, 1, 0, 2])


def case() -> TokenBatch:
    """Truncated responses carry no loss, and the others are judged against them."""
    batch = token_batch(REWARDS, seed=3, off_policy=0.0)
    batch.rollout_log_prob = batch.old_log_prob.clone()
    for response in DROPPED:
        first = (batch.sequence == response).nonzero()[0]
        batch.rollout_log_prob[first] += 1.0  # a ratio of 0.37 on one token takes the response out
    truncated = torch.isin(batch.sequence, torch.tensor(TRUNCATED))
    assert batch.sequence_lengths is not None
    lengths = batch.sequence_lengths.clone()
    lengths[TRUNCATED] = 0
    return replace(
        batch,
        loss_mask=~truncated,
        baseline_mask=torch.ones_like(truncated),
        sequence_lengths=lengths,
        num_sequences=len(REWARDS) - len(TRUNCATED),
    )


def standard(rewards: list[float], eps: float) -> list[float]:
    mean, spread = plain.fmean(rewards), plain.pstdev(rewards)
    return [(reward - mean) / (spread + eps) for reward in rewards]


def by_hand(method: Gtpo | GrpoS, batch: TokenBatch) -> list[float]:
    """[N] advantages; 0 where there is no loss."""
    advantages = [0.0] * len(batch.sequence)
    sequence, position = batch.sequence.tolist(), batch.position.tolist()
    entropy = batch.entropy.double().tolist()
    for group in range(4):
        responses = [i for i in range(4 * group, 4 * group + 4) if i not in DROPPED]
        if len({REWARDS[i] for i in responses}) == 1:
            continue
        tokens = [j for j, i in enumerate(sequence) if i in responses]
        if isinstance(method, Gtpo):
            rewards = []
            for j in tokens:
                right = REWARDS[sequence[j]] == 1
                peers = [
                    k
                    for k in tokens
                    if position[k] == position[j] and REWARDS[sequence[k]] == right
                ]
                share = [entropy[k] if right else 1 / entropy[k] for k in peers]
                own = entropy[j] if right else 1 / entropy[j]
                rewards.append(
                    (1 if right else -1)
                    * (method.alpha1 + method.alpha2 * len(peers) * own / sum(share))
                )
            found = dict(zip(tokens, standard(rewards, method.eps), strict=True))
        else:
            mean = {
                i: plain.fmean(entropy[j] for j in tokens if sequence[j] == i) for i in responses
            }
            by_response = []
            for i in responses:
                right = REWARDS[i] == 1
                peers = [k for k in responses if REWARDS[k] == REWARDS[i]]
                share = [mean[k] if right else 1 / mean[k] for k in peers]
                own = mean[i] if right else 1 / mean[i]
                by_response.append(
                    (1 if right else -1)
                    * (method.beta1 + method.beta2 * len(peers) * own / sum(share))
                )
            of = dict(zip(responses, standard(by_response, method.eps), strict=True))
            found = {j: of[sequence[j]] for j in tokens}
        for j, advantage in found.items():
            if sequence[j] not in TRUNCATED:
                advantages[j] = advantage
    return advantages


def gradient_by_hand(method: Gtpo | GrpoS, batch: TokenBatch) -> torch.Tensor:
    """[N] of the loss in the log-probs, on policy: -A / N, or -A / (B n_i); weights of the
    correction are 1."""
    kept = batch.loss_mask & ~torch.isin(batch.sequence, torch.tensor(DROPPED))
    lengths = torch.bincount(batch.sequence[kept], minlength=len(REWARDS))
    number = (
        kept.sum() if isinstance(method, Gtpo) else (lengths > 0).sum() * lengths[batch.sequence]
    )
    return torch.where(
        kept, -torch.tensor(by_hand(method, batch), dtype=torch.float64) / number, 0.0
    )


@pytest.mark.parametrize("name", METHODS)
def test_equal_to_sums_by_hand(name: str) -> None:
    batch, method = case(), METHODS[name]
    want = gradient_by_hand(method, batch)
    assert all(bool((want[batch.sequence == i] != 0).all()) for i in (5, 6, 9, 11, 12))
    _, gradient = loss_and_gradient(method, batch)
    torch.testing.assert_close(gradient.double(), want, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_wrong_answers_alone_teach_nothing(name: str) -> None:
    """The right one of three responses of three tokens is dropped."""
    batch = token_batch([1.0, 0.0, 0.0], group_size=3, lengths=[3, 3, 3], off_policy=0.0)
    batch.rollout_log_prob = batch.old_log_prob + (batch.index == 1).float()
    loss, gradient = loss_and_gradient(METHODS[name], batch)
    assert loss == 0 and (gradient == 0).all()
    batch.rollout_log_prob = batch.old_log_prob.clone()
    assert (loss_and_gradient(METHODS[name], batch)[1] != 0).any()  # the drop it was


@pytest.mark.parametrize("name", METHODS)
def test_a_dropped_truncated_response_is_no_measure_for_others(name: str) -> None:
    """Its own ratios decide, although it carries no loss."""
    batch, method = case(), METHODS[name]
    batch.rollout_log_prob[(batch.sequence == 15).nonzero()[0]] += 1.0
    _, gradient = loss_and_gradient(method, batch)
    # three right answers are left of the last group
    assert (gradient[batch.sequence >= 12] == 0).all()


def part(rank: int, init: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By method, canonical numbers and gradients of this rank's tokens."""
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=4)
    whole, found = case(), {}
    here = whole.select((OWNER[whole.sequence] == rank).nonzero().squeeze(1))
    for name, method in METHODS.items():
        leaf = here.log_prob.detach().clone().requires_grad_()
        mine = replace(here, log_prob=leaf)

        def requests(known: Any, method: Gtpo | GrpoS = method, mine: TokenBatch = mine) -> Any:
            return method.requests(mine, known)

        statistics = gather_statistics(requests, dist.group.WORLD)
        loss = (
            method.coefficients(mine, statistics) * method.token_loss(mine, statistics, {}).loss
        ).sum()
        found[name] = (here.index, torch.autograd.grad(loss, leaf)[0])
    dist.destroy_process_group()
    return found


@pytest.mark.distributed
def test_four_ranks_judge_alike(ranks: Any) -> None:
    parts, batch = ranks.run(part, 4), case()
    for name, method in METHODS.items():
        got = torch.full((len(batch.sequence),), torch.nan)
        for found in parts:
            index, gradient = found[name]
            got[index] = gradient
        torch.testing.assert_close(
            got.double(), gradient_by_hand(method, batch), atol=1e-7, rtol=1e-5
        )


def masks(
    rank: int, init: str, config: Config, batch: RolloutBatch
) -> list[tuple[torch.Tensor, ...]]:
    """Canonical numbers, mask and in_baseline of this rank's tokens, for the rollout batch and for
    each update."""
    trainer = Trainer(resolve_run(config), rank, init)
    log_prob_pass(trainer, trainer.method.judge(batch))
    trainer.measure({})
    assert trainer.step.measured is not None
    seen = [trainer.step.measured.tokens]
    for number in range(config.batch.updates):
        trainer.update(number)
        assert trainer.step._objective is not None
        seen.append(trainer.step._objective.tokens)
    trainer.close()
    return [(tokens.index, tokens.loss_mask, tokens.in_baseline) for tokens in seen]


@pytest.mark.distributed
@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
def test_the_trainer_says_who_is_judged_against(ranks: Any, tmp_path: Path, truncated: str) -> None:
    save_model(tmp_path, "qwen2")
    batch = random_batch(8, 8)
    batch.truncated[[1, 6]] = True
    batch.verified[3] = False
    tree = {
        "model": {"path": str(tmp_path)},
        "parallel": {"data": 2},
        "batch": {
            "prompts": 4,
            "samples_per_prompt": 2,
            "mini_batch_prompts": 2,
            "micro_batch_tokens": 24,
        },
        "algorithm": {"name": "gtpo", "truncated": truncated},
    }
    parts = ranks.run(masks, 2, Config.model_validate(tree), batch)
    sequence = torch.repeat_interleave(torch.arange(8), batch.response_lengths)
    loss = batch.verified & ~(batch.truncated & (truncated != "keep"))
    judged = batch.verified & ~(batch.truncated & (truncated == "drop"))
    for number, responses in enumerate((range(8), range(4), range(4, 8))):
        here = torch.isin(torch.arange(8), torch.tensor(list(responses)))
        for of, want in ((1, loss & here), (2, judged & here)):
            got = torch.zeros(len(sequence), dtype=torch.bool)
            for found in parts:
                got[found[number][0]] = found[number][of]
            assert torch.equal(got, want[sequence]), (number, of)
