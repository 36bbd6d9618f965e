"""The laboratory's maps: two settings vary, all others are at the defaults that a map states.

In every cell several methods train the same worlds from the same random numbers. Each figure is a
mean over seeds; differences to the map's first method are paired by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from simulate import History, Settings, coupled, gradient, log_softmax_at, sample, train
from torch import Tensor
from twins import (
    BonusTwin,
    ClipBTwin,
    ClipVTwin,
    CriticalTwin,
    DgTwin,
    EntropicTwin,
    ForksTwin,
    RepoTwin,
    StareTwin,
    SteerTwin,
    Tokens,
    Twin,
    dapo,
)
from worlds import World, bandit, changing, evaluate, rare, tree

from megatron_stare.algorithms.sensitivity import critical_surprisal, second_moment, sensitivity

Cell = Mapping[str, Any]  # a value for each axis
MakeWorld = Callable[..., World]
TARGET = 0.3  # nats

# of the compared strengths: W and M of the paper's recipes, and stronger ones
STARE = StareTwin(entropy_target=TARGET)
STRONG = replace(STARE, variant="C2", share=0.3, amplify=2.0, attenuate=0.2)
BONUS = BonusTwin(target=TARGET, delta=0.01, coef_max=0.5)
METHODS: dict[str, Twin] = {
    "grpo": Twin(),
    "dapo": dapo(),
    "twenty_entropy": ForksTwin(),
    "stare_o1": STARE,
    "stare_c2": replace(STARE, variant="C2"),
    "stare_o1_strong": replace(STARE, share=0.3, amplify=3.0),
    "stare_c2_strong": STRONG,
    "stare_adaptive": replace(
        STRONG, adaptive=True, adapt_rate=0.02, amplify_max=3.0, attenuate_min=0.05
    ),
    "stare_critical": CriticalTwin(variant="C2", entropy_target=TARGET, amplify=2.0, attenuate=0.2),
    "bonus": BONUS,
    "dg": DgTwin(),
    # of the later methods, those whose formula was read in their authors' or others' code
    "clip_b": ClipBTwin(),
    "clip_v": ClipVTwin(),
    "repo_r": RepoTwin(target=TARGET),
    "entropic": EntropicTwin(target=TARGET),
    "steer": SteerTwin(),
}


@dataclass(frozen=True)
class Map:
    """One map.

    question: what it answers.
    axes: the two settings and their values.
    world: makes the world of a cell from the cell's values that it takes.
    methods: the methods of a cell by name; the first is the one the others are compared with.
    settings: of the training.
    drift: True: one update from the first policy instead of a training (see `drifted`).
    """

    question: str
    axes: Mapping[str, tuple[Any, ...]]
    world: Callable[[Cell, int], World]
    methods: Callable[[Cell], Mapping[str, Twin]]
    settings: Callable[[Cell], Settings] = field(default=lambda cell: Settings())
    drift: bool = False

    def cells(self) -> list[dict[str, Any]]:
        (first, across), (second, down) = self.axes.items()
        return [{first: a, second: b} for a in across for b in down]


def _of(make: MakeWorld, *taken: str, **fixed: Any) -> Callable[[Cell, int], World]:
    def world(cell: Cell, seeds: int) -> World:
        return make(seeds, **fixed, **{name: cell[name] for name in taken})

    return world


def _all(cell: Cell) -> Mapping[str, Twin]:
    """Every method, steered to the cell's target if the cell has one."""
    target = cell.get("target", TARGET)
    found: dict[str, Twin] = {}
    for name, twin in METHODS.items():
        if isinstance(twin, StareTwin):
            found[name] = replace(twin, entropy_target=target)
        elif isinstance(twin, BonusTwin | RepoTwin | EntropicTwin):
            found[name] = replace(twin, target=target)
        else:
            found[name] = twin
    return found


def _weights(cell: Cell) -> Mapping[str, Twin]:
    twin = replace(STRONG, amplify=cell["amplify"], attenuate=cell["attenuate"])
    return {"grpo": Twin(), "stare_c2": twin}


def _scope(cell: Cell) -> Mapping[str, Twin]:
    twin = replace(STRONG, share=cell["share"])
    pieces = replace(twin, micro_batches=cell["micro_batches"])
    return {"whole_batch": twin, "micro_batches": pieces}


def _clips(cell: Cell) -> Mapping[str, Twin]:
    return {"grpo": Twin(), "dapo": Twin(clip_high=cell["clip_high"])}


def _only(*names: str) -> Callable[[Cell], Mapping[str, Twin]]:
    return lambda cell: {name: _all(cell)[name] for name in names}


def _with(**fixed: Any) -> Callable[[Cell], Settings]:
    """Settings whose learning rate, group and updates a cell may set."""

    def settings(cell: Cell) -> Settings:
        own = {name: cell[name] for name in ("lr", "group", "updates") if name in cell}
        return replace(Settings(), **{**fixed, **own})

    return settings


