"""The laboratory's methods are the methods' own: same selection, same derivative in every log-prob,
same states; its policies are exact: enumeration against sampling and finite differences."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from support.runs import ROOT
from support.token_batches import ask, loss_and_gradient, state_of, token_batch
from torch import Tensor

from megatron_stare.algorithms.advantage import group_advantages as own_advantages
from megatron_stare.algorithms.dapo import Dapo
from megatron_stare.algorithms.dg import Dg
from megatron_stare.algorithms.entropic import Entropic
from megatron_stare.algorithms.entropy_bonus import COEF, OPEN, USED, EntropyBonus
from megatron_stare.algorithms.entropy_clip import ClipB, ClipV
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import Method
from megatron_stare.algorithms.repo_r import RepoR
from megatron_stare.algorithms.sensitivity import second_moment, sensitivity
from megatron_stare.algorithms.stare import Stare
from megatron_stare.algorithms.steer import Steer
from megatron_stare.algorithms.twenty_entropy import TwentyEntropy
from megatron_stare.records.batch import TokenBatch

sys.path.insert(0, str(ROOT / "benchmarks/laboratory"))

import held_out
import maps
import outcome
import study
from simulate import Settings, coupled, gradient, sample, train
from twins import (
    BonusTwin,
    ClipBTwin,
    ClipVTwin,
    DgTwin,
    EntropicTwin,
    ForksTwin,
    RepoTwin,
    StareTwin,
    SteerTwin,
    Tokens,
    Twin,
    dapo,
    group_advantages,
)
from worlds import WORLDS, World, evaluate, first_state, tree

PROMPTS, GROUP, DEPTH = 4, 4, 3
SEEDS, DRAWS = 100, 10  # 1,000 batches of each method
STARE = {"amplify": 1.4, "attenuate": 0.6, "entropy_target": 1.0}
METHODS: dict[str, tuple[Twin, Method]] = {
    "grpo": (Twin(), Grpo(aggregation="token_mean")),
    "dapo": (dapo(), Dapo()),
    "dg": (DgTwin(eta=0.7), Dg(eta=0.7)),
    "clip_b": (ClipBTwin(mu=0.8), ClipB(mu=0.8)),
    "clip_v": (ClipVTwin(mu=0.5, max_share=0.06), ClipV(mu=0.5, max_share=0.06)),
    "clip_v_one": (ClipVTwin(mu=0.5), ClipV(mu=0.5)),
    "repo_r": (
        RepoTwin(zeta=0.04, zeta_min=0.03, target=1.0),
        RepoR(zeta=0.04, zeta_min=0.03, entropy_target=1.0),
    ),
    "entropic": (
        EntropicTwin(target=1.0, proportional=9.0, probable_above=0.5),
        Entropic(entropy_target=1.0, proportional=9.0, probable_above=0.5),
    ),
    "steer": (SteerTwin(weight_min=0.5), Steer(map="exponential", weight_min=0.5)),
    "twenty_entropy": (ForksTwin(), TwentyEntropy()),
    "twenty_entropy_half": (ForksTwin(share=0.5), TwentyEntropy(share=0.5)),
    "stare_o1": (StareTwin(**STARE), Stare(**STARE)),  # type: ignore[arg-type]
    "stare_o4": (
        StareTwin(variant="O4", share=0.3, **STARE),  # type: ignore[arg-type]
        Stare(variant="O4", share=0.3, **STARE),  # type: ignore[arg-type]
    ),
    "stare_c2": (StareTwin(variant="C2", **STARE), Stare(variant="C2", **STARE)),  # type: ignore[arg-type]
    "stare_ungated": (
        StareTwin(variant="C2", entropy_target=None),
        Stare(variant="C2", entropy_target=None),
    ),
    "stare_adaptive": (
        StareTwin(variant="C2", adaptive=True, **STARE),  # type: ignore[arg-type]
        Stare(variant="C2", adaptive=True, **STARE),  # type: ignore[arg-type]
    ),
}


def random_tokens(draw: int) -> tuple[Tokens, Tensor]:
    """Batches of SEEDS seeds, of which many log-probs and entropies are equal, some groups have
    equal rewards and some batches no token with an advantage; and the rewards [K, P, G]."""
    generator = torch.Generator().manual_seed(draw)
    tokens = PROMPTS * GROUP * DEPTH

    def noise(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    old = (-8 * noise(SEEDS, tokens) ** 3 * 4).round() / 4  # ties
    entropy = (2 * noise(SEEDS, tokens) * 8).round() / 8
    rewards = (noise(SEEDS, PROMPTS, GROUP) < noise(SEEDS, PROMPTS, 1) ** 2).double()
    advantage = group_advantages(rewards).flatten(1).repeat_interleave(DEPTH, -1)
    log_prob = old + 0.8 * (noise(SEEDS, tokens) - 0.5)
    phi = sensitivity(old, entropy, second_moment(*sums_of(entropy), entropy))
    return Tokens(log_prob, old, entropy, advantage, phi=phi), rewards


def sums_of(entropy: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of p^2 and p^2 ln p of some distribution, the same for equal entropies."""
    sum_p2 = 0.2 + 0.7 * (7 * entropy).sin() ** 2
    return sum_p2, -sum_p2 * (0.3 + 0.4 * (5 * entropy).cos() ** 2) * entropy


