"""Several optimizer steps a rollout batch, and where selections and gate are read from, on the real
trainer.

The reference is plain transformers in float64, one sample at a time, with autograd and SGD.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import plan_of, take_step
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.rollout_batch import RolloutBatch

pytestmark = pytest.mark.distributed
# every group of this batch teaches something
SEED, SIZE, GROUPS, MINI_BATCH, EPOCHS = 8, 8, 4, 2, 2
UPDATES = EPOCHS * GROUPS // MINI_BATCH
BUDGET = 24  # tokens a micro-batch; small, so that a mini-batch has several
LR, AMPLIFY, ATTENUATE, SHARE, LOW, HIGH, DUAL = 0.3, 3.0, 0.2, 0.2, 0.2, 0.28, 10.0


def config_of(path: Path, **sections: Any) -> Config:
    """STARE with an open gate, several updates a batch, and SGD without clipping."""
    algorithm = {
        "name": "stare",
        "variant": "C2",
        "amplify": AMPLIFY,
        "attenuate": ATTENUATE,
        "share": SHARE,
        "entropy_target": None,
    }
    tree: dict[str, Any] = {
        "model": {"path": str(path)},
        "batch": {
            "prompts": GROUPS,
            "samples_per_prompt": 2,
            "mini_batch_prompts": MINI_BATCH,
            "epochs": EPOCHS,
            "micro_batch_tokens": BUDGET,
        },
        "algorithm": algorithm,
        "optimizer": {"name": "sgd", "lr": LR, "weight_decay": 0.0, "clip_grad": 1e9},
        "observability": {"entropy_forecast": False},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(tree)


def batch_of(seed: int, *, observations: bool = False) -> RolloutBatch:
    """With rollout log-probs of their own, for selections to read; and some tokens that no policy
    sampled."""
    batch = random_batch(seed, SIZE)
    generator = torch.Generator().manual_seed(seed)
    batch.rollout_log_probs = -4 * torch.rand(batch.rollout_log_probs.shape, generator=generator)
    if observations:
        batch.loss_mask = torch.arange(len(batch.loss_mask)) % 4 != 1
    return batch


def one_step(
    rank: int, init: str, config: Config, observations: bool = False
) -> tuple[dict[str, Tensor], list[dict[str, float]], dict[str, float]]:
    """This rank's weights after one step, and what it reported."""
    trainer = Trainer(resolve_run(config), rank, init)
    metrics, state = take_step(trainer, batch_of(SEED, observations=observations))
    weights = trainer.export()
    trainer.close()
    return weights, metrics, state


def run(
    ranks: RankPool, config: Config, *, observations: bool = False
) -> tuple[dict[str, Tensor], list[dict[str, float]], dict[str, float]]:
    """The whole policy, the metrics of every update, and the method's state for the next step."""
    results = ranks.run(one_step, config.parallel.world_size, config, observations)
    weights = {name: weight for part, _, _ in results for name, weight in part.items()}
    (reported,) = [(metrics, state) for _, metrics, state in results if metrics]
    return weights, *reported


def log_probs(policy: Any, batch: RolloutBatch) -> list[Tensor]:
    """[n] of the loss mask of every sample."""
    ends = batch.lengths.cumsum(0).tolist()
    cut = [
        batch.tokens[end - n : end].long()
        for end, n in zip(ends, batch.lengths.tolist(), strict=True)
    ]
    prompts = batch.prompt_lengths.tolist()
    logits = [
        policy(tokens[None]).logits[0, p - 1 : -1] for tokens, p in zip(cut, prompts, strict=True)
    ]
    kept = batch.loss_mask.split(batch.response_lengths.tolist())
    return [
        x.log_softmax(-1).gather(1, tokens[p:, None]).squeeze(1)[mask]
        for x, tokens, p, mask in zip(logits, cut, prompts, kept, strict=True)
    ]


