"""Methods that came after STARE: worked numbers, controllers step by step, and what each claims."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from support.token_batches import (
    ask,
    loss_and_gradient,
    softmax_batch,
    state_of,
    token_batch,
)
from torch import Tensor

from megatron_stare.algorithms import METHODS
from megatron_stare.algorithms.entropic import Entropic
from megatron_stare.algorithms.gepo import Gepo
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.grpo_dropout import GrpoDropout
from megatron_stare.algorithms.method import Method, State
from megatron_stare.algorithms.opefo import Opefo
from megatron_stare.algorithms.repo_r import RepoR
from megatron_stare.algorithms.reweighted import Reweighted
from megatron_stare.algorithms.steer import Steer
from megatron_stare.config.load import build_method
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics

MIXED = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
REPO = {"name": "repo_r", "zeta": 0.05}
# settings with which each changes something in a batch of a few dozen tokens
NEWER: dict[str, dict[str, Any]] = {
    "clip_b": {"mu": 0.5},
    "clip_v": {"mu": 0.3, "max_share": 0.1},
    "entropic": {"probable_above": 0.5},
    "gepo": {},
    "grpo_dropout": {},
    "opefo": {},
    "repo_r": {"zeta": 0.05},
    "stare_predictive": {"entropy_target": 5.0, "share": 0.4, "amplify": 2.0, "attenuate": 0.5},
    "steer": {},
}


def controlled(method: Method, entropies: list[float]) -> list[State]:
    """The state after each of these mean entropies."""
    states, state = [], state_of(method)
    for entropy in entropies:
        state = method.control(state, {"entropy": torch.tensor(entropy, dtype=torch.float64)})
        states.append(state)
    return states


@pytest.mark.parametrize("name", NEWER)
def test_no_other_method_pushes_the_same_way(name: str) -> None:
    batch = token_batch(MIXED, method=Grpo())
    own = loss_and_gradient(build_method({"name": name, **NEWER[name]}), batch)[1]
    for other in METHODS.keys() - {name}:
        settings = {"entropy_target": None} if other in ("stare", "stapo_stare") else {}
        settings |= {"length_norm": 12} if other == "dr_grpo" else {}
        settings |= NEWER.get(other, {})
        gradient = loss_and_gradient(build_method({"name": other, **settings}), batch)[1]
        cosine = torch.nn.functional.cosine_similarity(own, gradient, dim=0)
        assert float(cosine) < 0.9999, other


def entropy_after(method: Method, lr: float) -> float:
    """Change of the mean entropy by one step of gradient descent on the logits."""
    logits, batch = softmax_batch(MIXED)
    statistics = ask(method, batch)
    loss = method.token_loss(batch, statistics, state_of(method, statistics)).loss
    (slope,) = torch.autograd.grad((method.coefficients(batch, statistics) * loss).sum(), logits)
    log_p = (logits.detach() - lr * slope).log_softmax(-1)
    return float(-(log_p.exp() * log_p).sum(-1).mean() - batch.entropy.mean())


def test_opefo_leaves_the_entropy_as_it_is_to_first_order() -> None:
    """A tenth of the step changes the entropy by a hundredth under OPEFO, and by a tenth under
    GRPO, whose step is no larger."""
    plain, own = Grpo(aggregation="token_mean"), Opefo()
    assert entropy_after(plain, 1.0) / entropy_after(plain, 0.1) == pytest.approx(10, rel=0.1)
    assert entropy_after(own, 1.0) / entropy_after(own, 0.1) == pytest.approx(100, rel=0.1)
    assert abs(entropy_after(own, 0.1)) < abs(entropy_after(plain, 0.1)) / 30


def test_opefo_on_a_policy_that_is_nearly_uniform() -> None:
    """Every Phi is near 0, of either sign, and lambda stays within [-1, 1]."""
    method = Opefo()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        batch = token_batch(MIXED, method=method, lengths=[1] * 8, seed=seed)
        log_p = (0.02 * torch.randn(8, 4000, generator=generator)).log_softmax(-1)
        p = log_p.exp()
        batch.old_log_prob, batch.entropy = log_p[:, 0], -(p * log_p).sum(-1)
        batch.sum_p2, batch.sum_p2_log_p = (p * p).sum(-1), (p * p * log_p).sum(-1)
        assert -1 <= float(method.imbalance(ask(method, batch))) <= 1


@pytest.mark.parametrize(
    "settings",
    [{"name": "dg", "entropy_target": 0.3}, {"name": "entropic"}, {**REPO, "entropy_target": 0.3}],
    ids=lambda settings: settings["name"],
)
def test_a_controller_reads_the_entropy_of_all_tokens_with_loss(settings: dict[str, Any]) -> None:
    """Also of those that a correction removes; and its target is logged."""
    method = build_method({**settings, "correction": {"mode": "mask", "low": 0.95, "high": 1.05}})
    batch = token_batch(MIXED, method=method)
    statistics = ask(method, batch)
    assert float(statistics["with_loss"]) < len(batch.index)
    torch.testing.assert_close(float(statistics["entropy"]), float(batch.entropy.double().mean()))
    logged = method.metrics(statistics, state_of(method, statistics))
    assert logged["entropy/target"] == method.entropy_target


def test_opefo_where_no_token_changes_the_entropy() -> None:
    method = Opefo()
    batch = token_batch([1.0] * 8, method=method)
    statistics = ask(method, batch)
    assert float(method.imbalance(statistics)) == 0.0
    assert method.weights(batch, statistics, {}).tolist() == [1.0] * len(batch.index)


def test_repo_r_worked_numbers() -> None:
    """ln p of -2 and -0.1 and an entropy of 0.5, right and wrong; zeta 0.4."""
    batch = token_batch([1.0, 0.0], group_size=2, lengths=[2, 2])
    batch.old_log_prob = torch.tensor([-2.0, -0.1, -2.0, -0.1])
    batch.entropy = torch.full((4,), 0.5)
    batch.advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    for centred, want in ((True, [1.6, 0.84, 0.4, 1.16]), (False, [1.8, 1.04, 0.2, 0.96])):
        method = RepoR(zeta=0.4, centred=centred)
        assert method.weights(batch, {}, state_of(method)).tolist() == pytest.approx(want)
    # the entropy is that of the policy that selects
    batch.selection_entropy = torch.full((4,), 0.9)
    method = RepoR(zeta=0.4)
    found = method.weights(batch, {}, state_of(method)).tolist()
    assert found == pytest.approx([1.44, 0.68, 0.56, 1.32])
    # never below 0: the advantage keeps its sign
    method = RepoR(zeta=1.0, zeta_max=1.0, centred=False)
    assert method.weights(batch, {}, state_of(method)).tolist() == pytest.approx([3, 1.1, 0, 0.9])


def test_repo_r_doubles_halves_and_changes_its_sign() -> None:
    method = RepoR(zeta=0.02, zeta_min=0.01, zeta_max=0.05, entropy_target=1.0)
    entropies = [0.5, 0.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.0, math.nan, 0.5, 0.5, 0.5]
    want = [0.04, 0.05, 0.025, 0.0125, -0.01, -0.02, -0.04, -0.04, -0.04, -0.02, -0.01, 0.01]
    found = [float(state["zeta"]) for state in controlled(method, entropies)]
    assert found == pytest.approx(want)
    tiny = RepoR(zeta=1e-5, zeta_min=0.01, entropy_target=1.0)
    assert float(controlled(tiny, [0.5])[0]["zeta"]) == 0.01
    fixed = RepoR(zeta=0.02)
    assert float(controlled(fixed, [0.5])[0]["zeta"]) == 0.02


def test_entropic_is_a_controller_without_a_bound_on_its_sum() -> None:
    method = Entropic(entropy_target=0.5, proportional=2.0, integral=0.5)
    states = controlled(method, [0.4, 0.6, math.nan, 9.5, 0.3])
    assert [float(state["sum"]) for state in states] == pytest.approx([-0.1, 0, 0, 9, 8.8])
    # 2 e + 0.5 sum, cut at 1
    assert [float(state["alpha"]) for state in states] == pytest.approx([-0.25, 0.2, 0.2, 1, 1])


def test_entropic_weighs_probable_tokens_alone() -> None:
    """Above the target, right answers gain and wrong ones lose; a probability of 0.95 is not above
    the bound."""
    method = Entropic()
    batch = token_batch([1.0, 0.0], group_size=2, lengths=[3, 3])
    batch.old_log_prob = torch.tensor([0.97, 0.95, 0.2] * 2, dtype=torch.float64).log()
    batch.advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    state = state_of(method) | {"alpha": torch.tensor(0.3, dtype=torch.float64)}
    found = method.weights(batch, {}, state).tolist()
    assert found == pytest.approx([1.3, 1, 1, 0.7, 1, 1])


def test_gepo_moves_its_bounds() -> None:
    """Mean surprisals of 1, 2 and 6 over three groups, one of them without tokens in the second
    batch: means 3 and 1.5, standard deviations sqrt(14 / 3) and 0.5."""
    method = Gepo(rate=0.1)

    def answers(sums: list[float], tokens: list[float]) -> dict[str, Tensor]:
        return {"gepo/sum": torch.tensor(sums), "gepo/tokens": torch.tensor(tokens)}

    state = method.control(state_of(method), answers([2.0, 2.0, 18.0], [2.0, 1.0, 3.0]))
    sd = math.sqrt(14 / 3)
    assert float(state["low"]) == pytest.approx(3 - 0.2 * sd)
    assert float(state["high"]) == pytest.approx(3 + 0.3 * sd)
    later = method.control(state, answers([2.0, 2.0, 0.0], [2.0, 1.0, 0.0]))
    assert float(later["low"]) == pytest.approx(0.9 * (3 - 0.2 * sd) + 0.1 * 1.4)
    assert float(later["high"]) == pytest.approx(0.9 * (3 + 0.3 * sd) + 0.1 * 1.65)
    none = method.control(later, answers([0.0] * 3, [0.0] * 3))
    assert {name: float(x) for name, x in none.items()} == {
        name: float(x) for name, x in later.items()
    }


def test_gepo_weighs_groups() -> None:
    method = Gepo()
    batch = token_batch([1.0, 0.0] * 3, group_size=2, lengths=[1] * 6)
    batch.old_log_prob = -torch.tensor([0.5, 1.5, 2.0, 2.0, 5.0, 7.0])  # means 1, 2 and 6
    batch.advantage = torch.tensor([1.0, -1.0] * 3)
    state = {name: torch.tensor(x) for name, x in {"low": 1.1, "high": 5.9}.items()}
    weights = method.weights(batch, ask(method, batch), state)
    assert weights.tolist() == pytest.approx([0.5, 1, 1, 1, 1, 0.2])


def test_steer_worked_numbers() -> None:
    """|O| by plain arithmetic; the largest gets the least weight, under either map."""
    batch = token_batch([1.0, 0.0], group_size=2, lengths=[2, 2])
    p, entropy = [0.9, 0.1, 0.5, 0.2], [0.4, 0.9, 0.7, 1.2]
    batch.old_log_prob = torch.tensor(p, dtype=torch.float64).log()
    batch.entropy = torch.tensor(entropy, dtype=torch.float64)
    batch.advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    change = [abs((1 - x) * (math.log(x) + h)) for x, h in zip(p, entropy, strict=True)]
    low, high = min(change), max(change)
    linear, exponential = Steer(), Steer(map="exponential")
    found = linear.weights(batch, ask(linear, batch), {}).tolist()
    assert found == pytest.approx([1.2 - 0.4 * (x - low) / (high - low) for x in change])
    found = exponential.weights(batch, ask(exponential, batch), {}).tolist()
    assert found == pytest.approx([0.8 ** (x / high) for x in change])


@pytest.mark.parametrize("name", ["clip_b", "clip_v"])
def test_rounding_removes_no_token(name: str) -> None:
    """All tokens are alike but for the last digits of a float64."""
    method = build_method({"name": name, "mu": 1e-3})
    batch = token_batch(MIXED, method=method)
    same = 1 + 1e-14 * torch.rand(len(batch.index), dtype=torch.float64)
    batch.old_log_prob, batch.entropy = -0.7 * same, 0.3 * same
    batch.sum_p2, batch.sum_p2_log_p = 0.5 * same, -0.1 * same
    statistics = ask(method, batch)
    assert float(statistics["clip/variance"]) > 0
    assert float(statistics["tokens"]) == len(batch.index)


def test_no_gradient_flows_through_a_weight() -> None:
    """Not even where a method's own weights read the log-prob that is trained."""

    @dataclass(frozen=True, kw_only=True)
    class Own(Reweighted):
        weight_metric: ClassVar[str] = "own/weight"

        def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
            return batch.log_prob.exp()

    batch = token_batch(MIXED, method=Grpo())
    own = loss_and_gradient(Own(), batch)[1]
    plain = loss_and_gradient(Grpo(aggregation="token_mean", clip_high=0.28), batch)[1]
    torch.testing.assert_close(own, plain * batch.log_prob.detach().exp())


