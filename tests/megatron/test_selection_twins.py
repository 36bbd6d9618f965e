"""Several updates of one batch against float64 twins that share no code with the package: which
policy's entropies a selection reads, and what moves when no token carries loss.

A twin is plain transformers, the paper's formula written out, autograd and torch's own AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import save_model
from support.ranks import RankPool
from support.steps import take_step
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory, sampled_trajectory

pytestmark = pytest.mark.distributed
PROMPTS, SAMPLES, MINI_BATCH, EPOCHS, LR = 4, 3, 2, 3, 3e-3
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
VOCAB = 37


def responses() -> list[tuple[list[int], list[int]]]:
    """Tokens of the prompt and of the response, of every sample."""
    generator = torch.Generator().manual_seed(37)  # no near ties at a threshold

    def draw(n: int) -> list[int]:
        return torch.randint(2, VOCAB, (n,), generator=generator).tolist()

    prompts = [draw(3 + number) for number in range(PROMPTS)]
    return [(prompts[i // SAMPLES], draw(5 + i % 4)) for i in range(PROMPTS * SAMPLES)]


def batch_of(
    finish: str = "stop", engine: float = -1.0, rewards: list[float] = REWARDS
) -> RolloutBatch:
    samples: list[Trajectory] = []
    for i, (prompt, response) in enumerate(responses()):
        whose = Prompt(i // SAMPLES, str(i // SAMPLES), "", "", tuple(prompt))
        sample = sampled_trajectory(
            whose,
            i % SAMPLES,
            response,
            [engine] * len(response),
            finish_reason=finish,  # type: ignore[arg-type]
        )
        sample.reward, sample.reward_status = rewards[i], "ok"
        samples.append(sample)
    return RolloutBatch.from_trajectories(samples, step=1)


def config_of(path: Path, algorithm: dict[str, Any], **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"steps": 10},
        "model": {"path": str(path)},
        "rollout": {"temperature": 1.0},
        "batch": {
            "prompts": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "mini_batch_prompts": MINI_BATCH,
            "epochs": EPOCHS,
            "micro_batch_tokens": 32,
        },
        "algorithm": algorithm,
        # no decay, no clipping, a constant rate: torch's AdamW needs no second description
        "optimizer": {
            "lr": LR,
            "weight_decay": 0.0,
            "eps": 1e-3,
            "clip_grad": 1e9,
            "warmup_steps": 0,
        },
        "observability": {"entropy_forecast": False},
        **sections,
    }
    return Config.model_validate(tree)


def steps(
    rank: int, init: str, config: Config, batches: list[RolloutBatch]
) -> tuple[dict[str, Tensor], list[dict[str, float]], list[dict[str, float]]]:
    """This rank's weights after the batches, the first update's metrics of each, and the method's
    states."""
    trainer = Trainer(resolve_run(config), rank, init)
    state, states, rows = trainer.method.initial_state(), [], []
    for batch in batches:
        metrics, after = take_step(trainer, trainer.method.judge(batch), state)
        state = after or state
        states.append(state)
        rows += metrics[:1]
    weights = trainer.export()
    trainer.close()
    return weights, rows, states


def scores(policy: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy (nats) and sample of every response token [M]."""
    log_probs, entropies, whose = [], [], []
    for i, (prompt, response) in enumerate(responses()):
        logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_p = logits - logits.logsumexp(1, keepdim=True)
        log_probs.append(log_p[torch.arange(len(response)), torch.tensor(response)])
        entropies.append(-(log_p.exp() * log_p).sum(1))
        whose += [i] * len(response)
    return torch.cat(log_probs), torch.cat(entropies), torch.tensor(whose)


def advantages(rewards: list[float] = REWARDS) -> Tensor:
    """[samples] (r - mean) / (std + 1e-6) by group, with the unbiased standard deviation."""
    groups = torch.tensor(rewards, dtype=torch.float64).reshape(PROMPTS, SAMPLES)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()


# Samples of one prompt have one first state, so two entropies can be equal in float64 and a
# rounding apart in float32, differently on each processor. Both rules below assert that none of
# such a pair lies at the threshold.


