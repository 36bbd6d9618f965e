"""Two steps of several AdamW updates each, of every kind of method, through Megatron and by hand.

By hand is plain transformers in float64, the losses of losses_by_hand.py, autograd, and AdamW
written out: a gradient clipped by the norm over all parameters, decay that spares norms and biases,
a rate that warms up and falls.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.losses_by_hand import Scores, training_loss
from support.models import save_model
from support.ranks import RankPool
from support.steps import plan_of, take_step
from test_parity import as_saved
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory, sampled_trajectory

pytestmark = pytest.mark.distributed
VOCAB, TEMPERATURE, STEPS, EPOCHS, PROMPTS, MINI_BATCH = 37, 0.8, 2, 2, 4, 2
UPDATES = EPOCHS * PROMPTS // MINI_BATCH
# None: the verifier failed
REWARDS = [[1.0, 0.0, None, 0.0], [1.0, 1.0, None], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
TRUNCATED = 8  # a sample of the third prompt
LR, MIN_LR, WARMUP, DECAY, BETA1, BETA2 = 1e-3, 3e-4, 3, 0.2, 0.8, 0.9
EPS = 1e-3  # near the gradients, so that their scale tells, and what is rounding in them does not


def batch_of(step: int) -> RolloutBatch:
    """Groups of unequal size; one response has a tool observation within it, one is cut off, two
    were not verified."""
    generator = torch.Generator().manual_seed(step)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples: list[Trajectory] = []
    for cursor, rewards in enumerate(REWARDS):
        prompt = Prompt(
            cursor, str(cursor), "", "", tuple(draw(2, VOCAB) for _ in range(2 + cursor))
        )
        for number, reward in enumerate(rewards):
            n = draw(4, 11)
            rollout = [-draw(100, 500) / 100 for _ in range(n)]
            finish = "length" if len(samples) == TRUNCATED else "stop"
            ids = [draw(2, VOCAB) for _ in range(n)]
            sample = sampled_trajectory(prompt, number, ids, rollout, finish_reason=finish)  # type: ignore[arg-type]
            if cursor == 3:
                sample.loss_mask = torch.arange(n) != 2
            sample.reward, sample.reward_status = reward, "ok" if reward is not None else "timeout"
            samples.append(sample)
    return RolloutBatch.from_trajectories(samples, step=step)


def config_of(path: Path, algorithm: dict[str, Any], clip_grad: float, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"steps": STEPS},
        "model": {"path": str(path)},
        "rollout": {"temperature": TEMPERATURE},
        "batch": {
            "prompts": PROMPTS,
            "samples_per_prompt": 2,
            "mini_batch_prompts": MINI_BATCH,
            "epochs": EPOCHS,
            "micro_batch_tokens": 24,
        },
        "algorithm": algorithm,
        "optimizer": {
            "lr": LR,
            "min_lr": MIN_LR,
            "warmup_steps": WARMUP,
            "schedule": "linear",
            "weight_decay": DECAY,
            "beta1": BETA1,
            "beta2": BETA2,
            "eps": EPS,
            "clip_grad": clip_grad,
        },
        "observability": {"entropy_forecast": False},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(tree)


def all_steps(
    rank: int, init: str, config: Config
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """This rank's weights after the run's steps, and what every update reported."""
    trainer = Trainer(resolve_run(config), rank, init)
    state, rows = trainer.method.initial_state(), []
    for step in range(1, STEPS + 1):
        batch = batch_of(step)
        batch = trainer.method.judge(batch)
        metrics, after = take_step(trainer, batch, state)
        rows += metrics
        state = after or state
    weights = trainer.export()
    trainer.close()
    return weights, rows


def scored(policy: Any, batch: RolloutBatch) -> tuple[Tensor, ...]:
    """Log-probs, entropies and sums of p^2 and p^2 ln p [M] of all response positions."""
    found, start = [], 0
    for prompt, n in zip(
        batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
    ):
        tokens = batch.tokens[start : start + prompt + n]
        start += prompt + n
        log_p = (policy(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(1)
        p = log_p.exp()
        found.append(
            (
                log_p.gather(1, tokens[prompt:, None]).squeeze(1),
                *(-(p * log_p).sum(1), (p * p).sum(1), (p * p * log_p).sum(1)),
            )
        )
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


class AdamW:
    """AdamW as config_of sets it; Loshchilov and Hutter, arXiv 1711.05101."""

    def __init__(self, policy: Any, clip_grad: float) -> None:
        self.parameters = dict(policy.named_parameters())
        self.clip_grad = clip_grad
        self.first = {name: torch.zeros_like(x) for name, x in self.parameters.items()}
        self.second = {name: torch.zeros_like(x) for name, x in self.parameters.items()}
        self.steps = 0

    def rate(self) -> float:
        """Learning rate of the current step, counted over all rollout batches."""
        if self.steps <= WARMUP:
            return LR * self.steps / WARMUP
        return LR - (LR - MIN_LR) * (self.steps - WARMUP) / (STEPS * UPDATES - WARMUP)

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        self.steps += 1
        rate = self.rate()
        norm = torch.cat([x.grad.flatten() for x in self.parameters.values()]).norm().item()
        for name, x in self.parameters.items():
            gradient = x.grad * self.clip_grad / max(norm, self.clip_grad)
            self.first[name].lerp_(gradient, 1 - BETA1)
            self.second[name].lerp_(gradient**2, 1 - BETA2)
            mean = self.first[name] / (1 - BETA1**self.steps)
            root = (self.second[name] / (1 - BETA2**self.steps)).sqrt()
            spared = name.endswith("bias") or "norm" in name
            x -= rate * (mean / (root + EPS) + (0.0 if spared else DECAY) * x)
        return {"optimizer/grad_norm": norm, "optimizer/lr": rate}


def load(path: Path) -> Any:
    # the fused kernel for experts knows no float64
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )


def by_hand(
    path: Path, config: Config, settings: dict[str, Any], reference: Path | None = None
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The policy after the same updates, and what they should have reported.

    Args:
        settings: the `algorithm` section as it was given; what it leaves out is as published.
    """
    policy, frozen = load(path), load(reference or path)
    optimizer, steered = (
        AdamW(policy, config.optimizer.clip_grad),
        settings.get("entropy_bonus", {}),
    )
    rows, used, coef = [], steered.get("coef", 0.0), steered.get("coef", 0.0)
    for step in range(1, STEPS + 1):
        batch = batch_of(step)
        with torch.no_grad():
            (old, entropy, *sums), (fixed, *_) = scored(policy, batch), scored(frozen, batch)
        plan = plan_of(config, batch)
        mean = batch_mean(settings, batch, entropy)
        gate = mean < (settings.get("entropy_target") or torch.inf)
        for epoch, number in itertools.product(range(EPOCHS), range(PROMPTS // MINI_BATCH)):
            now, now_entropy, *_ = scored(policy, batch)
            read, read_entropy = old, None
            if config.statistics.surprisal == "current" and (epoch or number):
                read, read_entropy = now.detach(), now_entropy.detach()
            scores = Scores(
                *(now, old, batch.rollout_log_probs.double(), fixed, entropy, now_entropy, read),
                *sums,
                read_entropy,
            )
            loss = training_loss(
                settings, batch, scores, plan.branches(number), gate=gate, bonus=used
            )
            policy.zero_grad()
            loss.backward()
            rows.append({"loss/policy": loss.item(), **optimizer.step()})
        if "target" in steered:  # acts a step late
            coef += steered["delta"] if mean < steered["target"] else -steered["delta"]
            used = coef if mean < steered["target"] else 0.0
    return as_saved({name: x.detach() for name, x in policy.named_parameters()}), rows


def batch_mean(settings: dict[str, Any], batch: RolloutBatch, entropy: Tensor) -> float:
    """Mean entropy over the tokens of the rollout batch that carry loss."""
    carries = (
        batch.verified
        if settings.get("truncated", "keep") == "keep"
        else batch.verified & ~batch.truncated
    )
    return (
        entropy[batch.loss_mask & carries.repeat_interleave(batch.response_lengths)].mean().item()
    )


def check(
    ranks: RankPool,
    algorithm: dict[str, Any],
    config: Config,
    reference: Path | None = None,
    tolerance: float = 2e-5,
) -> list[dict[str, float]]:
    """Runs the steps in the configuration's layout and holds weights and metrics against those by
    hand."""
    results = ranks.run(all_steps, config.parallel.world_size, config)
    (rows,) = [rows for _, rows in results if rows]
    weights = {name: weight for part, _ in results for name, weight in part.items()}
    want, wanted = by_hand(Path(config.model.path), config, algorithm, reference)
    assert weights.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(
            weights[name].double(), weight, atol=tolerance, rtol=1e-4, msg=name
        )
    assert len(rows) == len(wanted) == STEPS * UPDATES
    for got, expected in zip(rows, wanted, strict=True):
        assert {name: got[name] for name in expected} == pytest.approx(expected, rel=2e-3, abs=2e-5)
    return rows


CORRECTION = {"mode": "mask", "low": 0.02, "high": 50.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"name": "grpo", "truncated": "mask"}, {}),
    "grpo, sums": (
        {
            "name": "grpo",
            "aggregation": "sequence_sum",
            "correction": {**CORRECTION, "normalise": True},
        },
        {},
    ),
    "stapo": ({"name": "stapo", "tau_p": 0.1, "correction": CORRECTION}, {}),
    "stare C3, gate by sample": (
        {
            "name": "stare",
            "variant": "C3",
            "amplify": 2.0,
            "attenuate": 0.3,
            "gate": "sample",
            "entropy_target": 2.5,
        },
        {"surprisal": "current"},
    ),
    "stare C4, gate by token": (
        {
            "name": "stare",
            "variant": "C4",
            "rare_below": 0.1,
            "attenuate": 0.3,
            "gate": "token",
            "entropy_target": 2.5,
        },
        {},
    ),
    "clip_cov": ({"name": "clip_cov", "share": 0.1, "cov_low": 0.1}, {"surprisal": "current"}),
    "kl_cov": ({"name": "kl_cov", "share": 0.2}, {"surprisal": "current"}),
    "opefo": ({"name": "opefo", "correction": CORRECTION}, {}),
    "stare_predictive": (
        {"name": "stare_predictive", "entropy_target": 5.0, "share": 0.3, "amplify": 2.0},
        {},
    ),
    "clip_b": ({"name": "clip_b", "mu": 0.5}, {"surprisal": "current"}),
    "clip_v": ({"name": "clip_v", "mu": 0.3, "max_share": 0.1}, {"surprisal": "current"}),
    "repo_r": ({"name": "repo_r", "zeta": 0.2}, {"surprisal": "current"}),
    "steer": ({"name": "steer", "map": "exponential"}, {"surprisal": "current"}),
    "gspo": ({"name": "gspo", "clip_low": 0.3, "clip_high": 0.4}, {}),
    "gtpo": ({"name": "gtpo", "alpha2": 0.5}, {}),
    "grpo_s": ({"name": "grpo_s", "beta2": 0.5, "clip_low": 0.5, "clip_high": 0.9}, {}),
}


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_by_hand(ranks: RankPool, tmp_path: Path, case: str) -> None:
    save_model(tmp_path, "qwen2")
    algorithm, statistics = CASES[case]
    rows = check(ranks, algorithm, config_of(tmp_path, algorithm, 0.3, statistics=statistics))
    assert min(row["optimizer/grad_norm"] for row in rows) > 0.3  # every gradient is clipped
    ratios = [row["ratio/max_abs_log"] for row in rows]
    assert ratios[0] == ratios[UPDATES] == 0.0 < min(*ratios[1:UPDATES], *ratios[UPDATES + 1 :])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "layout", "distributed", "case"),
    [
        ("qwen2_tied", {"tensor": 2}, False, "gspo"),
        ("qwen2_tied", {"pipeline": 2}, False, "grpo"),
        # whose tokens that count are told by statistics of each mini-batch
        ("qwen2", {"data": 2}, True, "stapo"),
        ("qwen3_moe", {"data": 2, "expert": 2}, False, "grpo"),
        ("qwen2_tied", {"context": 2}, True, "grpo_s"),
        ("qwen2_tied", {"context": 2}, False, "stare C3, gate by sample"),
        ("qwen2_tied", {"context": 2, "tensor": 2}, False, "gspo"),
    ],
    ids=["tp2", "pp2", "dp2-distributed", "ep2", "cp2-distributed", "cp2", "cp2-tp2"],
)
def test_a_layout_clips_by_the_norm_of_the_whole_policy(
    ranks: RankPool,
    tmp_path: Path,
    family: str,
    layout: dict[str, int],
    distributed: bool,
    case: str,
) -> None:
    save_model(tmp_path, family)
    config = config_of(
        tmp_path, CASES[case][0], 0.3, parallel=layout, optimizer={"distributed": distributed}
    )
    rows = check(ranks, CASES[case][0], config)
    assert min(row["optimizer/grad_norm"] for row in rows) > 0.3


