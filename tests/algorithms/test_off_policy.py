"""Every method where old, current, rollout and reference log-probs all differ, as from a batch's
second update on.

Statistics are asked, as training does, before the policy has moved; the loss is taken after. Both
are held against losses_by_hand.py, on mini-batches with answers that could not be verified, tool
observations, truncated responses and groups of unequal size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.losses_by_hand import Scores, training_loss
from torch import Tensor

from megatron_stare.algorithms import METHODS
from megatron_stare.algorithms.entropy_bonus import USED
from megatron_stare.algorithms.method import Method
from megatron_stare.config.load import build_method
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import Prompt, TokenBatch
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory, sampled_trajectory

# by prompt: the rewards of its responses; None: the verifier failed
REWARDS: list[list[float | None]] = [
    [1.0, 0.0, None, 1.0, 0.0],
    [1.0, 1.0, None],  # solved by every answer that was verified
    [0.0, 1.0, 0.0, 0.0],
    [0.0, None, 0.0],
    [1.0, 0.0, 1.0, 0.0, 0.0],
]
MINI_BATCHES = [[0, 1], [2, 3, 4]]  # prompts
TRUNCATED = (3, 9, 18)
MASKED = {"mode": "mask", "low": 0.9, "high": 1.15}
BY_RESPONSE = {"mode": "mask", "level": "sequence", "low": 0.7, "high": 1.4}
BOTH = {"variant": "C2", "share": 0.3, "amplify": 1.7, "attenuate": 0.4}

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "dual_clip": 3.0},
    "grpo token_mean": {"name": "grpo", "aggregation": "token_mean", "truncated": "mask"},
    "grpo sequence_sum": {"name": "grpo", "aggregation": "sequence_sum", "truncated": "drop"},
    "grpo dr_grpo": {
        "name": "grpo",
        "aggregation": "dr_grpo",
        "length_norm": 9,
        "advantage_spread": "population",
    },
    "grpo dr_grpo_verl": {"name": "grpo", "aggregation": "dr_grpo_verl", "length_norm": 9},
    "grpo micro_batch_mean": {"name": "grpo", "aggregation": "micro_batch_mean"},
    "truncate": {"name": "grpo", "correction": {"high": 1.1}},
    "clip by response": {
        "name": "grpo",
        "correction": {"mode": "clip", "level": "sequence", "low": 0.8, "high": 1.2},
    },
    "icepop": {
        "name": "grpo",
        "correction": {"mode": "icepop", "level": "geometric", "low": 0.8, "high": 1.1},
    },
    "mask": {"name": "grpo", "correction": MASKED},
    "mask by response": {"name": "grpo", "correction": {**BY_RESPONSE, "normalise": True}},
    "mask, sums": {"name": "grpo", "aggregation": "sequence_sum", "correction": BY_RESPONSE},
    "reject": {
        "name": "grpo",
        "aggregation": "token_mean",
        "correction": {"reject": (0.9, 1.15), "normalise": True},
    },
    "veto": {"name": "grpo", "correction": {"veto": 0.2, "high": 1.2}},
    "k1": {"name": "grpo", "reference_kl": {"coef": 0.3, "estimator": "k1"}},
    "k2": {"name": "grpo", "reference_kl": {"coef": 0.3, "estimator": "k2"}, "correction": MASKED},
    "k3": {"name": "grpo", "reference_kl": {"coef": 0.3}, "truncated": "mask"},
    "bonus": {"name": "grpo", "entropy_bonus": {"coef": 0.07}, "correction": MASKED},
    "dapo": {"name": "dapo", "overlong": {"max_length": 12, "cache": 6, "factor": 0.7}},
    "grop": {"name": "grpo", "length_penalty": {"easy_from": 0.9}},
    "grop, easier": {"name": "grpo", "length_penalty": {"easy_from": 0.6}, "truncated": "drop"},
    "dr_grpo": {"name": "dr_grpo", "length_norm": 9},
    "justrl": {"name": "justrl"},
    "cispo": {"name": "cispo", "clip_high": 0.3},
    "cispo both bounds": {
        "name": "cispo",
        "clip_low": 0.2,
        "clip_high": 0.3,
        "correction": {"high": 1.1},
    },
    "gspo": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "gspo as published": {"name": "gspo", "correction": {**BY_RESPONSE, "low": 0.1}},
    "gspo by token": {
        "name": "gspo",
        "clip_low": 0.05,
        "clip_high": 0.05,
        "form": "token",
        "truncated": "mask",
    },
    "grpo_s": {
        "name": "grpo_s",
        "clip_low": 0.05,
        "clip_high": 0.05,
        "overlong": {"max_length": 12, "cache": 6},
    },
    "grpo_s geometric": {"name": "grpo_s", "ratio": "geometric", "beta2": 0.7, "truncated": "drop"},
    "grpo_s corrected": {"name": "grpo_s", "correction": {"level": "geometric", "high": 1.02}},
    "gtpo": {"name": "gtpo", "alpha2": 0.6},
    "gtpo separate": {"name": "gtpo", "normalise": "separate", "truncated": "drop"},
    "gtpo over the batch": {"name": "gtpo", "scope": "batch", "correction": {"high": 1.1}},
    "gtpo clamped": {
        "name": "gtpo",
        "entropy_clamp": (0.2, 1.2),
        "overlong": {"max_length": 12, "cache": 6},
    },
    "stapo": {"name": "stapo", "tau_p": 0.3},
    "stapo v1": {
        "name": "stapo",
        "tau_p": 0.3,
        "version": "v1",
        "quantile": 0.5,
        "denominator": "all",
        "entropy_bonus": {"coef": 0.07},
        "reference_kl": {"coef": 0.3},
    },
    "stapo lower": {
        "name": "stapo",
        "tau_p": 0.5,
        "interpolation": "lower",
        "aggregation": "sequence_mean",
    },
    "stapo after a mask": {
        "name": "stapo",
        "tau_p": 0.5,
        "correction": {**MASKED, "normalise": True},
    },
    "stapo_stare": {
        "name": "stapo_stare",
        "variant": "C2",
        "spurious": {"tau_p": 0.3},
        "share": 0.3,
    },
    "stapo_stare after a mask": {
        "name": "stapo_stare",
        "spurious": {"tau_p": 0.5},
        "share": 0.3,
        "correction": MASKED,
    },
    "stare": {"name": "stare", "share": 0.2, "amplify": 1.7},
    "stare O4": {
        "name": "stare",
        "variant": "O4",
        "share": 0.2,
        "attenuate": 0.3,
        "correction": MASKED,
    },
    "stare C2": {
        "name": "stare",
        "variant": "C2",
        "share": 0.3,
        "amplify": 1.7,
        "aggregation": "sequence_mean",
    },
    "stare O2": {"name": "stare", "variant": "O2", "share": 0.2, "attenuate": 0.4},
    "stare O3 at the bottom": {
        "name": "stare",
        "variant": "O3",
        "common": "bottom",
        "share": 0.2,
        "amplify": 1.9,
    },
    "stare C1": {
        "name": "stare",
        "variant": "C1",
        "share": 0.3,
        "amplify": 1.7,
        "correction": MASKED,
    },
    "stare C3": {
        "name": "stare",
        "variant": "C3",
        "amplify": 1.7,
        "attenuate": 0.4,
        "aggregation": "sequence_mean",
    },
    "stare C4 at the bottom": {
        "name": "stare",
        "variant": "C4",
        "common": "bottom",
        "share": 0.2,
        "attenuate": 0.4,
    },
    "stare below a bound": {
        "name": "stare",
        "variant": "C2",
        "rare_below": 0.2,
        "amplify": 1.7,
        "attenuate": 0.4,
    },
    "stare above a bound": {
        "name": "stare",
        "variant": "C3",
        "rare_below": 0.4,
        "amplify": 1.7,
        "truncated": "mask",
    },
    "stare, gate by sample": {
        "name": "stare",
        **BOTH,
        "gate": "sample",
        "entropy_target": 1.0,
        "correction": MASKED,
    },
    "stare, gate by the sample's kept": {
        "name": "stare",
        **BOTH,
        "gate": "sample",
        "gate_entropy": "kept",
        "entropy_target": 1.05,
        "correction": MASKED,
    },
    "stare, gate by token": {"name": "stare", **BOTH, "gate": "token", "entropy_target": 0.8},
    "stapo_stare C3, gate by sample": {
        "name": "stapo_stare",
        **BOTH,
        "variant": "C3",
        "gate": "sample",
        "entropy_target": 1.0,
        "spurious": {"tau_p": 0.3},
    },
    "twenty_entropy": {"name": "twenty_entropy"},
    "twenty_entropy of all": {"name": "twenty_entropy", "candidates": "all", "share": 0.3},
    "twenty_entropy of all, quantile": {
        "name": "twenty_entropy",
        "candidates": "all",
        "rule": "quantile",
    },
    "twenty_entropy after a mask": {"name": "twenty_entropy", "share": 0.4, "correction": MASKED},
    "twenty_entropy all": {
        "name": "twenty_entropy",
        "denominator": "all",
        "aggregation": "sequence_mean",
    },
    "twenty_entropy quantile": {
        "name": "twenty_entropy",
        "rule": "quantile",
        "share": 0.4,
        "correction": MASKED,
    },
    "clip_cov": {"name": "clip_cov", "share": 0.1, "cov_low": 0.2, "cov_high": 3.0, "seed": 3},
    "clip_cov after a mask": {
        "name": "clip_cov",
        "share": 0.1,
        "cov_low": 0.2,
        "correction": MASKED,
    },
    "kl_cov": {"name": "kl_cov", "share": 0.1, "coef": 0.5},
    "dg": {"name": "dg", "eta": 0.6},
    "dg after a mask": {"name": "dg", "correction": MASKED},
    "dg behind stare's gate": {"name": "dg", "entropy_target": 1.0},
    "kl_cov after a mask": {"name": "kl_cov", "share": 0.2, "correction": MASKED},
    "clip_b": {"name": "clip_b", "mu": 0.6},
    "clip_b after a mask": {"name": "clip_b", "mu": 0.4, "correction": MASKED},
    "clip_v": {"name": "clip_v", "mu": 0.2, "max_share": 0.05},
    "clip_v at most one": {"name": "clip_v", "mu": 0.2, "max_share": 1e-4},
    "clip_v all after a mask": {
        "name": "clip_v",
        "mu": 0.5,
        "max_share": 1.0,
        "correction": {**MASKED, "normalise": True},
        "aggregation": "sequence_mean",
    },
    "entropic": {"name": "entropic", "probable_above": 0.5},
    "gepo": {"name": "gepo"},
    "gepo after a mask": {"name": "gepo", "correction": MASKED},
    "grpo_dropout": {"name": "grpo_dropout"},
    "grpo_dropout after a mask": {"name": "grpo_dropout", "correction": MASKED},
    "opefo": {"name": "opefo"},
    "opefo after a mask": {"name": "opefo", "correction": MASKED},
    "stare_predictive": {
        "name": "stare_predictive",
        "entropy_target": 5.0,
        "share": 0.4,
        "amplify": 1.7,
        "attenuate": 0.4,
    },
    "stare_predictive after a mask": {
        "name": "stare_predictive",
        "entropy_target": 5.0,
        "share": 0.4,
        "amplify": 2.5,
        "correction": MASKED,
    },
    "repo_r": {"name": "repo_r", "zeta": 0.3},
    "repo_r not centred": {"name": "repo_r", "zeta": -0.4, "centred": False},
    "steer": {"name": "steer"},
    "steer exponential": {"name": "steer", "map": "exponential", "weight_min": 0.4},
    "steer after a mask": {"name": "steer", "weight_min": 0.3, "correction": MASKED},
}
# values that a controller holds at the step
STATES = {
    "entropic": {"alpha": -0.6},
    "gepo": {"batches": 1.0, "low": 1.9, "high": 1.6},
    "gepo after a mask": {"batches": 1.0, "low": 1.9, "high": 2.5},
}


def rollout_batch() -> RolloutBatch:
    """Rewards as above. Every response has a tool observation within it; failed answers stand with
    a reward that would count if it were read."""
    generator = torch.Generator().manual_seed(5)
    samples: list[Trajectory] = []
    for cursor, rewards in enumerate(REWARDS):
        prompt = Prompt(cursor, str(cursor), "", "", (1, 2))
        for number, reward in enumerate(rewards):
            n = int(torch.randint(5, 13, (), generator=generator))
            start = int(torch.randint(1, n - 2, (), generator=generator))
            mask = [not start <= t < start + 2 for t in range(n)]
            finish = "length" if len(samples) in TRUNCATED else "stop"
            sample = sampled_trajectory(prompt, number, [2] * n, [0.0] * n, finish_reason=finish)  # type: ignore[arg-type]
            sample.loss_mask = torch.tensor(mask)
            # of a prompt that is always solved the failed answer reads as wrong, of one that never
            # is as right
            others = {x for x in rewards if x is not None}
            sample.reward = reward if reward is not None else 1.0 - min(others)
            sample.reward_status = "ok" if reward is not None else "crash"
            samples.append(sample)
    return RolloutBatch.from_trajectories(samples, step=4)


def scores_of(number: int, read: str) -> Scores:
    """Six policies, a few of whose tokens are far apart. Values are those of float32."""
    generator = torch.Generator().manual_seed(9)

    def noise(width: float) -> Tensor:
        return width * (torch.rand(number, generator=generator) - 0.5)

    def far(width: float) -> Tensor:
        return torch.where(torch.rand(number, generator=generator) < 0.06, width, 0.0)

    old = -5 * torch.rand(number, generator=generator) ** 2 - 0.05
    found = {
        "now": old + noise(0.8) + far(2.6) - far(2.0),
        "old": old,
        "rollout": old + noise(0.5) + far(2.0),
        "reference": old + noise(1.0),
        "entropy": 1 + noise(2.0),
        "now_entropy": 1 + noise(2.0),
        "read": old if read == "old" else old + noise(1.5) + far(1.5),
        "sum_p2": (sum_p2 := 0.5 + noise(0.8)),
        "sum_p2_log_p": -sum_p2 * (0.5 + noise(1.0)),
    }
    return Scores(**{name: x.float().double() for name, x in found.items()})


def tokens_of(
    method: Method, batch: RolloutBatch, scores: Scores, samples: list[int], read: str
) -> TokenBatch:
    """The mini-batch as a trainer holds it before its update: the current log-prob is still the old
    one."""
    advantages = method.judge(batch).advantages
    here = torch.zeros(batch.size, dtype=torch.bool)
    here[samples] = True
    carries = method.carries_loss(batch) & here
    sequence = torch.repeat_interleave(torch.arange(batch.size), batch.response_lengths)
    counted = batch.loss_mask & carries[sequence]
    lengths = torch.zeros(batch.size, dtype=torch.int64).index_add_(
        0, sequence, counted.to(torch.int64)
    )
    starts = batch.response_lengths.cumsum(0) - batch.response_lengths
    index = (batch.loss_mask & here[sequence]).nonzero().squeeze(1)

    def rows(x: Tensor) -> Tensor:
        return x[index].float()

    return TokenBatch(
        log_prob=rows(scores.old),
        old_log_prob=rows(scores.old),
        rollout_log_prob=rows(scores.rollout),
        entropy=rows(scores.entropy),
        advantage=rows(advantages[sequence]),
        loss_mask=counted[index],
        sequence=sequence[index],
        position=(torch.arange(len(sequence)) - starts[sequence])[index],
        index=index,
        num_sequences=int((lengths > 0).sum()),
        sequence_lengths=lengths,
        selection_log_prob=None if read == "old" else rows(scores.read),
        reference_log_prob=rows(scores.reference),
        sum_p2=rows(scores.sum_p2),
        sum_p2_log_p=rows(scores.sum_p2_log_p),
        groups=batch.groups,
        rewards=batch.rewards,
        penalties=method.shaped_rewards(batch) - batch.rewards,
        num_groups=len(REWARDS),
        max_length=int(batch.response_lengths.max()),
        step=batch.step,
    )


def trained(
    method: Method,
    tokens: TokenBatch,
    scores: Scores,
    micro_batches: list[list[int]],
    state: dict[str, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients [M] in current log-probs and entropies, micro-batch by
    micro-batch."""
    statistics = gather_statistics(lambda known: method.requests(tokens, known), None)
    held = {name: torch.tensor(x, dtype=torch.float64) for name, x in state.items()}
    now, entropy = (x.detach().float().requires_grad_() for x in (scores.now, scores.now_entropy))
    total = torch.zeros(())
    for samples in micro_batches:
        rows = torch.isin(tokens.sequence, torch.tensor(samples)).nonzero().squeeze(1)
        micro = tokens.select(rows)
        micro = replace(micro, log_prob=now[micro.index], current_entropy=entropy[micro.index])
        scale = method.coefficients(micro, statistics)
        total = (
            total
            + torch.where(
                scale > 0, scale * method.token_loss(micro, statistics, held).loss, 0.0
            ).sum()
        )
    slopes = torch.autograd.grad(total, (now, entropy), allow_unused=True, materialize_grads=True)
    return total.detach(), *slopes