def mean_entropy(path: Path, batch: RolloutBatch) -> float:
    """Over the tokens of the loss mask, which the gate is moved by."""
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    found = []
    with torch.no_grad():
        for tokens, prompt in zip(
            batch.tokens.split(batch.lengths.tolist()), batch.prompt_lengths, strict=True
        ):
            log_p = policy(tokens[None].long()).logits[0, prompt - 1 : -1].log_softmax(-1)
            found.append(-(log_p.exp() * log_p).sum(-1))
    return float(torch.cat(found)[batch.loss_mask].mean())


def weights_by_hand(read: Tensor, advantage: Tensor) -> Tensor:
    """[n] STARE's C2, over the tokens given."""
    weight = torch.ones_like(advantage)
    for sign, factor in ((1, AMPLIFY), (-1, ATTENUATE)):
        candidates = (sign * advantage > 0).nonzero().squeeze(1)
        k = int(len(candidates) * SHARE + 0.999999)
        weight[candidates[read[candidates].argsort(stable=True)[:k]]] = factor
    return weight


def by_hand(
    path: Path, config: Config, surprisal: str, scope: str, batch: RolloutBatch
) -> dict[str, Tensor]:
    """The policy after the same updates. An update's batch is that of its mini-batch: threshold, N,
    and all."""
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    assert batch.advantages is not None
    with torch.no_grad():
        old = log_probs(policy, batch)
    rollout = batch.rollout_log_probs[batch.loss_mask].split(batch.loss_lengths.tolist())
    plan = plan_of(config, batch)
    for _, number in itertools.product(range(EPOCHS), range(GROUPS // MINI_BATCH)):
        now = log_probs(policy, batch)
        tokens = sum(len(now[i]) for i in plan.branches(number))
        (rank,) = plan.ranks
        micro_batches = rank[plan.mini_batches[number]]
        assert len(micro_batches) > 1
        loss = torch.zeros((), dtype=torch.float64)
        for samples in micro_batches if scope == "micro_batch" else [plan.branches(number)]:
            here, before = (
                torch.cat([now[i] for i in samples]),
                torch.cat([old[i] for i in samples]),
            )
            engine = torch.cat([rollout[i] for i in samples])
            advantage = torch.cat([batch.advantages[i].expand(len(old[i])) for i in samples])
            read = {"old": before, "current": here.detach(), "rollout": engine}[surprisal]
            ratio = (here - before).exp()
            value = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            value = torch.where(advantage < 0, torch.maximum(value, DUAL * advantage), value)
            loss = loss - (weights_by_hand(read, advantage) * value).sum() / tokens
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= LR * parameter.grad
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize(
    ("surprisal", "scope", "observations"),
    [
        ("old", "global", False),
        ("current", "global", False),
        ("rollout", "global", False),
        ("current", "micro_batch", False),
        ("rollout", "global", True),
    ],
)
def test_updates_equal_those_by_hand(
    ranks: RankPool, tmp_path: Path, surprisal: str, scope: str, observations: bool
) -> None:
    save_model(tmp_path, "qwen2")
    config = config_of(tmp_path, statistics={"surprisal": surprisal, "scope": scope})
    weights, metrics, _ = run(ranks, config, observations=observations)
    assert len(metrics) == UPDATES
    batch = batch_of(SEED, observations=observations)
    want = by_hand(tmp_path, config, surprisal, scope, batch)
    assert metrics[0]["entropy/mean"] == pytest.approx(mean_entropy(tmp_path, batch), abs=1e-5)
    plan = plan_of(config, batch)
    for number, row in enumerate(metrics):
        assert (
            row["loss/tokens"]
            == batch.loss_lengths[plan.branches(number % len(plan.mini_batches))].sum()
        )
    assert weights.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(weights[name].double(), weight, atol=2e-5, rtol=1e-4, msg=name)
    ratios = [row["ratio/max_abs_log"] for row in metrics]
    assert ratios[0] == 0.0  # scored and trained in the same micro-batches
    assert min(ratios[1:]) > 1e-3  # after it, the policy is another


def test_a_layout_takes_the_same_updates(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    sections: dict[str, Any] = {"statistics": {"surprisal": "current"}}
    alone, metrics, _ = run(ranks, config_of(tmp_path, **sections))
    cut, in_layout, _ = run(
        ranks, config_of(tmp_path, **sections, parallel={"tensor": 2, "data": 2})
    )
    assert cut.keys() == alone.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(cut[name], weight, atol=2e-5, rtol=1e-4, msg=name)
    assert in_layout[0]["ratio/max_abs_log"] == 0.0
    for one, other in zip(metrics, in_layout, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_current_surprisals_are_the_old_ones_at_first(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    single = {"mini_batch_prompts": None, "epochs": 1}
    old = run(ranks, config_of(tmp_path, batch=single))
    current = run(ranks, config_of(tmp_path, batch=single, statistics={"surprisal": "current"}))
    for name, weight in old[0].items():
        assert torch.equal(current[0][name], weight), name
    assert current[1:] == old[1:]


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}], ids=["one", "pp2"])
def test_the_skipped_pass_changes_nothing_but_the_gate(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int]
) -> None:
    save_model(tmp_path, "qwen2")
    common: dict[str, Any] = {
        "parallel": layout,
        "batch": {"mini_batch_prompts": None, "epochs": 1},
    }
    rollout = {"surprisal": "rollout"}
    weights, (metrics,), _ = run(ranks, config_of(tmp_path, **common, statistics=rollout))
    entropy = metrics["entropy/mean"]
    for target in (entropy + 0.1, entropy - 0.1):
        lagged = {**rollout, "gate": "lagged"}
        config = config_of(
            tmp_path, **common, statistics=lagged, algorithm={"entropy_target": target}
        )
        got, (row,), state = run(ranks, config)
        for name, weight in weights.items():
            assert torch.equal(got[name], weight), name  # the gate starts open, whatever the target
        assert {name: row[name] for name in metrics if name in row} == metrics
        assert row["stare/gate"] == 1.0
        # and is moved by this step's training pass for the next
        assert state["gate"] == float(entropy < target)


def two_steps(
    rank: int, init: str, config: Config, folder: str, resumed: bool
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Step 1, refresh, save, step 2; or load what was saved and step 2. Weights and metrics
    then."""
    trainer = Trainer(resolve_run(config), rank, init)
    state = trainer.method.initial_state()
    if resumed:
        trainer.load(folder)
    else:
        take_step(trainer, batch_of(SEED), state)
        trainer.refresh_reference()
        trainer.save(folder)
        trainer.finish_save()
    metrics, _ = take_step(trainer, batch_of(SEED + 1), state)
    result = trainer.export(), metrics
    trainer.close()
    return result


@pytest.mark.wide
@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "pipeline": 2}], ids=["one", "tp2-pp2"])
def test_a_refreshed_reference_is_resumed(
    writers: RankPool, tmp_path: Path, layout: dict[str, int]
) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    (tmp_path / "checkpoint").mkdir()
    config = config_of(
        tmp_path / "model",
        parallel=layout,
        model={"reference_refresh_every": 1, "reference_offload": True},
        optimizer={"name": "adam", "lr": 1e-2},
        algorithm={"reference_kl": {"coef": 0.1}},
    )
    world = config.parallel.world_size
    straight = writers.run(two_steps, world, config, str(tmp_path / "checkpoint"), False)
    resumed = writers.run(two_steps, world, config, str(tmp_path / "checkpoint"), True)
    for (want, rows), (got, again) in zip(straight, resumed, strict=True):
        assert again == rows
        for name, weight in want.items():
            assert torch.equal(got[name], weight), name
    (rows,) = [rows for _, rows in straight if rows]
    assert rows[0]["reference/kl"] == 0.0  # the reference is the policy that step 2 started from
    assert rows[1]["reference/kl"] > 0.0