def own_batch(tokens: Tokens, seed: int) -> TokenBatch:
    """The batch of one seed as the method's own code reads it."""
    batch = token_batch([0.0] * (PROMPTS * GROUP), lengths=[DEPTH] * (PROMPTS * GROUP))
    batch.log_prob = tokens.log_prob[seed].clone().requires_grad_()
    batch.old_log_prob = tokens.old_log_prob[seed].clone()
    batch.rollout_log_prob = tokens.old_log_prob[seed].clone()
    batch.entropy = tokens.entropy[seed].clone()
    batch.advantage = tokens.advantage[seed].clone()
    batch.sum_p2, batch.sum_p2_log_p = sums_of(batch.entropy)
    return batch


@pytest.mark.wide
@pytest.mark.parametrize("name", METHODS)
def test_a_twin_is_the_method(name: str) -> None:
    twin, method = METHODS[name]
    opened = 0
    for draw in range(DRAWS):
        tokens, rewards = random_tokens(draw)
        state = twin.control(twin.start(SEEDS), tokens.entropy.mean(-1))
        slope = twin.slope(tokens, state)
        for seed in range(SEEDS):
            batch = own_batch(tokens, seed)
            statistics = ask(method, batch)
            own = state_of(method, statistics)
            for key in state:
                assert float(own[key]) == pytest.approx(float(state[key][seed]), abs=1e-12)
            _, derivative = loss_and_gradient(method, batch)
            torch.testing.assert_close(-derivative, slope[seed], rtol=1e-9, atol=1e-12)
            if isinstance(twin, StareTwin) and isinstance(method, Stare):
                codes = method.selected(batch, statistics)
                for each in method.selects:
                    assert torch.equal(codes == each.code, twin.rare(tokens, each.sign)[seed])
                opened += int(state["gate"][seed])
        groups = torch.arange(PROMPTS * GROUP) // GROUP
        counted = torch.ones(PROMPTS * GROUP, dtype=torch.bool)
        for seed in range(0, SEEDS, 10):
            own_ones = own_advantages(rewards[seed].flatten(), groups, counted)
            torch.testing.assert_close(group_advantages(rewards[seed]).flatten(), own_ones)
    if isinstance(twin, StareTwin) and twin.entropy_target is not None:
        assert 0 < opened < SEEDS * DRAWS * 0.95  # both sides of the gate were seen