def test_every_method_has_a_case() -> None:
    assert {case["name"] for case in CASES.values()} == set(METHODS)


@pytest.mark.parametrize("read", ["old", "another"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_papers_formulas(case: str, read: str) -> None:
    settings, batch = CASES[case], rollout_batch()
    method, scores = build_method(settings), scores_of(int(batch.response_lengths.sum()), read)
    # what a step uses and what its coefficient is may differ
    bonus = 0.02 if "entropy_bonus" in settings else 0.0
    for prompts in MINI_BATCHES:
        samples = torch.isin(batch.groups, torch.tensor(prompts)).nonzero().squeeze(1).tolist()
        cut = [samples[-1:], samples[3:-1], samples[:3]]
        tokens = tokens_of(method, batch, scores, samples, read)
        for gate in (True, False) if "stare" in case else (True,):
            held = STATES.get(case, {})
            state = method.initial_state() | {"gate": float(gate), USED: bonus} | held
            loss, *slopes = trained(method, tokens, scores, cut, state)
            leaves = [x.clone().requires_grad_() for x in (scores.now, scores.now_entropy)]
            by_hand = replace(scores, now=leaves[0], now_entropy=leaves[1])
            want = training_loss(
                settings,
                batch,
                by_hand,
                samples,
                gate=gate,
                bonus=bonus,
                micro_batches=cut,
                state=held,
            )
            wanted = torch.autograd.grad(want, leaves, allow_unused=True, materialize_grads=True)
            largest = float(wanted[0].abs().max())
            assert largest > 1e-3
            assert float(loss) == pytest.approx(want.item(), rel=1e-5, abs=1e-5 * largest)
            for got, expected in zip(slopes, wanted, strict=True):
                torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5 * largest)