def test_a_norm_below_the_bound_is_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    rows = check(ranks, {"name": "grpo"}, config_of(tmp_path, {"name": "grpo"}, 3.0))
    norms = [row["optimizer/grad_norm"] for row in rows]
    assert min(norms) < 3.0 < max(norms)  # some gradients are clipped, some are not


@pytest.mark.parametrize("target", [9.0, 0.5], ids=["below", "above"])
def test_reference_and_bonus(ranks: RankPool, tmp_path: Path, target: float) -> None:
    save_model(tmp_path / "model", "qwen2")
    save_model(tmp_path / "other", "qwen2", seed=1)
    bonus = {"coef": 0.1, "target": target, "delta": 0.05, "coef_max": 1.0}
    algorithm = {
        "name": "grpo",
        "reference_kl": {"coef": 0.05, "estimator": "k2"},
        "entropy_bonus": bonus,
    }
    config = config_of(
        tmp_path / "model", algorithm, 0.3, model={"reference_path": str(tmp_path / "other")}
    )
    rows = check(ranks, algorithm, config, reference=tmp_path / "other")
    used = [row["entropy_bonus/used"] for row in rows]
    assert used == pytest.approx([0.1] * UPDATES + [0.15 if target == 9.0 else 0.0] * UPDATES)


def test_all_updates_have_the_gate_of_the_rollout_batch(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    batch, stare = (
        batch_of(1),
        {"name": "stare", "variant": "C2", "amplify": 3.0, "attenuate": 0.2, "share": 0.3},
    )
    with torch.no_grad():
        _, entropy, *_ = scored(load(tmp_path), batch)
    whole, first = (
        batch_mean(stare, batch, entropy),
        batch.first(int((batch.groups < MINI_BATCH).sum())),
    )
    part = batch_mean(stare, first, entropy[: len(first.loss_mask)])
    target = (whole + part) / 2  # between the rollout batch's entropy and the first mini-batch's
    assert abs(whole - part) > 1e-2
    gated = {**stare, "entropy_target": target}
    rows = check(ranks, gated, config_of(tmp_path, gated, 0.3))
    assert [row["stare/gate"] for row in rows[:UPDATES]] == [float(whole < target)] * UPDATES
