"""STARE with predictive control: its forecast, weights and fit, and what it does without a fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.token_batches import ask, softmax_batch, state_of
from torch import Tensor

from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.stare_predictive import ENOUGH, StarePredictive
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Mean, Threshold, scalar

MIXED = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
THRESHOLDS = {
    name: Threshold(*torch.ones(3, dtype=torch.int64), torch.tensor(1.0))
    for name in ("plus", "minus")
}
NAMES = ("entropy", "predictive/plain", "predictive/plus", "predictive/minus")


def method(**settings: Any) -> StarePredictive:
    return StarePredictive(**{"entropy_target": 0.3, **settings})


def sampled() -> tuple[Tensor, TokenBatch]:
    return softmax_batch(MIXED, length=12, vocabulary=6)


def forecast_and_change(
    own: StarePredictive, logits: Tensor, batch: TokenBatch
) -> tuple[float, float, Any]:
    """Returns the forecast, the rate at which a small step of gradient descent on the logits of the
    whole loss changes the sum of the entropies, and the statistics."""
    known = ask(own, batch)
    state = own.control(state_of(own), known)
    loss = own.token_loss(batch, known, state).loss
    (slope,) = torch.autograd.grad((own.coefficients(batch, known) * loss).sum(), logits)
    rate = 1e-4
    log_p = (logits.detach() - rate * slope).log_softmax(-1)
    change = (-(log_p.exp() * log_p).sum(-1) - batch.entropy).sum() / rate
    return float(state["forecast"]), float(change), known


def fitted(own: StarePredictive, kappa: float, drift: float, **more: float) -> State:
    """The state after enough measurements of a noiseless line."""
    values = {
        **own.initial_state(),
        "steps": 9.0, "measured": 9.0, "kappa": kappa, "drift": drift, "square": 1e-20,
        "spread": 1.0, "spread_drift": 1.0, "held": 0.01, "level": 0.2, "begun": 1.0, **more,
    }  # fmt: skip
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in values.items()}


def statistics(*values: float) -> dict[str, Any]:
    return {
        name: torch.tensor(x, dtype=torch.float64) for name, x in zip(NAMES, values, strict=True)
    }


@pytest.mark.parametrize(
    "weights", [{"amplify": 1.0, "attenuate": 1.0}, {"amplify": 2.5, "attenuate": 0.4}]
)
@pytest.mark.parametrize("variant", ["O1", "C2"])
def test_the_forecast_is_the_first_order_change_of_the_entropy(
    weights: dict[str, float], variant: str
) -> None:
    own = method(entropy_target=5.0, share=0.3, variant=variant, **weights)  # the gate is open
    logits, batch = sampled()
    forecast, change, known = forecast_and_change(own, logits, batch)
    assert forecast == pytest.approx(change, rel=1e-3)
    plain = float(known["predictive/plain"])
    assert (forecast > plain + 1e-3) == (weights["amplify"] > 1)


def test_only_tokens_whose_sign_is_certain_are_weighed() -> None:
    own = method(entropy_target=5.0, share=0.9, amplify=2.0, attenuate=0.5)
    _, batch = sampled()
    known = ask(own, batch)
    weights = own.weights(batch, known, own.control(state_of(own), known))
    log_p = batch.old_log_prob
    phi = log_p.exp() * (log_p + batch.entropy) - (
        batch.sum_p2_log_p + batch.entropy * batch.sum_p2
    )
    chosen = weights != 1
    assert 0 < int(chosen.sum()) < int((own.selected(batch, known) != 0).sum())
    assert bool((phi[chosen] < 0).all())
    expected = torch.where(batch.advantage > 0, 2.0, 0.5)[chosen]
    assert torch.equal(weights[chosen].double(), expected.double())
    assert float(known["predictive/plus"]) > 0 > float(known["predictive/minus"])


@pytest.mark.parametrize("level", [0.29, 0.3, 0.301])
def test_the_weights_meet_the_demand_and_are_the_least_that_do(level: float) -> None:
    own = method(floor=0.0, amplify_max=50.0, attenuate_min=1e-3)
    before = fitted(own, 0.5, -0.0004, level=level)
    state = own.control(before, statistics(level, -0.004, 0.01, -0.006))
    wanted = 0.2 * (0.3 - level)
    w, m = float(state["amplify"]), float(state["attenuate"])
    u = -0.004 + (w - 1) * 0.01 + (m - 1) * -0.006
    assert float(state["active"]) == 1 and float(state["forecast"]) == pytest.approx(u)
    assert 0.5 * u - 0.0004 == pytest.approx(wanted, abs=1e-12)
    for other in np.linspace(1e-3, 1, 200):  # every M, with the W that then meets the demand
        needed = 1 + ((wanted + 0.0004) / 0.5 + 0.004 - (other - 1) * -0.006) / 0.01
        if needed >= 1:
            assert math.hypot(w - 1, m - 1) <= math.hypot(needed - 1, other - 1) + 1e-9


@pytest.mark.parametrize(
    ("bounds", "at_bound"),
    [({"amplify_max": 1.2}, "amplify"), ({"attenuate_min": 0.85}, "attenuate")],
)
def test_what_a_bound_cuts_off_the_other_weight_takes(
    bounds: dict[str, float], at_bound: str
) -> None:
    own = method(floor=0.0, **{"amplify_max": 9.0, "attenuate_min": 0.01, **bounds})
    before = fitted(own, 0.5, 0.0, level=0.29)
    state = own.control(before, statistics(0.29, -0.002, 0.01, -0.01))
    assert float(state[at_bound]) == pytest.approx(next(iter(bounds.values())))
    assert 0.5 * float(state["forecast"]) == pytest.approx(0.2 * 0.01, abs=1e-12)


def test_a_demand_beyond_both_bounds_takes_both_and_one_below_takes_none() -> None:
    own = method(trust=1.0)
    state = own.control(fitted(own, 0.5, 0.0), statistics(0.1, -0.5, 0.01, -0.01))
    assert (float(state["amplify"]), float(state["attenuate"])) == (3.0, 0.3)
    assert float(state["wanted"]) == pytest.approx(0.033 * 0.3)  # the largest rise
    state = own.control(fitted(own, 0.5, 0.0), statistics(2.0, -0.01, 0.01, -0.01))
    assert (float(state["amplify"]), float(state["attenuate"])) == (1.0, 1.0)
    assert float(state["wanted"]) == pytest.approx(0.2 * (0.3 - 2.0))  # a fall has no bound


def test_weights_with_a_floor_under_the_hold() -> None:
    """Worked by hand: G+ .01, G- -.0001, mean G+ .01, floor .15: D = 1.0226e-4."""
    own = method()
    before = fitted(own, 0.5, 0.0, level=0.3)
    state = own.control(before, statistics(0.3, -0.005, 0.01, -0.0001))
    size = 0.01**2 + 0.0001**2 + 0.0015**2
    assert float(state["amplify"]) == pytest.approx(1 + 0.01 * 0.005 / size)
    assert float(state["attenuate"]) == pytest.approx(1 - 0.0001 * 0.005 / size)
    # below the floor there is no hold
    state = own.control(fitted(own, 0.5, 0.0), statistics(0.2, -0.005, 0.001, -0.01))
    assert float(state["held"]) == pytest.approx(0.9 * 0.01 + 0.1 * 0.001)
    assert float(state["active"]) == 0


def test_a_gain_that_is_not_known_well_is_not_used() -> None:
    own = method()
    for spread, active in ((0.9, 1.0), (1.1, 0.0)):  # kappa 0.5 is two errors at 1
        before = fitted(own, 0.5, 0.0, square=0.0625, spread=spread)
        state = own.control(before, statistics(0.2, -0.005, 0.01, -0.01))
        assert float(state["active"]) == active
        expected = 0.5 * float(state["forecast"]) if active else 0.0
        assert float(state["pending"]) == pytest.approx(expected)
    before = fitted(own, 0.5, -0.003)
    state = own.control(before, statistics(0.2, -0.005, 0.01, -0.01))
    assert float(state["pending"]) == pytest.approx(0.5 * float(state["forecast"]) - 0.003)


def test_the_target_of_every_step() -> None:
    own = method(entropy_target=0.4, target_end=0.2, ramp_start=2, ramp_steps=4)
    state, logged, wanted = state_of(own), [], []
    for _ in range(8):
        known = statistics(0.4, -0.005, 0.01, -0.01)
        state = own.control({**state, "level": torch.tensor(0.4, dtype=torch.float64)}, known)
        logged.append(float(own.target(state["steps"] - 1)))
        wanted.append(float(state["wanted"]))
    assert logged == pytest.approx([0.4, 0.4, 0.4, 0.35, 0.3, 0.25, 0.2, 0.2])
    # the step from one target to the next, and a fifth of the gap; the level stays at 0.4
    gaps = [0.2 * (target - 0.4) for target in logged]
    moves = [0.0, 0.0, -0.05, -0.05, -0.05, -0.05, 0.0, 0.0]
    assert wanted == pytest.approx([g + m for g, m in zip(gaps, moves, strict=True)], abs=1e-3)
    metrics = own.metrics({**known, "tokens": torch.tensor(1.0), **THRESHOLDS}, state)
    assert float(metrics["entropy/target"]) == pytest.approx(0.2)


def test_an_update_that_was_not_taken_changes_no_expectation() -> None:
    own = method(trust=0.15)
    state = fitted(own, 0.5, 0.0)
    for _ in range(10):
        state = own.control(state, statistics(0.2, -0.005, 0.01, -0.01))
        assert float(state["pending"]) != 0
        state = own.observe(state, None)
    assert float(state["level"]) == pytest.approx(0.2)
    assert float(state["measured"]) == 9


def test_a_first_batch_without_numbers_does_not_begin_the_filter() -> None:
    own = method()
    state = own.control(state_of(own), statistics(math.nan, 0.0, 0.01, -0.01))
    state = own.observe(state, torch.tensor(0.1, dtype=torch.float64))
    assert float(state["measured"]) == 0  # no forecast was made for it
    state = own.control(state, statistics(0.4, 0.0, 0.01, -0.01))
    assert float(state["level"]) == pytest.approx(0.4)


def test_misses_of_zero_do_not_end_the_fit() -> None:
    own = method()
    state = {**state_of(own), "usable": torch.tensor(1.0, dtype=torch.float64)}
    for _ in range(6):
        state = own.observe(state, torch.tensor(0.0, dtype=torch.float64))
    drawn = np.random.default_rng(0)
    for _ in range(40):
        state["forecast"] = torch.tensor(drawn.normal(0, 1e-2), dtype=torch.float64)
        state = own.observe(state, 0.4 * state["forecast"])
    assert float(state["kappa"]) == pytest.approx(0.4, rel=0.05)


def test_forgetting_without_news_stays_finite_and_an_old_fit_still_learns() -> None:
    own = method()
    state = fitted(own, 0.5, 0.0, square=1e-8, usable=1.0, forecast=0.001)
    for _ in range(5000):
        state = own.observe(state, torch.tensor(0.0005, dtype=torch.float64))
    assert max(float(state["spread"]), float(state["spread_drift"])) <= 1e10
    assert float(state["square"]) < 1e-12  # the last hundred steps, not all
    assert all(math.isfinite(float(x)) for x in state.values())


def test_the_forecast_leaves_out_what_the_loss_leaves_out() -> None:
    """With a correction: masked tokens are not in it, and weights are."""
    for correction in (
        Correction(mode="mask", low=0.97, high=1.03),
        Correction(mode="icepop", low=0.97, high=1.03),
        Correction(mode="truncate", high=1.5, normalise=True),
    ):
        own = method(
            entropy_target=5.0, share=0.3, amplify=2.5, attenuate=0.4, correction=correction
        )
        logits, batch = sampled()
        generator = torch.Generator().manual_seed(1)
        noise = 0.1 * torch.randn(len(batch.index), generator=generator)
        batch.rollout_log_prob = batch.old_log_prob.float() + noise
        forecast, change, _ = forecast_and_change(own, logits, batch)
        assert forecast == pytest.approx(change, rel=1e-3)


def test_the_state_has_the_same_bits_in_any_order_of_the_tokens() -> None:
    """Ranks and micro-batches hold the tokens in other orders."""
    own = method(share=0.3, amplify_max=50.0, attenuate_min=1e-3)
    _, batch = softmax_batch(20 * MIXED, length=12, vocabulary=6)
    before = fitted(own, 0.5, 0.0, level=0.29)
    states = []
    for seed in range(8):
        order = torch.randperm(len(batch.index), generator=torch.Generator().manual_seed(seed))
        here = batch.select(order)
        state = own.control(before, ask(own, here))
        change = {"change": Mean(0.01 * here.entropy.sin(), here.loss_mask, exact=True)}
        state = own.observe(state, scalar(answer(change, None), "change"))
        states.append({name: float(value) for name, value in state.items()})
    assert states[0]["active"] == 1 and float(state["measured"]) == 10
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("forget", [1.0, 0.95])
def test_the_fit_is_weighted_least_squares(forget: float, monkeypatch: Any) -> None:
    import megatron_stare.algorithms.stare_predictive as module

    monkeypatch.setattr(module, "_CLIP", 1e9)
    own = method(forget=forget)
    state = {**state_of(own), "usable": torch.tensor(1.0, dtype=torch.float64)}
    drawn = np.random.default_rng(0)
    u = drawn.normal(0, 1e-2, 60)
    y = 0.4 * u - 3e-4 + drawn.normal(0, 1e-3, 60)
    for forecast, change in zip(u, y, strict=True):
        state["forecast"] = torch.tensor(forecast, dtype=torch.float64)
        state = own.observe(state, torch.tensor(change, dtype=torch.float64))
    root = np.sqrt(forget ** np.arange(59, -1, -1.0))
    x = np.stack([u, np.ones(60)], 1)
    kappa, drift = np.linalg.lstsq(x * root[:, None], y * root, rcond=None)[0]
    assert float(state["kappa"]) == pytest.approx(kappa, rel=1e-4)
    assert float(state["drift"]) == pytest.approx(drift, rel=1e-3)
    matrix = np.linalg.inv((x * root[:, None]).T @ (x * root[:, None]))
    assert float(state["spread"]) == pytest.approx(matrix[0, 0], rel=1e-3)
    assert float(state["cross"]) == pytest.approx(matrix[0, 1], rel=1e-2)


def test_one_wild_measurement_moves_the_fit_by_a_bounded_amount() -> None:
    own = method()
    state = fitted(own, 0.5, 0.0, square=1e-6, usable=1.0, forecast=1.0)
    wild = own.observe(state, torch.tensor(1e3, dtype=torch.float64))
    assert abs(float(wild["kappa"]) - 0.5) <= 3e-3


def plant(
    own: StarePredictive, kappa: float, steps: int = 300, unseen: float = 0.0
) -> dict[str, Any]:
    """Runs the controller on a linear plant whose measured changes and entropies have noise.
    `unseen`: what the entropy changes beside what is measured on the step's own tokens."""
    drawn = np.random.default_rng(1)
    state, entropy = state_of(own), 0.6
    found: dict[str, list[float]] = {"entropy": [], "active": [], "target": []}
    for step in range(steps):
        plain, plus, minus = -0.008 + drawn.normal(0, 2e-3), 0.012, -0.004
        batch = entropy + drawn.normal(0, 4e-3)
        state = own.control(state, statistics(batch, plain, plus, minus))
        gate = float(state["gate"])
        u = plain + gate * (
            (float(state["amplify"]) - 1) * plus + (float(state["attenuate"]) - 1) * minus
        )
        change = kappa * u - 2e-4 + drawn.normal(0, 3e-4)
        entropy += change + unseen
        if step % own.measure_every == 0:
            state = own.observe(state, torch.tensor(change, dtype=torch.float64))
        # as a checkpoint does
        state = {name: torch.tensor(float(x), dtype=torch.float64) for name, x in state.items()}
        found["entropy"].append(entropy)
        found["active"].append(float(state["active"]))
        found["target"].append(float(own.target(state["steps"])))
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("end", [None, 0.45, 0.15])
@pytest.mark.parametrize("unseen", [0.0, 6e-4, -6e-4])
def test_on_a_linear_plant_the_entropy_follows_its_target(
    end: float | None, every: int, unseen: float
) -> None:
    ramp = {} if end is None else {"target_end": end, "ramp_start": 420, "ramp_steps": 100}
    found = plant(method(measure_every=every, **ramp), kappa=0.4, steps=550, unseen=unseen)
    late = slice(410, None)
    assert abs(np.mean((found["entropy"] - found["target"])[late])) < 0.0015
    assert found["active"][late].mean() > 0.99
    assert np.sqrt(np.mean((found["entropy"] - found["target"])[late] ** 2)) < 0.006
    assert found["target"][-1] == pytest.approx(end or 0.3)


