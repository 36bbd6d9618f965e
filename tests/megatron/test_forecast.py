"""The entropy forecast of the real trainer: its push is that of the method, and every layout
forecasts the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.steps import log_prob_pass, plan_of
from torch import Tensor

from megatron_stare.config.load import build_method
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.step.diagnostics import push_of
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch

TEMPERATURE = 0.8
SEED, SIZE, BUDGET = 3, 10, 40


def config_of(path: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "batch": {"prompts": SIZE // 2, "samples_per_prompt": 2, "micro_batch_tokens": BUDGET},
            "rollout": {"temperature": TEMPERATURE, "max_prompt_tokens": 12, "max_new_tokens": 12},
            "algorithm": {
                "name": "stare",
                "variant": "C2",
                "entropy_target": 100.0,
                "amplify": 2.0,
                "share": 0.2,
            },
            "optimizer": {"name": "sgd", "lr": 1e-2, "weight_decay": 0.0},
            **sections,
        }
    )


def one_rank(
    rank: int, init: str, config: Config, state: dict[str, float] | None = None
) -> dict[str, Any]:
    """A step's metrics (on the reporting rank), this rank's tokens before and entropies after it,
    and the tokens that the method selected. `state`: of the method before it; None: as a run
    begins."""
    worker = Trainer(resolve_run(config), rank, init)
    batch = random_batch(SEED, SIZE)
    batch.step = 1
    plan = plan_of(config, batch)
    log_prob_pass(worker, batch, plan)
    worker.measure(worker.method.initial_state() if state is None else state)
    before, selected = None, None
    if (measured := worker.step.measured) is not None:
        before = measured.tokens
        codes = worker.method.selected(before, measured.statistics)
        selected = dict(zip(before.index.tolist(), codes.tolist(), strict=True))
    result = worker.update()
    log_prob_pass(worker, batch, plan)
    after = worker.step.measured.tokens.entropy if worker.step.measured is not None else None
    worker.close()
    metrics, state = result or (None, None)
    found = {"metrics": metrics, "state": state, "before": before, "after": after}
    return found | {"selected": selected}


def watched(metrics: dict[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(("forecast/", "gradient/"))
    }


def of_selection(tokens: TokenBatch) -> dict[str, float]:
    """Precisions, sums of A Phi and the norm of the gradient in the logits, of config_of's STARE,
    token by token."""
    counted = tokens.loss_mask.nonzero().squeeze(1)
    log_p, entropy, advantage, p2, p2_log_p = (
        x[counted].double()
        for x in (
            tokens.old_log_prob,
            tokens.entropy,
            tokens.advantage,
            tokens.sum_p2,
            tokens.sum_p2_log_p,
        )
    )
    phi = log_p.exp() * (log_p + entropy) - (p2_log_p + entropy * p2)
    weight, found = torch.ones_like(log_p), {}
    for name, sign, factor in (("plus", 1, 2.0), ("minus", -1, 0.9)):
        side = (sign * advantage > 0).nonzero().squeeze(1)
        rarest = side[log_p[side].argsort()[: math.ceil(0.2 * len(side) - 1e-6)]]
        weight[rarest] = factor
        found[f"forecast/precision_{name}"] = float((phi[rarest] < -3e-6).double().mean())
        found[f"forecast/a_phi_{name}"] = float((advantage * phi)[rarest].sum()) / TEMPERATURE**2
    square = (weight * advantage / len(counted)) ** 2 * (1 - 2 * log_p.exp() + p2)
    return found | {"gradient/logit_norm": float(square.sum().sqrt()) / TEMPERATURE}


@pytest.mark.distributed
def test_every_layout_forecasts_and_measures_the_same(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    every = {"observability": {"measured_every": 1}}
    (alone,) = ranks.run(one_rank, 1, config_of(tmp_path, **every))
    want = watched(alone["metrics"])
    assert len(want) == 63
    by_hand = of_selection(alone["before"])
    assert {name: want[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-4)
    assert (
        0
        < want["gradient/logit_norm_low"]
        < want["gradient/logit_norm"]
        < want["gradient/logit_norm_high"]
    )
    assert want["forecast/mass_rare_plus"] > 0 > want["forecast/mass_rare_minus"]
    # the gate is open: L+ is amplified
    assert want["forecast/entropy_change"] > want["forecast/plain_change"]
    change = (alone["after"] - alone["before"].entropy).double().mean()
    assert want["forecast/measured_change"] == pytest.approx(float(change), rel=1e-6)
    assert abs(float(change)) > 1e-5
    for parallel in ({"tensor": 2}, {"data": 2}, {"pipeline": 2}):
        results = ranks.run(one_rank, 2, config_of(tmp_path, parallel=parallel, **every))
        (got,) = [watched(r["metrics"]) for r in results if r["metrics"] is not None]
        assert got == pytest.approx(want, rel=2e-4, abs=1e-6), parallel


@pytest.mark.distributed
def test_predictive_control_forecasts_as_the_trainer_does_and_learns_what_it_measures(
    ranks, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen2_tied")
    settings = {"name": "stare_predictive", "entropy_target": 5.0, "share": 0.3, "amplify": 2.0}
    states = []
    for parallel in ({}, {"tensor": 2}, {"data": 2}, {"pipeline": 2}):
        size = 2 if parallel else 1
        results = ranks.run(
            one_rank, size, config_of(tmp_path, algorithm=settings, parallel=parallel)
        )
        ((metrics, state),) = [
            (r["metrics"], r["state"]) for r in results if r["metrics"] is not None
        ]
        forecast = state["forecast"] / TEMPERATURE**2
        assert forecast == pytest.approx(metrics["forecast/entropy_change"], rel=1e-4)
        assert metrics["forecast/entropy_change"] > metrics["forecast/plain_change"]
        assert (state["measured"], state["pending"], state["steps"]) == (1, 0, 1)
        begun = metrics["entropy/mean"] + metrics["forecast/measured_change"]
        assert state["level"] == pytest.approx(begun, rel=1e-6)
        assert state["kappa"] * state["forecast"] + state["drift"] == pytest.approx(
            metrics["forecast/measured_change"], rel=1e-2
        )
        states.append(state)
    for state in states[1:]:
        assert state == pytest.approx(states[0], rel=2e-3, abs=1e-6)


def not_taken(rank: int, init: str, config: Config) -> tuple[float, float]:
    """Returns the entropy changes that predictive control expects after two updates, of which the
    first is held back by its gradient norm."""
    worker, expected = Trainer(resolve_run(config), rank, init), []
    fitted = {"measured": 9.0, "kappa": 0.5, "spread": 0.0, "spread_drift": 0.0}
    for limit in (0.0, math.inf):
        batch = random_batch(SEED, SIZE)
        batch.step = 1
        log_prob_pass(worker, batch, plan_of(config, batch))
        worker.measure({**worker.method.initial_state(), **fitted})
        result = worker.update(0, None, (), limit)
        assert result is not None and result[0].get("update/held", 0.0) == float(limit == 0)
        expected.append(result[1]["pending"])
    worker.close()
    return expected[0], expected[1]


@pytest.mark.distributed
def test_control_expects_no_change_of_an_update_not_taken_in_a_step_without_measurement(
    ranks, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen2_tied")
    settings = {"name": "stare_predictive", "entropy_target": 5.0, "measure_every": 2}
    ((held, taken),) = ranks.run(not_taken, 1, config_of(tmp_path, algorithm=settings))
    assert held == 0 != taken


@pytest.mark.distributed
def test_predictive_control_chooses_the_same_weights_in_every_layout(ranks, tmp_path: Path) -> None:
    """With a fit, W and M of a step follow from its forecast, within float32's rounding of the
    tokens' numbers; and the same tokens get them."""
    save_model(tmp_path, "qwen2_tied")
    settings = {
        "name": "stare_predictive",
        **{"entropy_target": 2.8, "share": 0.3, "amplify_max": 50.0, "attenuate_min": 1e-3},
    }
    state = build_method(settings).initial_state() | {
        **{"steps": 9.0, "measured": 9.0, "begun": 1.0, "kappa": 0.5, "square": 1e-20},
        **{"spread": 1.0, "spread_drift": 1.0, "level": 2.78, "held": 0.01},
    }
    found = []
    for parallel in ({}, {"tensor": 2}, {"pipeline": 2}, {"data": 2}, {"tensor": 2, "pipeline": 2}):
        config = config_of(tmp_path, algorithm=settings, parallel=parallel)
        results = ranks.run(one_rank, config.parallel.world_size, config, state)
        (after,) = [each["state"] for each in results if each["state"] is not None]
        chosen = [each["selected"] for each in results if each["selected"] is not None]
        found.append((after, {token: code for part in chosen for token, code in part.items()}))
    alone, chosen_alone = found[0]
    assert alone["active"] == 1 and 1 < alone["amplify"] < 50 and 1e-3 < alone["attenuate"] < 1
    assert {-1, 0, 1} <= set(chosen_alone.values())
    for other, chosen in found[1:]:
        assert chosen == chosen_alone
        for name in ("active", "gate", "amplify", "attenuate", "forecast", "wanted", "held"):
            assert other[name] == pytest.approx(alone[name], rel=1e-5), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("section", "recorded", "more"),
    [
        ({"entropy_forecast": False, "measured_every": 1}, set(), {}),
        # the log-prob pass computes what a forecast needs, for the method
        ({"entropy_forecast": False}, set(), {"algorithm": {"name": "opefo"}}),
        # and measures the change, for the method
        (
            {"entropy_forecast": False},
            {"forecast/measured_change"},
            {"algorithm": {"name": "stare_predictive"}},
        ),
        (
            {"entropy_forecast": False},
            set(),
            {"algorithm": {"name": "stare_predictive", "measure_every": 2}},
        ),
        ({"measured_every": 0}, {"forecast/entropy_change"}, {}),
        ({"measured_every": 2}, {"forecast/entropy_change"}, {}),
    ],
)
def test_switches(ranks, tmp_path: Path, section: dict, recorded: set[str], more: dict) -> None:
    save_model(tmp_path, "qwen2_tied")
    (alone,) = ranks.run(one_rank, 1, config_of(tmp_path, observability=section, **more))
    names = watched(alone["metrics"]).keys()
    assert names & {"forecast/entropy_change", "forecast/measured_change"} == recorded