def _amplified(cell: Cell) -> Mapping[str, Twin]:
    """Ungated, at the cell's W: O1 on the paper's share of rare tokens, on a wider one, and on the
    tokens past the critical surprisal of their own state; and C2 with M of 0.1 on the last two."""
    plain = replace(STARE, entropy_target=None, amplify=cell["amplify"], attenuate=0.1)
    critical = CriticalTwin(entropy_target=None, amplify=cell["amplify"], attenuate=0.1)
    wide = replace(plain, share=0.3)
    return {
        "grpo": Twin(),
        "share_0.1": plain,
        "share_0.3": wide,
        "critical": critical,
        "c2_share_0.3": replace(wide, variant="C2"),
        "c2_critical": replace(critical, variant="C2"),
    }


def _trained(cell: Cell, seeds: int) -> World:
    """The tree after some steps of GRPO, so that its entropy is falling."""
    world = tree(seeds)
    steps = cell["trained"]
    return replace(world, logits=train(world, Twin(), Settings(steps, lr=1.0, every=steps)).logits)


PAIR = _only("grpo", "stare_c2_strong", "stare_o1_strong", "bonus")
MAPS: dict[str, Map] = {
    "lr_group": Map(
        "At which learning rates and group sizes is pass@1 higher with entropy control?",
        {"lr": (0.25, 0.5, 1.0, 2.0, 4.0), "group": (4, 8, 16, 32)},
        _of(tree),
        PAIR,
        _with(),
    ),
    "sparsity_target": Map(
        "At which share of right responses and target is pass@1 higher with entropy control?",
        {"share": (0.005, 0.01, 0.02, 0.05, 0.1), "target": (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)},
        _of(tree, "share"),
        PAIR,
        _with(lr=1.0),
    ),
    "weights": Map(
        "Which W and M keep entropy at its target, and which W and M raise accuracy?",
        {"amplify": (1.0, 1.1, 1.5, 2.0, 3.0, 5.0), "attenuate": (1.0, 0.9, 0.5, 0.2, 0.05)},
        _of(tree),
        _weights,
        _with(lr=1.0),
    ),
    "share_scope": Map(
        "What changes if each micro-batch has its own quantile instead of the whole batch's?",
        {"share": (0.02, 0.05, 0.1, 0.3), "micro_batches": (2, 4, 8, 32)},
        _of(tree),
        _scope,
        _with(lr=1.0),
    ),
    "bands": Map(
        "Which method keeps entropy closest to each target?",
        {"target": (0.1, 0.2, 0.3, 0.5, 0.8), "lr": (0.5, 1.0, 2.0)},
        _of(tree),
        _all,
        _with(steps=600),
    ),
    "coupling": Map(
        "At which coupling of the prompts' gradients is pass@1 higher with entropy control?",
        {"coupling": (0.0, 0.25, 0.5, 0.75, 0.9), "share": (0.01, 0.02, 0.05)},
        _of(tree, "coupling", "share"),
        _all,
        _with(lr=1.0),
    ),
    "rare_strategy": Map(
        "When does the policy find and keep a rare strategy with a higher reward?",
        {"rarity": (0.0, 1.0, 2.0, 3.0), "better": (0.02, 0.05, 0.1, 0.2)},
        _of(rare, "rarity", "better"),
        _all,
        _with(lr=1.0),
    ),
    "hard_prompts": Map(
        "Does the policy still solve the prompts that need an unusual answer?",
        {"hard": (0.125, 0.25, 0.5), "coupling": (0.25, 0.5, 0.75, 0.9)},
        _of(bandit, "hard", "coupling"),
        _all,
        _with(lr=1.0),
    ),
    "changing_reward": Map(
        "After the reward changes, how fast does each method recover?",
        {"target": (0.1, 0.3, 0.5, 0.8), "lr": (0.5, 1.0, 2.0)},
        _of(changing, changes_at=300),
        _all,
        _with(steps=600),
    ),
    "critical_weight": Map(
        "At which weight W do amplified rare tokens stop the fall of entropy?",
        {"trained": (20, 50, 100, 200), "amplify": (1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 10.0)},
        _trained,
        _amplified,
        drift=True,
    ),
    "clip_updates": Map(
        "What does a higher upper clip limit change if each batch has several updates?",
        {"updates": (1, 2, 4, 8), "clip_high": (0.2, 0.28, 0.5)},
        # prompts move each other so far in a step that ratios leave the clip's range
        _of(tree, coupling=0.9),
        _clips,
        _with(lr=8.0),
    ),
}


DRIFT_LR, REPEATS = 0.05, 20


