"""Holds `megatron-stare suggest` to a sweep, over settings of the laboratory that no map has.

    python benchmarks/laboratory/held_out.py --out benchmarks/results/laboratory_suggest.json

Settings are drawn at random: the world, its sparsity, coupling and rarity, the learning rate and
the group size. In each the default (STARE O1 as algorithm.name: stare has it) and a sweep of
weights and targets train the same worlds. A setting counts if the default loses at least a tenth
to the best of the sweep. There the suggestion, made from the first 50 steps of the default, has
closed the share (suggested - default) / (best - default) of the gap. Run again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from maps import METHODS
from simulate import Settings, log_softmax_at, sample, train
from torch import Tensor
from twins import StareTwin, Tokens
from worlds import World, bandit, changing, rare, tree

from megatron_stare.algorithms.sensitivity import second_moment, sensitivity
from megatron_stare.planning.suggestion import Facts, Suggestion, suggest

sys.path.append(str(Path(__file__).parents[1]))
from machine import machine

WANTED, GAP, FIRST = 40, 0.1, 50
DEFAULT = METHODS["stare_o1"]
WEIGHTS = ((1.1, 0.9), (1.5, 0.5), (3.0, 1.0), (3.0, 0.1), (1.0, 0.1))
TARGETS = (0.1, 0.3, 0.8)


def drawn(seed: int) -> tuple[dict[str, Any], Settings]:
    """Returns a random setting: keywords of a world, with its name, and the training's."""
    draw = random.Random(f"held out {seed}")
    name = draw.choice(("tree", "rare", "changing", "bandit"))
    world: dict[str, Any] = {"name": name, "seed": 10_000 + seed}
    world["coupling"] = round(draw.uniform(0.2, 0.9), 2)
    world["spread"] = round(draw.uniform(0.7, 2.0), 2)
    if name in ("tree", "changing"):
        world["share"] = round(10 ** draw.uniform(-2.2, -1.0), 4)
    if name == "changing":
        world["changes_at"] = draw.choice((150, 250))
    if name == "rare":
        world["rarity"] = round(draw.uniform(0.0, 2.0), 2)
        world["better"] = round(draw.uniform(0.05, 0.3), 3)
    if name == "bandit":
        world["hard"] = draw.choice((0.125, 0.25, 0.5))
    settings = Settings(
        steps=400,
        group=draw.choice((4, 8, 16)),
        lr=round(10 ** draw.uniform(-0.4, 0.4), 3),
        every=25,
        seed=seed,
    )
    return world, settings


def made(world: dict[str, Any], seeds: int) -> World:
    makers = {"tree": tree, "rare": rare, "changing": changing, "bandit": bandit}
    rest = {key: value for key, value in world.items() if key != "name"}
    return makers[world["name"]](seeds, **rest)


def facts_of(world: World, twin: StareTwin, settings: Settings) -> Facts:
    """Returns what `megatron-stare suggest` reads in the metrics of a run's first steps, as means
    over the seeds too. The policy is that at the start, in the middle and at the end of these
    steps."""
    both = replace(twin, variant="C2")
    found: list[list[float]] = []
    generator = torch.Generator().manual_seed(settings.seed + 1)
    for steps in (0, FIRST // 2, FIRST):
        logits = world.logits
        if steps:
            logits = train(world, twin, replace(settings, steps=steps, every=steps)).logits
        batch = sample(world, logits, 0, settings.group, generator)
        here = log_softmax_at(logits, batch.state)
        p = here.exp()
        s2 = second_moment((p * p).sum(-1), (p * p * here).sum(-1), batch.entropy)
        change = -batch.advantage * sensitivity(batch.old_log_prob, batch.entropy, s2)
        tokens = Tokens(batch.old_log_prob, batch.old_log_prob, batch.entropy, batch.advantage)
        parts = (torch.ones_like(change, dtype=torch.bool), both.rare(tokens, 1))
        parts = (*parts, both.rare(tokens, -1))
        sums = [float(torch.where(part, change, 0.0).mean()) for part in parts]
        found.append([float(batch.entropy.mean()), *sums])
    plain, plus, minus = (sum(row[i] for row in found) / len(found) for i in (1, 2, 3))
    return Facts(found[0][0], found[-1][0], plain, plus, minus)


def score(world: World, twin: StareTwin, settings: Settings) -> float:
    """Returns the mean expected reward over the last half of the training, all seeds."""
    history = train(world, twin, settings)
    later: Tensor = history.reward[len(history.at) // 2 :]
    return float(later.mean())


def examined(seed: int, seeds: int) -> dict[str, Any]:
    """Trains a setting with the default, the sweep and the suggestion."""
    settings_of_world, settings = drawn(seed)
    world = made(settings_of_world, seeds)
    assert isinstance(DEFAULT, StareTwin)
    default = score(world, DEFAULT, settings)
    swept = {
        f"W {w}, M {m}, target {target}": score(
            world,
            replace(DEFAULT, variant="C2", amplify=w, attenuate=m, entropy_target=target),
            settings,
        )
        for w, m in WEIGHTS
        for target in TARGETS
    }
    facts = facts_of(world, DEFAULT, settings)
    found: Suggestion = suggest(facts)
    twin = replace(
        DEFAULT,
        variant="C2",
        amplify=found.amplify,
        attenuate=found.attenuate,
        entropy_target=found.entropy_target,
    )
    return {
        "world": settings_of_world,
        "lr": settings.lr,
        "group": settings.group,
        "facts": vars(facts),
        "suggested": [found.entropy_target, found.amplify, found.attenuate],
        "default": default,
        "best": max(swept.values()),
        "best of sweep": max(swept, key=lambda name: swept[name]),
        "score": score(world, twin, settings),
    }


def counts(row: dict[str, Any]) -> bool:
    return bool(row["best"] - row["default"] >= GAP * row["best"])


def told(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the numbers of settings with a gap, of those in which at least half of it is closed,
    and of all settings that the suggestion left below the default."""
    gaps = [row for row in rows if counts(row)]
    closed = [(row["score"] - row["default"]) / (row["best"] - row["default"]) for row in gaps]
    return {
        "with a gap": len(gaps),
        "at least half closed": sum(share >= 0.5 for share in closed),
        "below the default": sum(row["score"] < row["default"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=40, help="worlds of a setting")
    parser.add_argument("--from-seed", type=int, default=0, help="the first setting's number")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        rows = json.loads(args.out.read_text())["settings"]
    while sum(map(counts, rows)) < WANTED:
        rows.append(examined(args.from_seed + len(rows), args.seeds))
        found = {"machine": machine(), "seeds": args.seeds, **told(rows), "settings": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(len(rows), told(rows), flush=True)


if __name__ == "__main__":
    main()