def test_steer_clamps_the_ratio_as_the_loss_does() -> None:
    batch = token_batch([1.0, 0.0], group_size=2, lengths=[1, 1])
    batch.old_log_prob, batch.entropy = torch.tensor([-800.0, -1.0]), torch.tensor([0.3, 0.3])
    batch.selection_log_prob = torch.tensor([-0.5, -1.0])
    batch.advantage = torch.tensor([1.0, -1.0])
    found = Steer().change(batch)[0]
    assert float(found) == pytest.approx(math.exp(20) * (1 - math.exp(-0.5)) * 0.2)


def test_steer_where_all_changes_are_equal_or_small() -> None:
    batch = token_batch([1.0] * 4, method=Steer())  # no advantage, so every |O| is 0
    method = Steer(weight_min=0.6, weight_max=1.0)
    assert method.weights(batch, ask(method, batch), {}).tolist() == pytest.approx(
        [0.8] * len(batch.index)
    )
    batch.advantage = torch.full_like(batch.advantage, 1e-4)
    method = Steer(map="exponential", floor=0.02)
    assert min(method.weights(batch, ask(method, batch), {}).tolist()) > 0.99


def dropped_by_loop(a: Tensor, s: Tensor) -> tuple[list[bool], Tensor]:
    """GRPODropout for the responses to one prompt."""
    kept = torch.ones_like(a)
    while float(torch.cov(torch.stack([a * kept, s]), correction=0)[0, 1]) < -1e-12:
        right = [i for i in range(len(a)) if a[i] > 0 and kept[i]]
        if not right:
            break
        kept[min(right, key=lambda i: float(s[i]))] = 0
    weights = (-s).exp() * kept
    baseline = (weights * a).sum() / weights.sum().clamp(min=1e-300)
    return [not each for each in kept.bool().tolist()], kept * (a - baseline)