def silenced_by_stapo(log_prob: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
    """STAPO v4 (2602.15620): A > 0, pi < 0.1 and H below the 75 % quantile of such tokens."""
    candidates = (advantage > 0) & (log_prob.exp() < 0.1)
    if not candidates.any():
        return ~candidates
    threshold = float(np.quantile(entropy[candidates].numpy(), 0.75))
    assert int(((entropy[candidates] - threshold).abs() < 1e-3).sum()) <= 1
    return ~(candidates & (entropy < threshold))


def forks(log_prob: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
    """2506.01939: the int(0.2 n + 0.9999) tokens of highest entropy."""
    kept = torch.zeros(len(entropy), dtype=torch.bool)
    order = entropy.argsort(descending=True)
    count = max(1, int(0.2 * len(entropy) + 0.9999))
    assert float(entropy[order[count - 1]] - entropy[order[count]]) > 1e-3
    kept[order[:count]] = True
    return kept


RULES = {
    "stapo": ({"name": "stapo", "tau_p": 0.1}, silenced_by_stapo, math.inf),
    "twenty_entropy": ({"name": "twenty_entropy"}, forks, 10.0),
}


def by_hand(
    path: Path, rule: Callable[..., Tensor], dual: float, *, stale: bool
) -> dict[str, Tensor]:
    """The weights after all updates of the batch.

    Args:
        rule: which tokens keep their loss, by log-prob, entropy and advantage of a mini-batch.
        dual: bound on the loss of tokens of negative advantage, as a multiple of it.
        stale: entropies are those before the first update: what must not be.
    """
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0
    )
    with torch.no_grad():
        old, first_entropy, whose = scores(policy)
    advantage = advantages()[whose]
    for update in range(EPOCHS * PROMPTS // MINI_BATCH):
        log_prob, entropy, _ = scores(policy)
        begin = (update % (PROMPTS // MINI_BATCH)) * MINI_BATCH
        inside = (whose // SAMPLES >= begin) & (whose // SAMPLES < begin + MINI_BATCH)
        read = (first_entropy if stale else entropy.detach())[inside]
        kept = rule(log_prob.detach()[inside], read, advantage[inside])
        ratio, a = (log_prob - old).exp()[inside], advantage[inside]
        term = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
        term = torch.where(a < 0, term.clamp_min(dual * a) if math.isfinite(dual) else term, term)
        optimizer.zero_grad()
        (-(term[kept].sum() / kept.sum())).backward()
        optimizer.step()
    return {name: x.detach() for name, x in policy.named_parameters()}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


@pytest.mark.wide
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one", "tp2", "pp2"])
@pytest.mark.parametrize("name", RULES)
def test_current_statistics_renew_entropies_too(
    ranks: RankPool, tmp_path: Path, name: str, layout: dict[str, int]
) -> None:
    save_model(tmp_path, "qwen2_tied")
    algorithm, rule, dual = RULES[name]
    config = config_of(tmp_path, algorithm, statistics={"surprisal": "current"}, parallel=layout)
    parts = ranks.run(steps, config.parallel.world_size, config, [batch_of()])
    weights = {name: weight for part, _, _ in parts for name, weight in part.items()}
    want = by_hand(tmp_path, rule, dual, stale=False)
    far = furthest(want, by_hand(tmp_path, rule, dual, stale=True))
    assert furthest(weights, want) < 1e-5 < far / 20  # the old entropies would show


EMPTY = {
    "truncated: mask": ({"truncated": "mask"}, "length", -1.0),
    "all vetoed": (
        {"correction": {"mode": "truncate", "high": 2.0, "veto": 1e-4}, "gate_entropy": "kept"},
        "stop",
        60.0,
    ),
}
"""Ways to a batch without a token that carries loss: settings, finish reason and the engine's
log-probs."""


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("target", [0.01, 10.0], ids=["entropy above", "entropy below"])
def test_a_batch_without_a_loss_token_moves_no_controller(
    ranks: RankPool, tmp_path: Path, case: str, target: float
) -> None:
    save_model(tmp_path, "qwen2_tied")
    settings, finish, engine = EMPTY[case]
    adaptive = {"adaptive": True, "entropy_target": target, "amplify": 1.2, "attenuate": 0.8}
    config = config_of(tmp_path, {"name": "stare", **adaptive, **settings})
    usual = batch_of(engine=-3.0)
    batches = [usual, batch_of(finish, engine), usual]
    ((_, rows, states),) = ranks.run(steps, 1, config, batches)
    # entropies of 37 tokens lie between the two targets, so every batch that says something moves W
    # and M by 0.01
    move = 0.01 if target > math.log(VOCAB) else -0.01
    for key, start, sign in (("amplify", 1.2, 1), ("attenuate", 0.8, -1)):
        assert [state[key] for state in states] == pytest.approx(
            [start + sign * move * n for n in (1, 1, 2)]
        )
    assert [state["gate"] for state in states] == [float(move > 0)] * 3
    if case == "truncated: mask":  # a guard that reads it finds no number
        assert [math.isnan(row["entropy/mean"]) for row in rows] == [False, True, False]


def test_a_batch_without_a_loss_token_moves_no_entropy_bonus(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen2_tied")
    bonus = {"coef": 0.002, "target": 10.0, "delta": 1e-3, "coef_max": 1.0}
    config = config_of(tmp_path, {"name": "grpo", "truncated": "mask", "entropy_bonus": bonus})
    ((_, _, states),) = ranks.run(steps, 1, config, [batch_of(), batch_of("length"), batch_of()])
    assert [state["entropy_bonus/coef"] for state in states] == pytest.approx([0.003, 0.003, 0.004])
    bonus["target"], bonus["coef"] = 0.01, 0.5
    config = config_of(tmp_path, {"name": "grpo", "truncated": "mask", "entropy_bonus": bonus})
    ((_, _, states),) = ranks.run(steps, 1, config, [batch_of(), batch_of("length"), batch_of()])
    assert [state["entropy_bonus/coef"] for state in states] == pytest.approx([0.499, 0.499, 0.498])
    assert [state["entropy_bonus/open"] for state in states] == [0.0, 0.0, 0.0]


EQUAL = [1.0, 1.0, 1.0, *REWARDS[3:6], 0.0, 0.0, 0.0, *REWARDS[9:]]
"""Rewards where the first prompt's are all 1 and the third's all 0."""


def skywork_by_hand(path: Path, coef: float, *, dropped: bool) -> dict[str, Tensor]:
    """The weights after all updates: GRPO clipped at 0.2 less coef times the mean entropy, both
    over the tokens of the groups that are left.

    Args:
        dropped: whether groups whose rewards are all equal are; SkyworkAI/Skywork-OR1,
            trainer.rejection_sample.
    """
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0
    )
    with torch.no_grad():
        old, _, whose = scores(policy)
    advantage = advantages(EQUAL)[whose]
    counts = torch.tensor([len(set(EQUAL[3 * g : 3 * g + 3])) > 1 for g in range(PROMPTS)])[
        whose // SAMPLES
    ]
    for update in range(EPOCHS * PROMPTS // MINI_BATCH):
        log_prob, entropy, _ = scores(policy)
        begin = (update % (PROMPTS // MINI_BATCH)) * MINI_BATCH
        inside = (whose // SAMPLES >= begin) & (whose // SAMPLES < begin + MINI_BATCH)
        inside = inside & counts if dropped else inside
        ratio, a = (log_prob - old).exp()[inside], advantage[inside]
        term = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        optimizer.zero_grad()
        (-term.mean() - coef * entropy[inside].mean()).backward()
        optimizer.step()
    return {name: x.detach() for name, x in policy.named_parameters()}


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"data": 2}], ids=["one", "tp2", "dp2"])
def test_equal_groups_are_neither_in_n_nor_in_the_entropy(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int]
) -> None:
    save_model(tmp_path, "qwen2_tied")
    grpo = {"name": "grpo", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2}
    algorithm = {**grpo, "equal_groups": "mask", "entropy_bonus": {"coef": 0.05}}
    config = config_of(tmp_path, algorithm, parallel=layout)
    parts = ranks.run(steps, config.parallel.world_size, config, [batch_of(rewards=EQUAL)])
    weights = {name: weight for part, _, _ in parts for name, weight in part.items()}
    want = skywork_by_hand(tmp_path, 0.05, dropped=True)
    far = furthest(want, skywork_by_hand(tmp_path, 0.05, dropped=False))
    assert furthest(weights, want) < 1e-5 < far / 20  # with all groups in N it would show


@pytest.mark.parametrize("shown", ["mask", "keep"])
def test_the_bonus_is_steered_by_the_surprisal_of_the_groups_that_are_left(
    ranks: RankPool, tmp_path: Path, shown: str
) -> None:
    save_model(tmp_path, "qwen2_tied")
    with torch.no_grad():
        log_prob, _, whose = scores(
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        )
    left = torch.tensor([False, True, False, True])[whose // SAMPLES]
    of_left, of_all = float(-log_prob[left].mean()), float(-log_prob.mean())
    assert abs(of_left - of_all) > 1e-3
    target = (of_left + of_all) / 2
    bonus = {"coef": 0.0, "target": target, "delta": 1e-3, "coef_max": 1.0, "measure": "surprisal"}
    algorithm = {
        "name": "grpo",
        "aggregation": "token_mean",
        "equal_groups": shown,
        "entropy_bonus": bonus,
    }
    config = config_of(tmp_path, algorithm)
    ((_, _, states),) = ranks.run(steps, 1, config, [batch_of(rewards=EQUAL)])
    read = of_left if shown == "mask" else of_all
    assert states[0]["entropy_bonus/open"] == float(read < target)
    assert states[0]["entropy_bonus/coef"] == pytest.approx(1e-3 if read < target else 0.0)