def test_the_adaptive_bonus_moves_as_the_methods() -> None:
    settings = {"coef": 0.01, "delta": 0.004, "coef_min": 0.0, "coef_max": 0.02}
    twin = BonusTwin(target=0.5, **settings)
    method = Grpo(
        aggregation="token_mean",
        entropy_bonus=EntropyBonus(target=0.5, **settings),
    )
    state, own = twin.start(1), state_of(method)
    entropies = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for entropy in entropies:
        state = twin.control(state, entropy[None])
        own = method.control(own, {"entropy_bonus/measure": entropy})
        for mine, theirs in (("coef", COEF), ("used", USED), ("open", OPEN)):
            assert float(state[mine]) == pytest.approx(float(own[theirs]), abs=1e-12)
    assert float(state["coef"]) > 0


def test_micro_batches_select_each_for_itself() -> None:
    tokens, _ = random_tokens(3)
    halves = StareTwin(micro_batches=2, share=0.25).rare(tokens, 1)
    middle = tokens.advantage.shape[1] // 2
    for rows in (slice(None, middle), slice(middle, None)):
        piece = Tokens(
            tokens.log_prob[:, rows],
            tokens.old_log_prob[:, rows],
            tokens.entropy[:, rows],
            tokens.advantage[:, rows],
        )
        assert torch.equal(halves[:, rows], StareTwin(share=0.25).rare(piece, 1))
    assert not torch.equal(halves, StareTwin(share=0.25).rare(tokens, 1))