def test_a_forecast_of_the_wrong_sign_leaves_the_gate() -> None:
    """The weights then lower the entropy, which no controller of this kind can hold."""
    found = plant(method(), kappa=-0.4, steps=60)
    assert found["active"][ENOUGH:].max() == 0


def test_before_the_fit_the_weights_are_stares_behind_its_gate() -> None:
    own = method(amplify=1.7, attenuate=0.6)
    for entropy, gate in ((0.2, 1.0), (0.4, 0.0)):
        state = own.control(state_of(own), statistics(entropy, -0.01, 0.01, -0.01))
        assert [float(state[n]) for n in ("active", "gate", "amplify", "attenuate")] == [
            0, gate, 1.7, 0.6,
        ]  # fmt: skip
        assert float(state["forecast"]) == pytest.approx(-0.01 + gate * (0.7 * 0.01 + 0.4 * 0.01))
    # the gate reads the batch's entropy, not the filtered one
    state = own.control(
        {**fitted(own, 0.5, 0.0, measured=1.0, level=0.5)}, statistics(0.29, -0.01, 0.01, -0.01)
    )
    assert float(state["level"]) > 0.3 and float(state["gate"]) == 1.0
    # nothing to hold on to, whatever the fit says
    state = own.control(fitted(own, 0.5, 0.0), statistics(0.2, -0.01, 0.0, -0.01))
    assert float(state["active"]) == 0