def test_grpo_dropout_drops_the_likeliest_right_answers_prompt_by_prompt() -> None:
    generator = torch.Generator().manual_seed(11)
    numbers = []
    for _ in range(50):
        groups = torch.randint(0, 5, (24,), generator=generator)
        tokens = torch.randint(0, 6, (24,), generator=generator).to(torch.float64)  # 0: absent
        s = torch.rand(24, generator=generator, dtype=torch.float64)
        a = torch.randn(24, generator=generator, dtype=torch.float64) - s
        statistics = {"surprisal": s * tokens, "advantage": a * tokens, "tokens": tokens}
        found, new = GrpoDropout().dropped(
            groups, {f"grpo_dropout/{name}": value for name, value in statistics.items()}
        )
        for group in range(5):
            here = torch.nonzero((groups == group) & (tokens > 0)).flatten()
            if not len(here):
                continue
            expected, advantages = dropped_by_loop(a[here], s[here])
            assert found[here].tolist() == expected
            torch.testing.assert_close(new[here], advantages, rtol=1e-9, atol=1e-12)
            numbers.append(f"{sum(expected)} of {int((a[here] > 0).sum())}")
        assert not new[tokens == 0].any() and not found[tokens == 0].any()
    assert {"0 of 2", "1 of 3", "2 of 3", "2 of 2"} <= set(numbers)  # none, some and all


def test_grpo_dropout_leaves_a_covariance_of_0_alone() -> None:
    a = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    statistics = {"surprisal": 0.3 * ones, "advantage": a, "tokens": ones}
    found, new = GrpoDropout().dropped(
        torch.tensor([0, 0, 1, 1]),
        {f"grpo_dropout/{name}": value for name, value in statistics.items()},
    )
    assert not found.any()
    assert new.tolist() == [1.0, -1.0, 0.0, 0.0]