def drifted(world: World, twin: Twin, settings: Settings) -> dict[str, Tensor]:
    """[K] figures of one small update from the world's first policy, means over repeated samples.

    entropy: of the policy before.
    drift: exact change of the entropy over the learning rate, nats.
    forecast: the same to first order, from the sensitivity of every token (-A w Phi).
    neutral: W*, the factor on the tokens that the twin amplifies at which the forecast is 0; NaN
        for twins without such tokens.
    """
    before = evaluate(world, world.logits, 0)
    generator = torch.Generator().manual_seed(settings.seed)
    drift, forecast, neutral = [], [], []
    for _ in range(REPEATS):
        batch = sample(world, world.logits, 0, settings.group, generator)
        state = twin.start(world.logits.shape[0])
        scale = DRIFT_LR * world.logits.shape[1] * world.depth
        change = scale * coupled(gradient(world, world.logits, batch, twin, state), world.coupling)
        after = evaluate(world, world.logits + change, 0)
        drift.append((after.entropy - before.entropy) / DRIFT_LR)
        here = log_softmax_at(world.logits, batch.state)
        p = here.exp()
        s2 = second_moment((p * p).sum(-1), (p * p * here).sum(-1), batch.entropy)
        plain = -batch.advantage * sensitivity(batch.old_log_prob, batch.entropy, s2)
        critical = critical_surprisal(batch.entropy, s2)
        tokens = Tokens(
            batch.old_log_prob, batch.old_log_prob, batch.entropy, batch.advantage, critical
        )
        weights, rare_ones = torch.ones_like(plain), torch.zeros_like(plain, dtype=torch.bool)
        if isinstance(twin, StareTwin):
            weights, rare_ones = twin.weights(tokens, state), twin.rare(tokens, 1)
        forecast.append((weights * plain).mean(-1))
        amplified = torch.where(rare_ones, plain, 0.0).sum(-1)
        rest = (torch.where(rare_ones, 0.0, weights * plain)).sum(-1)
        neutral.append(torch.where(amplified > 0, -rest / amplified, torch.nan))
    return {
        "entropy": before.entropy,
        "drift": torch.stack(drift).mean(0),
        "forecast": torch.stack(forecast).mean(0),
        "neutral": torch.stack(neutral).nanmean(0),
    }


def measured(history: History, world: World, target: float) -> dict[str, Tensor]:
    """[K] figures of a training.

    held: mean distance of the entropy from the target over the last half, as a share of the target.
    recovered: steps after a change of rewards until pass@1 is again what it was before, the rest of
        the training if it never is; only in worlds that change.
    """
    later = [i for i, step in enumerate(history.at) if 2 * step > history.at[-1]]
    found = {
        "entropy": history.entropy[-1],
        "reward": history.reward[-1],
        "held": (history.entropy[later] - target).abs().mean(0) / target,
        **{f"pass@{k}": values[-1] for k, values in history.pass_at.items()},
    }
    if world.later is not None:
        after = [i for i, step in enumerate(history.at) if step > world.changes_at]
        before = max(i for i, step in enumerate(history.at) if step <= world.changes_at)
        back = history.pass_at[1][after] >= history.pass_at[1][before]
        first = torch.where(back.any(0), back.double().argmax(0), len(after) - 1)
        steps = torch.tensor([history.at[i] - world.changes_at for i in after])
        found["recovered"] = steps[first].double()
    return found


def summary(values: Tensor) -> dict[str, float]:
    """Returns mean and standard error of the finite ones of [K] values."""
    values = values[values.isfinite()]
    error = values.std() / max(len(values), 1) ** 0.5 if len(values) > 1 else torch.tensor(0.0)
    return {"mean": round(float(values.mean()), 5), "error": round(float(error), 5)}


def run_cell(
    name: str, cell: Cell, seeds: int, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Trains every method of a cell. Returns by method the summary of each figure, and of its
    difference to the first method's.

    Args:
        before: what an earlier run returned for fewer methods: the first method and those that are
            missing are trained.

    Raises:
        ValueError: the first method's figures are not those of `before`.
    """
    chosen, before = MAPS[name], before or {}
    world, settings = chosen.world(cell, seeds), chosen.settings(cell)
    target = cell.get("target", TARGET)
    made = {
        method: drifted(world, twin, settings)
        if chosen.drift
        else measured(train(world, twin, settings), world, target)
        for number, (method, twin) in enumerate(chosen.methods(cell).items())
        if number == 0 or method not in before
    }
    base = next(iter(made.values()))
    found = {
        method: {
            "figures": {figure: summary(values) for figure, values in figures.items()},
            "over_first": {
                figure: summary(values - base[figure]) for figure, values in figures.items()
            },
        }
        for method, figures in made.items()
    }
    first = next(iter(made))
    if before and str(before[first]) != str(found[first]):  # as text, since nan is not nan
        raise ValueError(f"{name}, {cell}: {first} differs from before; remove the cell, and rerun")
    return {method: before.get(method) or found[method] for method in chosen.methods(cell)}