@pytest.mark.parametrize("place", range(4))
def test_statistics_that_are_not_finite_change_nothing_but_the_count(place: int) -> None:
    own = method()
    values = [0.25, -0.01, 0.01, -0.01]
    values[place] = math.nan
    before = fitted(own, 0.5, 0.0)
    after = own.control(before, statistics(*values))
    assert {n for n in before if not torch.equal(before[n], after[n])} == {"steps"}
    again = own.observe(
        {**before, "usable": torch.ones_like(before["steps"])},
        torch.tensor(math.nan, dtype=torch.float64),
    )
    assert all(torch.equal(before[name], again[name]) for name in before.keys() - {"usable"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"entropy_target": None}, "needs an entropy_target"),
        ({"adaptive": True}, "chooses the weights"),
        ({"gate": "token"}, "chooses the weights"),
        ({"gate_entropy": "kept"}, "chooses the weights"),
        ({"aggregation": "micro_batch_mean"}, "micro_batch_mean"),
        ({"variant": "O2"}, "O1 and C2"),
        ({"amplify": 4.0}, "amplify_max"),
        ({"attenuate": 0.2}, "attenuate_min"),
        ({"approach": 0.0}, "approach must lie"),
        ({"trust": 1.5}, "trust must lie"),
        ({"measure_every": 0}, "measure_every at least 1"),
        ({"target_end": 0.2}, "ramp_steps"),
        ({"ramp_steps": 10}, "ramp_steps"),
        ({"target_end": -1.0, "ramp_steps": 10}, "above 0 nats"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        method(**settings)