def test_the_gradient_is_that_of_the_objective() -> None:
    """By autograd, of the surrogate and the entropy bonus, with ratios that differ from 1."""
    world = tree(3, prompts=2, actions=3, depth=3, seed=4)
    batch = sample(world, world.logits, 0, 4, torch.Generator().manual_seed(1))
    noise = torch.randn(world.logits.shape, generator=torch.Generator().manual_seed(2))
    logits = (world.logits + 0.1 * noise).requires_grad_()
    twin = BonusTwin(target=None, coef=0.3)
    found = gradient(world, logits.detach(), batch, twin, twin.start(3))
    log_p = torch.log_softmax(logits, -1).flatten(1, 2)
    here = log_p.gather(1, batch.state[..., None].expand(-1, -1, 3))
    ratio = (here.gather(-1, batch.action[..., None])[..., 0] - batch.old_log_prob).exp()
    free, bounded = ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage
    entropy = -(here.exp() * here).sum(-1)
    objective = (torch.minimum(free, bounded) + 0.3 * entropy).mean(-1).sum()
    (wanted,) = torch.autograd.grad(objective, logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", WORLDS)
def test_enumeration_agrees_with_sampling(name: str) -> None:
    world: World = WORLDS[name](2, seed=5)
    exact = evaluate(world, world.logits, 0)
    batch = sample(world, world.logits, 0, 4000, torch.Generator().manual_seed(3))
    assert float(batch.entropy.mean()) == pytest.approx(float(exact.entropy.mean()), rel=0.02)
    counts = batch.state.new_zeros(world.logits.flatten(1, 2).shape)
    for k in range(2):
        counts[k].index_put_(
            (batch.state[k], batch.action[k]), torch.ones_like(batch.action[k]), accumulate=True
        )
    seen = counts.double() / counts.sum(-1, keepdim=True).clamp_min(1)
    often = counts.sum(-1) > 1000
    p = torch.softmax(world.logits.flatten(1, 2), -1)
    assert (seen - p)[often].abs().max() < 0.06
    one, many = exact.pass_at[1], exact.pass_at[64]
    assert ((one <= many) & (many <= 1)).all() and (exact.reward >= one - 1e-12).all()


def test_pass_at_k_and_entropy_by_hand() -> None:
    """One prompt, two choices of two: p(right) is known, and so is the entropy."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64).view(
        1, 1, 3, 2
    )
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.5], dtype=torch.float64).view(1, 1, 4)
    world = World("hand", logits, rewards, 0.0)
    assert (world.depth, first_state(2, 1), first_state(2, 2)) == (2, 1, 3)
    exact = evaluate(world, logits, 0, ks=(1, 2))
    right = 0.5 * torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(exact.pass_at[1][0], right)
    torch.testing.assert_close(exact.pass_at[2][0], 1 - (1 - right) ** 2)
    torch.testing.assert_close(exact.reward[0], right + 0.5 * (0.5 - right))
    two, tilted = torch.tensor([0.5, 0.5]), torch.softmax(torch.tensor([1.0, 0.0]), 0)
    h2, ht = (float(-(p * p.log()).sum()) for p in (two, tilted))
    assert float(exact.entropy[0]) == pytest.approx((h2 + 0.5 * h2 + 0.5 * ht) / 2, rel=1e-6)


def test_a_training_repeats_and_learns_and_rewards_change() -> None:
    world = WORLDS["changing"](20, actions=4, depth=4, changes_at=60)
    settings = Settings(steps=120, every=60, lr=2.0)
    first, again = (train(world, Twin(), settings) for _ in range(2))
    assert torch.equal(first.entropy, again.entropy) and first.at == [0, 60, 120]
    start, middle, end = first.pass_at[1].mean(1).tolist()
    assert middle > start + 0.2 and end < middle  # what was right is wrong now
    assert torch.isnan(first.gate).all()
    held = train(world, StareTwin(entropy_target=0.9, variant="C2", amplify=3.0), settings)
    assert ((held.gate[1:] >= 0) & (held.gate[1:] <= 1)).all()
    assert held.entropy[-1].mean() > first.entropy[-1].mean()


def test_coupling_shares_gradients_between_prompts() -> None:
    gradients = torch.randn((1, 4, 3, 2), dtype=torch.float64)
    assert torch.equal(coupled(gradients, 0.0), gradients)
    alike = coupled(gradients, 1.0)
    torch.testing.assert_close(alike, gradients.mean(1, keepdim=True).expand_as(alike))
    torch.testing.assert_close(coupled(gradients, 0.3).sum(1), gradients.sum(1))


def test_the_study_is_that_of_the_committed_maps() -> None:
    maps = study.read()
    assert maps and study.PAGE.read_text() == study.page(maps)
    assert study.TABLES.read_text() == study.details(maps)
    drawn = {file.stem: file.read_text() for file in study.PICTURES.glob("*.svg")}
    assert drawn == study.pictures(maps)
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert [root.get("width"), root.get("height")] == root.attrib["viewBox"].split()[2:]
    space = "{http://www.w3.org/2000/svg}"
    texts = list(ElementTree.fromstring(drawn["trained"]).iter(f"{space}text"))
    legend = [text for text in texts if text.text in study.NAMES.values()]
    for one, two in pairwise(legend):  # a name ends before the next one's line
        room = float(two.attrib["x"]) - float(one.attrib["x"]) - 23
        assert two.get("y") != one.get("y") or 7.5 * len(one.text or "") < room
    assert all(study.methods(told)[0] in study.NAMES for told in maps.values())


def test_a_difference_is_shown_only_beyond_three_errors() -> None:
    assert study.verdict({"mean": 0.31, "error": 0.1}) == 1
    assert study.verdict({"mean": -0.31, "error": 0.1}) == -1
    assert study.verdict({"mean": 0.3, "error": 0.1}) == 0
    assert study.verdict({"mean": 0.0, "error": 0.0}) == 0


def test_a_maps_question_is_answered_by_its_own_figure() -> None:
    """Nearer a target is better: the method with the highest pass@1 is the farthest from it."""

    def figures(**means: float) -> dict[str, dict[str, dict[str, float]]]:
        told = {key: {"mean": mean, "error": 0.001} for key, mean in means.items()}
        return {"figures": told, "over_first": told}

    def cell(scores: float) -> dict[str, object]:
        return {
            "grpo": figures(**{"pass@1": 0.0, "held": 0.0, "recovered": 0.0}),
            "stare_o1": figures(**{"pass@1": scores, "held": 0.4, "recovered": 9.0}),
            "bonus": figures(**{"pass@1": -scores, "held": -0.3, "recovered": -5.0}),
            "dg": figures(**{"pass@1": 0.0, "held": 0.0, "recovered": 0.0}),
        }

    cells = {f"target {a}, lr {b}": cell(0.1 + a + 2 * b) for a in (1, 2) for b in (1, 2)}
    told = {"question": "?", "axes": {"target": [1, 2], "lr": [1, 2]}, "cells": cells}
    for name, row in (
        ("bands", "| ? (`bands`) | relative distance from the target | entropy bonus: 4 of 4"),
        ("changing_reward", "| ? (`changing_reward`) | steps to recover | entropy bonus: 4 of 4"),
        ("lr_group", "| ? (`lr_group`) | pass@1 | STARE O1: 4 of 4 (+4.600) |"),
    ):
        assert study.answers({name: told})[-1].startswith(row)


def test_a_training_that_cells_repeat_is_counted_once() -> None:
    """A method without a target has one training for each learning rate, whose distance from the
    target still differs by cell."""

    def told(target: float, lr: float, reads: bool) -> dict[str, dict[str, dict[str, float]]]:
        one = lr + target * reads
        means = {"pass@1": one, "pass@64": one, "held": lr + target}
        each = {key: {"mean": mean, "error": 0.001} for key, mean in means.items()}
        return {"figures": each, "over_first": each}

    cells = {
        f"target {a}, lr {b}": {"grpo": told(a, b, False)}
        | {name: told(a, b, name == "stare_o1") for name in ("stare_o1", "dapo", "dg")}
        for a in (0.1, 0.2, 0.4)
        for b in (1.0, 2.0)
    }
    each = {"question": "?", "axes": {"target": [0.1, 0.2, 0.4], "lr": [1.0, 2.0]}, "cells": cells}
    assert study.counts(each, "dapo", "pass@1") == (2, 0, 2)
    assert study.counts(each, "stare_o1", "pass@1") == (6, 0, 6)
    assert study.counts(each, "dapo", "held") == (6, 0, 6)
    assert "| DAPO's clip | 2, 0 | 2, 0 | 2 |" in study.table({"x": each})[3]
    assert "DAPO's clip: 2 of 2 (+1.500)" in study.answers({"lr_group": each})[-1]


def test_the_digits_verifier_knows_its_answers() -> None:
    from digits import KNOWN_ANSWERS, right_response, verify

    for response, answer, reward in KNOWN_ANSWERS:
        assert verify(response, answer) == pytest.approx(reward), (response, answer)
    # no response but one is right under a rule, and that of the one rule pays nothing under another
    for a in range(10):
        for b in range(10):
            before, after = (right_response(rule, f"{a}{b}") for rule in ("before", "after"))
            assert verify(before, f"after {a}{b}") == verify(after, f"before {a}{b}") == 0.0
    paid = [verify(f"{n:03d}", "rare 47") for n in range(1000)]
    assert (paid.count(1.0), max(paid[100:200]), sum(paid[:100])) == (1, 0.5, 0.0)


def test_the_runs_that_the_plan_asks_for() -> None:
    """Every arm has as many tries, no seed is both of the sweep and of the evaluation, and the try
    with the highest mean is evaluated."""
    import trained
    import yaml

    plan = yaml.safe_load(trained.PLAN.read_text())
    asked = trained.sweep(plan)
    assert len({len(trained.tries(plan, arm)) for arm in plan["arms"]}) == 1
    assert not set(plan["seeds"]["sweep"]) & set(plan["seeds"]["evaluation"])
    assert len(asked) == len(plan["tasks"]) * len(plan["arms"]) * 4 * len(plan["seeds"]["sweep"])
    runs = {key: {"pass@1": 0.5} for key in asked}
    runs["sweep, rare, bonus, try 2, seed 101"]["pass@1"] = 0.6
    runs["sweep, rare, bonus, try 3, seed 101"]["pass@1"] = 0.9
    runs["sweep, rare, bonus, try 3, seed 102"]["pass@1"] = 0.0
    evaluated = trained.evaluation(plan, runs)
    assert evaluated["rare, bonus, seed 8"] == ("rare", 8, trained.tries(plan, "bonus")[2])
    assert evaluated["changing, bonus, seed 8"][2] == trained.tries(plan, "bonus")[0]
    assert len(evaluated) == 2 * 6 * 8


def test_the_tests_of_differences_by_hand() -> None:
    assert outcome.sign_flip([1.0, 2.0, 3.0]) == 2 / 8  # all signs as they are, or all turned
    assert outcome.sign_flip([1.0, -1.0]) == 1.0
    assert outcome.sign_flip([0.1, 0.2, -0.3]) == 1.0  # equal sums in spite of rounding
    assert outcome.sign_flip([3.0, -1.0, 1.0]) == 6 / 8  # 5, 3, 3, 1 and as many below 0
    assert outcome.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": 0.03, "b": 0.06, "c": 0.06}
    assert outcome.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    mean, low, high = outcome.interval([0.0, 0.2])
    assert (mean, low, high) == pytest.approx((0.1, 0.1 - 1.2706, 0.1 + 1.2706))


def test_a_comparison_is_shown_by_its_rule_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small p with a small mean, large mean with a large p, and a null that names its size."""
    seeds = list(range(8))
    plan = {
        "tasks": {"t": {"steps": 10, "changes_after": 5}},
        "arms": {arm: {} for arm in ("grpo", "dapo", "bonus", "twenty_entropy")},
        "compared": ["dapo", "bonus", "twenty_entropy"],
        "with": "grpo",
        "least": 0.03,
        "level": 0.05,
        "seeds": {"evaluation": seeds},
        "predictions": {"t": {"dapo": "higher", "bonus": "higher", "twenty_entropy": "same"}},
        "tried": [{"task": "t", "pass@1": {0.001: 0.2}, "taken": True}],
        "question": "Does it?",
    }
    shift = {
        "grpo": lambda seed: 0.0,
        "dapo": lambda seed: 0.01 + 0.001 * seed,  # small, and sure
        "bonus": lambda seed: 0.2 + 0.01 * seed,  # large, and sure
        "twenty_entropy": lambda seed: 0.5 * (-1) ** seed,  # large, and unsure
    }
    runs = {
        f"t, {arm}, seed {seed}": {
            "pass@1": 0.5 + by(seed),
            "pass@16": 0.9 + 0.001 * seed,
            "greedy": 0.5 + 0.001 * seed,
            "entropy": 0.3 + 0.001 * seed,
            "steps to recover": None if seed else 40,
            "seconds": 1.0,
            "reward by 5 steps": [0.1, 0.2],
            "entropy by 5 steps": [0.4, 0.3],
        }
        for arm, by in shift.items()
        for seed in seeds
    }
    runs |= {
        f"afterwards, t, grpo, lr {lr}, seed {seed}": {"pass@1": lr * seed, "seconds": 1.0}
        for lr in (1, 2)
        for seed in (0, 1)
    }
    told = {"plan": plan, "runs": runs}
    assert "| 1 | 0.500 [-5.853, 6.853] |" in outcome.afterwards(told)
    assert outcome.before_the_change(told, "t") == []  # all held the same
    for seed in seeds:  # bonus ends best
        runs[f"t, grpo, seed {seed}"]["entropy by 5 steps"] = [0.5, 0.3]
    said = outcome.before_the_change(told, "t")[0]
    assert "GRPO had the highest entropy (0.50 nats), and entropy bonus had only 0.40" in said
    assert "entropy bonus reached the highest final pass@1" in said
    assert outcome.beyond(told) == []  # of the rates afterwards one is better
    runs |= {
        f"afterwards, t, grpo, lr {lr}, seed {seed}": {"pass@1": 0.1 * lr, "seconds": 1.0}
        for lr in (1, 2)
        for seed in (0, 1)
    }
    assert outcome.beyond(told)[0].endswith("were worse: pass@1 was 0.10 and 0.20.")
    assert outcome.judged(told) == {"right": 1, "wrong": 1, "undecided": 1}
    assert "pass@1 of 0.50 with GRPO, 0.73 with entropy bonus." in outcome.conclusions(told)[0]
    assert "and these methods: DAPO, 20-Entropy" in outcome.conclusions(told)[1]
    assert "show whether 20-Entropy raises" in outcome.open_questions(told)[0]
    dapo_row, bonus_row, forks_row = outcome.decided(told)[2:]
    assert dapo_row.endswith("not shown; 0.03 either way is excluded |")
    assert bonus_row.endswith("| higher |") and "| +0.235 [" in bonus_row
    assert "not shown; above +0.4" in forks_row and "below -0.4" in forks_row
    rows = [row.partition("| ")[2].partition(" | ")[2] for row in outcome.predicted(told)[2:]]
    assert rows == [
        "DAPO | higher | same, **wrong** |",  # within .03, in spite of an interval above 0
        "entropy bonus | higher | higher |",
        "20-Entropy | same | undecided |",  # not same: ten times .03 is not excluded
    ]
    assert outcome.observed([0.0] * 8, 0.03) == outcome.observed([0.5] * 8, 0.03) == "undecided"
    assert outcome.observed([-0.2 - 0.01 * seed for seed in seeds], 0.03) == "lower"
    assert outcome.observed([0.02 + 0.004 * seed for seed in seeds], 0.05) == "same"
    assert outcome.observed([0.01 + 0.01 * seed for seed in seeds], 0.05) == "undecided"
    assert "40 in 1 of 8" in outcome.arms(told, "t")[2]
    ElementTree.fromstring(outcome.picture(told, study.STYLE + study.CURVES))
    assert outcome.section(told)[0] == "## On a trained model"
    monkeypatch.setattr(outcome, "RESULTS", ROOT / "none.json")
    assert outcome.read() is None


@pytest.mark.parametrize(
    ("base", "other", "said"),
    [
        ([0.0] * 8, [0.0] * 8, "only that the share of runs above 0 is more than 0.37"),
        ([0.5] * 8, [0.51] * 8, "equal and give no interval"),
        ([0.0] * 8, [0.0, 1.0] * 2 + [0.0] * 4, "not shown; above +0.637 is excluded"),
        ([1.0] * 8, [0.0, 1.0] * 2 + [1.0] * 4, "not shown; below -0.637 is excluded"),
        ([0.5] * 8, [0.0, 1.0] * 4, "not shown; above +0.447 and below -0.447 is excluded"),
        ([0.8] * 7 + [0.1], [0.81] * 7 + [0.11], "equal and give no interval"),  # up to rounding
    ],
)
def test_runs_without_spread_or_at_an_end_exclude_no_more_than_they_can(
    base: list[float], other: list[float], said: str
) -> None:
    plan = {
        "tasks": {"t": {}},
        "arms": {"grpo": {}, "bonus": {}},
        "compared": ["bonus"],
        "with": "grpo",
        "least": 0.03,
        "level": 0.001,
        "seeds": {"evaluation": list(range(8))},
    }
    runs = {
        f"t, {arm}, seed {seed}": {"pass@1": score, "pass@16": score, "entropy": 0.1 * seed}
        for arm, scores in (("grpo", base), ("bonus", other))
        for seed, score in enumerate(scores)
    }
    told = {"plan": plan, "runs": runs}
    row = outcome.decided(told)[-1]
    assert said in row
    if "excluded" not in said:
        assert "is excluded" not in row and f"{other[0] - base[0]:+.3f}, all alike" in row
    if len(set(other)) == 1:
        assert f"{other[0]:.3f}, all alike | {other[0]:.3f}, all alike | 0.350 [" in str(
            outcome.arms(told, "t")[-1]
        )


def test_a_rate_at_the_edge_of_the_tries_is_said() -> None:
    plan = {
        "tasks": {"t": {}},
        "arms": {"grpo": {"lr": [1.0, 2.0, 3.0]}},
        "with": "grpo",
        "seeds": {"sweep": [7]},
    }

    def said(*scores: float) -> list[str]:
        runs = {
            f"sweep, t, grpo, try {number}, seed 7": {"pass@1": score}
            for number, score in enumerate(scores)
        }
        return outcome.at_the_edge({"plan": plan, "runs": runs})

    assert said(0.1, 0.3, 0.2) == said(0.0, 0.0, 0.0) == []
    assert "edge of GRPO's tries, 1." in said(0.4, 0.3, 0.2)[0]
    assert "edge of GRPO's tries, 3." in said(0.1, 0.3, 0.4)[0]


def test_a_suggestion_that_harms_is_counted_without_a_gap() -> None:
    row = {"default": 0.5, "best": 0.52, "score": 0.49}  # a gap of 4 %, which does not count
    other = {"default": 0.5, "best": 0.8, "score": 0.7}
    told = held_out.told([row, other])
    assert told == {"with a gap": 1, "at least half closed": 1, "below the default": 1}


def test_a_method_is_added_to_a_cell_as_if_it_had_been_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = replace(maps.MAPS["bands"], settings=lambda cell: Settings(steps=6, every=2, group=4))
    monkeypatch.setitem(maps.MAPS, "bands", short)
    cell = short.cells()[0]
    whole = maps.run_cell("bands", cell, 2)
    trained: list[object] = []
    train_one = maps.train
    monkeypatch.setattr(
        maps,
        "train",
        lambda world, twin, settings: (trained.append(twin), train_one(world, twin, settings))[1],
    )
    before = {name: told for name, told in whole.items() if name not in ("dg", "dapo", "clip_v")}
    added = maps.run_cell("bands", cell, 2, before)
    assert added == whole and list(added) == list(whole) and len(trained) == 4
    with pytest.raises(ValueError, match="grpo differs from before"):
        maps.run_cell("bands", cell, 2, {**before, "grpo": {"figures": {}}})


def test_every_map_has_cells_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cell of each, short and of two seeds: every method has figures, and the first one
    differs from itself by nothing."""
    monkeypatch.setattr(maps, "REPEATS", 2)
    short = maps.Settings
    for name, each in maps.MAPS.items():
        fast = replace(each, settings=lambda cell: short(steps=6, every=2, group=4))
        if name == "changing_reward":
            fast = replace(fast, world=lambda cell, seeds: WORLDS["changing"](seeds, changes_at=3))
        monkeypatch.setitem(maps.MAPS, name, fast)
        cell = each.cells()[0] if name != "critical_weight" else {"trained": 4, "amplify": 2.0}
        found = maps.run_cell(name, cell, 2)
        first, *others = found.values()
        assert others and all(
            x["mean"] == 0 for x in first["over_first"].values() if x["mean"] == x["mean"]
        )
        for told in found.values():
            assert told["figures"].keys() == told["over_first"].keys()


def test_numbers_of_a_map_stand_out_on_their_cells_in_both_schemes() -> None:
    """WCAG's contrast of 4.5, at the most of a cell's colour."""

    def light(colour: Tensor) -> float:
        linear = torch.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
        return float(linear @ torch.tensor([0.2126, 0.7152, 0.0722]))

    def rgb(text: str) -> Tensor:
        text = "".join(2 * letter for letter in text) if len(text) == 3 else text
        return torch.tensor([int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)])

    for scheme in study.STYLE.split("@media"):
        ink, page = (
            rgb(re.findall(rf"{name}{{fill:#(\w+)}}", scheme)[0]) for name in ("ink", "bg")
        )
        for name in ("pos", "neg"):
            cell = rgb(re.findall(rf"{name}{{--c:#(\w+)}}", scheme)[0])
            dark, bright = sorted((light(ink), light(0.75 * cell + 0.25 * page)))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5