def tokens_of(advantages: list[float], lengths: list[int]) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    n = len(sequence)
    old = -5 * torch.rand(n, generator=generator) ** 2
    return TokenBatch(
        log_prob=old,
        old_log_prob=old,
        rollout_log_prob=old,
        entropy=torch.rand(n, generator=generator),
        advantage=torch.tensor(advantages)[sequence],
        loss_mask=torch.ones(n, dtype=torch.bool),
        sequence=sequence,
        position=torch.zeros(n, dtype=torch.int64),
        index=torch.arange(n),
        num_sequences=len(lengths),
        sequence_lengths=counts,
    )


class _Half:
    """All that `push_of` asks of a micro-batch."""

    def __init__(self, start: int, stop: int) -> None:
        self.span = slice(start, stop)


def push(name: str, tokens: TokenBatch, **settings: Any) -> tuple[Tensor, Any, Any, Any]:
    """The push on every token, and the method with its statistics and state."""
    method = build_method({"name": name, **settings})
    known = gather_statistics(lambda known: method.requests(tokens, known), None)
    start = {key: torch.tensor(x, dtype=torch.float64) for key, x in method.initial_state().items()}
    state = method.control(start, known)

    def loss_of(
        log_prob: Tensor, entropy: Tensor, micro: _Half
    ) -> tuple[Tensor, dict[str, Tensor]]:
        part = tokens.select(torch.arange(micro.span.start, micro.span.stop))
        part.log_prob = log_prob
        terms = method.token_loss(part, known, state)
        return (method.coefficients(part, known) * terms.loss).sum(), {}

    n = len(tokens.index)
    return push_of(tokens, [_Half(0, n // 2), _Half(n // 2, n)], loss_of), method, known, state


def test_the_push_is_weight_times_advantage_over_tokens() -> None:
    tokens = tokens_of([1.0, -0.5, 0.0, 0.7], [9, 14, 6, 11])
    got, method, known, state = push(
        "stare", tokens, variant="C2", amplify=1.7, attenuate=0.4, entropy_target=9.0
    )
    weights = method.weights(tokens, known, state)
    assert sorted(set(weights.tolist())) == pytest.approx([0.4, 1.0, 1.7])
    torch.testing.assert_close(got, weights * tokens.advantage / 40)


def test_the_push_divides_as_the_aggregation_does() -> None:
    tokens = tokens_of([1.0, -0.5, 0.0, 0.7], [9, 14, 6, 11])
    lengths = torch.tensor([9.0, 14.0, 6.0, 11.0])[tokens.sequence]
    torch.testing.assert_close(push("grpo", tokens)[0], tokens.advantage / (4 * lengths))
    torch.testing.assert_close(push("gspo", tokens)[0], tokens.advantage / (4 * lengths))


def test_what_a_mask_silences_is_not_pushed() -> None:
    tokens = tokens_of([1.0, -0.5, 0.0, 0.7], [9, 14, 6, 11])
    got, method, known, _ = push("stapo", tokens, tau_p=0.5)
    kept = method.narrowed(tokens, known).kept.loss_mask
    assert 0 < int((~kept).sum()) < 20
    torch.testing.assert_close(got, torch.where(kept, tokens.advantage, 0.0) / kept.sum())
