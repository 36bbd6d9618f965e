"""Writes docs/study.md, its pictures and further tables from the laboratory's maps. The page calls
a map a grid of experiments, and a map's cells experiments.

    python benchmarks/laboratory/study.py            # from benchmarks/results/laboratory
    python benchmarks/laboratory/study.py --check    # says which files would change

Every sentence that judges is chosen by a rule: a method is "higher" or "lower" in a cell if its
mean difference to the map's first method, paired by seed, is more than three standard errors from
0.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import outcome

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/laboratory"
PAGE, PICTURES = ROOT / "docs/study.md", ROOT / "docs/pictures/laboratory"
TABLES = RESULTS / "README.md"  # what changes no decision
ERRORS = 3.0  # standard errors that a difference must exceed
NAMES = {
    "grpo": "GRPO",
    "dapo": "DAPO's clip",
    "twenty_entropy": "20-Entropy",
    "stare_o1": "STARE O1",
    "stare_c2": "STARE C2",
    "stare_o1_strong": "STARE O1, strong",
    "stare_c2_strong": "STARE C2, strong",
    "stare_adaptive": "STARE C2, adaptive",
    "stare_critical": "STARE C2, critical surprisal",
    "bonus": "entropy bonus",
    "dg": "DG",
    "clip_b": "Clip_B",
    "clip_v": "Clip_V",
    "repo_r": "REPO-R",
    "entropic": "EntroPIC",
    "steer": "STEER",
    "whole_batch": "whole batch",
    "micro_batches": "micro-batches",
    "share_0.1": "STARE O1, P = 0.1",
    "share_0.3": "STARE O1, P = 0.3",
    "critical": "STARE O1, critical surprisal",
    "c2_share_0.3": "STARE C2, P = 0.3, M = 0.1",
    "c2_critical": "STARE C2, critical surprisal, M = 0.1",
}
WORDS = {
    "lr": "learning rate",
    "group": "responses a prompt",
    "share": "share of right responses",
    "target": "entropy target, nats",
    "amplify": "W",
    "attenuate": "M",
    "micro_batches": "micro-batches",
    "coupling": "coupling",
    "rarity": "rarity, nats",
    "better": "share of rare responses that are right",
    "hard": "share of hard prompts",
    "updates": "updates a batch",
    "clip_high": "upper clip",
    "trained": "steps of GRPO before",
}
# axes that mean something else in a map
ELSEWHERE = {("share_scope", "share"): "P, share of rare tokens"}
# the figure that each map's picture shows; pass@1 where none is named
SHOWN = {"bands": "held", "critical_weight": "drift"}
# the figure that answers a map's question, where the picture shows another one
DECIDES = {"changing_reward": "recovered"}
FIGURES = {
    "pass@1": "pass@1",
    "pass@64": "pass@64",
    "recovered": "steps to recover",
    "held": "relative distance from the target",
    "drift": "change of entropy, nats a unit step",
}
# figures that are equal if two cells have the same training
SAME = ("entropy", "reward", "pass@1", "pass@16", "pass@64")
LESS_IS_BETTER = ("recovered", "held")
CELL_W, CELL_H, GAP, LEFT, TOP = 66, 30, 26, 92, 52
HEAD = 48  # above the panels
STYLE = """
.bg{fill:#fff}.ink{fill:#1d2126}.soft{fill:#5b636c}.pos{--c:#2f66d0}.neg{--c:#b63a9f}
@media (prefers-color-scheme:dark){.bg{fill:#14161a}.ink{fill:#e7e9ec}.soft{fill:#a9b0b9}
.pos{--c:#4675d6}.neg{--c:#b84a98}}
text{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.h{font-size:14px;font-weight:600}rect.pos,rect.neg{fill:var(--c)}
"""
CURVES = """
polyline{fill:none;stroke:var(--c);stroke-width:1.8}
.arm0{--c:#5b636c}.arm1{--c:#a86a00}.arm2{--c:#2b8a57}
.arm3{--c:#2f66d0}.arm4{--c:#b0319a}.arm5{--c:#c1432b;stroke-dasharray:6 3}
@media (prefers-color-scheme:dark){.arm0{--c:#a9b0b9}.arm1{--c:#e0a84a}.arm2{--c:#6fcf97}
.arm3{--c:#77a5ff}.arm4{--c:#f08ad8}.arm5{--c:#ff8a73}}
"""


OPENING = """\
# When does holding entropy pay?

<!-- made by benchmarks/laboratory/study.py -->

As a policy's entropy falls, the responses to a prompt become alike, and GRPO learns nothing from
responses with equal rewards. This page compares GRPO with methods that keep the policy's entropy
high: {methods} methods in simulated toy worlds, and {arms} methods on a tiny trained model. **No
large model was trained.**

## Results

Each row of the first table sums up one [grid of experiments](#how-it-was-measured) in toy worlds. A
method is in the column "higher pass@1" if its pass@1 is significantly higher than GRPO's in at
least half of the grid's experiments. A method whose pass@1 is significantly lower than GRPO's in at
least half of the experiments is in the column "lower pass@1". The number after a method's name is a
mean difference, the method's pass@1 minus GRPO's. The first table leaves out methods whose mean
difference is between -{least} and {least}. The [list of methods](#methods) explains the methods'
names.
"""
CHOOSING = """\
## How to choose
"""
TARGETS = """\
The next table ranks methods by two measures other than pass@1. A method's score counts the
experiments in which it is significantly better than GRPO, and subtracts those in which it is
significantly worse. The score is divided by the number of experiments. For each measure, the table
names only the methods with the highest result.
"""
SETTINGS = """\
The next table shows pass@1 and final entropy for each value of a STARE setting, as means over
experiments. [STARE](algorithms/stare.md) defines the weights W and M and the share P of rare
tokens. The table of STARE settings uses P = 0.3, except in the row that varies P. The table of
STARE settings shows for each setting whether larger values help. The best values in toy worlds,
such as a target in nats, do not apply to other models. `megatron-stare suggest` suggests an entropy
target from a run's first steps ([tuning](tuning.md)).
"""
UNKNOWN = """\
## How sure this is

In the toy worlds, a difference counts as significant if it is more than {errors:.0f} standard
errors from 0, without a correction for the {comparisons:,} comparisons of pass@1. All experiments
of a grid use the same random seeds, so the experiments' results are not independent.

These questions are open:

- Toy worlds cannot show how a large model behaves, because their states share no features, their
  responses have at most three tokens, and their learning rate does not adapt.
- The methods OPEFO, GEPO and GRPODropout were not compared, because this project had to infer their
  formulas.
"""
MEASURED = """\
## How it was measured

**Toy worlds.** A toy world has 8 prompts (16 in the grid of experiments `hard_prompts`). Each
prompt of a toy world is the root of a tree, and each token of a response chooses a branch. A
response in a toy world has three tokens (one in `hard_prompts`). The policy of a toy world has
separate logits for every node of the tree. All responses of a toy world can be enumerated, so
entropy, expected reward and pass@k are exact.

**Coupling.** When a network trains on one prompt, its answers to other prompts change too. A toy
world imitates this effect. It mixes each prompt's gradient with the mean gradient of all prompts.
The mean gradient's share of the mixture is called the coupling. Most grids of experiments use a
coupling of 0.5. The grid `clip_updates` uses 0.9, and the grids `coupling` and `hard_prompts`
compare several values.

**Grids of experiments.** A grid of experiments varies two settings, for example the learning rate
and the entropy target, with one experiment for each combination of values. In each experiment, all
methods train in the same {seeds} random worlds with the same random numbers. Some methods have only
one of the two settings that a grid varies. If both compared methods lack a setting, experiments
that differ only in this setting are the same, and count as one.

The toy worlds have their own implementation of each method, which `tests/test_laboratory.py`
compares with this project's implementation. `benchmarks/results/laboratory/README.md` has the best
method of every experiment, the counts for pass@64, and further tables of the trained model.

    python benchmarks/laboratory/run.py --out benchmarks/results/laboratory    # grids, resumable
    python benchmarks/laboratory/study.py                                      # this page

## Methods

- STARE O1 and STARE C2 are variants of [STARE](algorithms/stare.md). Unless a
  table varies W and M, plain STARE O1 and plain STARE C2 have the weights of the paper's recipes,
  W = 1.1 and M = 0.9.
- STARE O1 with strong weights has W = 3 and P = 0.3. STARE C2 with strong weights has W = 2,
  M = 0.2 and P = 0.3.
- STARE C2 with adaptive weights starts with W = 2, M = 0.2 and P = 0.3, and then keeps W between 1
  and 3, and M between 0.05 and 1.
- STARE C2 with critical surprisal is an experimental variant that is not part of this project. Each
  state of a world has a critical surprisal, and a token counts as rare if its surprisal is higher.
  STARE C2 with critical surprisal has the weights W = 2 and M = 0.2.
- DAPO's higher clip limit has no effect if each batch has only one update. Only the grid of
  experiments `clip_updates` has several updates per batch.
- 20-Entropy keeps a fifth of the tokens, and divides its loss by the number of kept tokens. With
  the same learning rate, a kept token therefore changes the policy about five times as much as with
  other methods.
- DG multiplies each token's loss by a weight between 0 and 1, so DG changes the policy less than
  other methods do.
- Clip_V removes up to one token per step from the loss. One token is a far larger share of a batch
  in a toy world than in a large run.
- This project had to infer REPO-R's rule for its coefficient zeta, so the results of REPO-R judge
  the inferred rule.

## Methods by world

Each cell of the next table starts with the mean difference between a method's pass@1 and GRPO's.
The second number of a cell counts the experiments in which the method's pass@1 is significantly
higher than GRPO's, and the third number counts those in which it is significantly lower. For
example, `+0.016, 8/0 of 15` means that a method's pass@1 is 0.016 higher on average, significantly
higher in 8 of 15 experiments, and significantly lower in none.
"""
OTHERS = """\
The next table shows the grids of experiments that compare only a few methods.
"""
MAPS = """\
## The grids of experiments

Each panel of a picture compares one method with GRPO. The picture of `share_scope` compares
selecting rare tokens in each micro-batch with selecting them in the whole batch. A dot in a picture
marks a difference that is not significant.
"""
DETAILS = """\
# Tables of the laboratory

<!-- made by benchmarks/laboratory/study.py -->

`docs/study.md` has the question, the conclusions and the pictures. Two processes computed the grids
of experiments in {minutes:.0f} minutes.

## Where methods differ from the first of each grid

Each grid of experiments compares its methods with its first method. Experiments of a grid repeat a
training if both compared methods ignore a setting, for example the target. The table counts a
repeated training once.
"""
ANSWERS = """\
## Which method answers each grid's question best

The table compares each method with the grid's first method, experiment by experiment. The
comparison uses the number that answers the grid's question. The table names the methods with the
most wins per experiment, after subtracting losses. Numbers in brackets are mean differences from
the first method. For the distance from the target, each target counts as a separate experiment.
"""
BEST = """\
## The best method of each cell

Each cell of a table names the method with the best mean pass@1, and the method's mean pass@1. The
number in brackets is the mean pass@1 of the grid's first method: GRPO, or the whole batch's
quantile in `share_scope`. The table of `bands` has the mean relative distance from the target in
place of pass@1.
"""
# the maps that compare all methods, and when a user is in each
WORLDS = {
    "changing_reward": "the reward changes during training",
    "rare_strategy": "a rarely sampled strategy pays more",
    "hard_prompts": "some prompts need an unusual answer",
    "bands": "the reward is fixed; learning rate and entropy target vary",
    "coupling": "the reward is fixed; coupling and share of right responses vary",
}
LEAST = 0.005  # mean difference of pass@1 below which the summary leaves a method out


def read() -> dict[str, dict[str, Any]]:
    """Returns the maps whose cells are all there, by name."""
    found = {}
    for file in sorted(RESULTS.glob("*.json")):
        told = json.loads(file.read_text())
        (first, across), (second, down) = told["axes"].items()
        keys = [f"{first} {a}, {second} {b}" for a in across for b in down]
        if told["cells"].keys() == set(keys):
            found[file.stem] = told
    return found


def word(name: str, axis: str) -> str:
    """Returns the words for an axis of a map."""
    return ELSEWHERE.get((name, axis), WORDS[axis])


def verdict(difference: Mapping[str, float]) -> int:
    """1: higher than the first method's, -1: lower, 0: neither is shown."""
    mean, error = difference["mean"], difference["error"]
    if abs(mean) <= ERRORS * error or mean == 0:
        return 0
    return 1 if mean > 0 else -1


def methods(told: Mapping[str, Any]) -> list[str]:
    """Returns the names of a map's methods; the first is the one the others are compared with."""
    return list(next(iter(told["cells"].values())))


def trainings(
    told: Mapping[str, Any], method: str, figure: str = "pass@1"
) -> dict[str, Mapping[str, float]]:
    """Returns a method's differences to the first, one for each distinct pair of trainings. Where
    neither depends on an axis, a map's cells repeat the same training."""
    found = {}
    for cell in told["cells"].values():
        # the distance from the target depends on the cell even if the training does not
        pair = [
            {name: each for name, each in cell[one]["figures"].items() if name in (figure, *SAME)}
            for one in (methods(told)[0], method)
        ]
        found[json.dumps(pair)] = cell[method]["over_first"][figure]
    return found


def counts(told: Mapping[str, Any], method: str, figure: str) -> tuple[int, int, int]:
    """Returns the numbers of distinct trainings in which a method is higher and lower than the
    first, and of all."""
    found = [verdict(each) for each in trainings(told, method, figure).values()]
    return found.count(1), found.count(-1), len(found)


def mean_over_first(told: Mapping[str, Any], method: str, figure: str) -> float:
    """Returns a method's difference to the first, in the figure's unit: mean over trainings."""
    return fmean(each["mean"] for each in trainings(told, method, figure).values())


def picture(name: str, told: Mapping[str, Any]) -> str:
    """Returns an SVG: a panel for each method with its difference to the first method in every
    cell; bold colours where the difference is shown."""
    figure = SHOWN.get(name, "pass@1")
    (first, across), (second, down) = told["axes"].items()
    base, *others = methods(told)
    others = [each for each in others if each in NAMES]
    width_of = LEFT + len(down) * CELL_W + GAP
    columns = max(1, min(3, len(others), 1200 // width_of))
    rows = -(-len(others) // columns)
    height_of = TOP + len(across) * CELL_H + GAP
    width, height = columns * width_of, rows * height_of + HEAD
    values = [
        abs(cell[m]["over_first"][figure]["mean"])
        for cell in told["cells"].values()
        for m in others
    ]
    largest = max([*values, 1e-9])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}"'  # a small map is not blown up to the page's width
        f' role="img" aria-label="{escape(told["question"])}"><style>{STYLE}</style>'
        f'<rect class="bg" width="{width}" height="{height}"/>'
        f'<text class="h ink" x="12" y="20">{escape(FIGURES[figure])}: difference to'
        f" {escape(NAMES[base])}</text>"
        f'<text class="soft" x="12" y="40">rows: {escape(word(name, first))};'
        f" columns: {escape(word(name, second))}</text>"
    ]
    for number, method in enumerate(others):
        x0 = (number % columns) * width_of
        y0 = HEAD + (number // columns) * height_of
        parts.append(
            f'<text class="h ink" x="{x0 + 12}" y="{y0 + 22}">{escape(NAMES[method])}</text>'
        )
        for j, b in enumerate(down):
            x = x0 + LEFT + j * CELL_W + CELL_W / 2
            parts.append(
                f'<text class="soft" text-anchor="middle" x="{x}" y="{y0 + 42}">{b}</text>'
            )
        for i, a in enumerate(across):
            y = y0 + TOP + i * CELL_H
            parts.append(
                f'<text class="soft" text-anchor="end" x="{x0 + LEFT - 8}" y="{y + 20}">{a}</text>'
            )
            for j, b in enumerate(down):
                each = told["cells"][f"{first} {a}, {second} {b}"][method]["over_first"][figure]
                sign = each["mean"] > 0
                better = sign != (figure in LESS_IS_BETTER)
                shown = verdict(each) != 0
                strength = min(abs(each["mean"]) / largest, 1.0) * (0.75 if shown else 0.15)
                x = x0 + LEFT + j * CELL_W
                parts.append(
                    f'<rect class="{"pos" if better else "neg"}" x="{x}" y="{y}"'
                    f' width="{CELL_W - 2}" height="{CELL_H - 2}" fill-opacity="{strength:.3f}"/>'
                )
                digits = {"recovered": 0, "drift": 4}.get(figure, 3)
                text = f"{each['mean']:+.{digits}f}" if shown else "·"
                parts.append(
                    f'<text class="ink" text-anchor="middle" x="{x + CELL_W / 2 - 1}"'
                    f' y="{y + 19}">{text}</text>'
                )
    return "".join(parts) + "</svg>\n"


def table(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table: for every map and method the trainings in which it is higher and lower."""
    lines = ["| grid | method | pass@1 higher, lower | pass@64 higher, lower | of experiments |"]
    lines += ["|---|---|---|---|---|"]
    for name, told in maps.items():
        if "pass@1" not in next(iter(next(iter(told["cells"].values())).values()))["figures"]:
            continue
        for method in methods(told)[1:]:
            one, many = counts(told, method, "pass@1"), counts(told, method, "pass@64")
            lines.append(
                f"| `{name}` | {NAMES[method]} | {one[0]}, {one[1]} | {many[0]}, {many[1]} |"
                f" {one[2]} |"
            )
    return lines


# a setting's map, its axis there, and the method whose figures are taken
CHOICES = (
    ("sparsity_target", "target", "stare_o1_strong"),
    ("weights", "amplify", "stare_c2"),
    ("weights", "attenuate", "stare_c2"),
    ("share_scope", "share", "whole_batch"),
)


def choices(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table: for each value of STARE's settings the mean of its cells."""
    lines = ["| setting | value: pass@1, entropy at the end in nats | best pass@1 at |"]
    lines += ["|---|---|---|"]
    lower = []
    for name, axis, method in CHOICES:
        if name not in maps:
            continue
        told = maps[name]
        (first, across), (second, down) = told["axes"].items()
        means = {}
        for value in told["axes"][axis]:
            cells = [
                told["cells"][f"{first} {a}, {second} {b}"][method]["figures"]
                for a in across
                for b in down
                if (a if axis == first else b) == value
            ]
            means[value] = [
                sum(cell[figure]["mean"] for cell in cells) / len(cells)
                for figure in ("pass@1", "entropy")
            ]
        each = "; ".join(
            f"{value:g}: {one:.3f}, {nats:.2f}" for value, (one, nats) in means.items()
        )
        chosen = max(means, key=lambda value: means[value][0])
        lines.append(f"| {word(name, axis)} ({NAMES[method]}) | {each} | {chosen:g} |")
        if chosen != min(means) and means[chosen][1] < means[min(means)][1] - 0.02:
            lower.append(f"a larger {word(name, axis).partition(',')[0]}")
    if lower:
        said = " or ".join(filter(None, (", ".join(lower[:-1]), lower[-1])))
        lines += [
            "",
            *wrapped(
                f"In the toy worlds, {said} raises STARE's pass@1. The final entropy is then lower,"
                " not higher."
            ),
        ]
    return lines


def answers(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table: for each map's question the methods that are better most often."""
    lines = [
        "| question | measure | methods with the highest score (mean difference from GRPO) |",
        "|---|---|---|",
    ]
    for name, told in maps.items():
        figure = DECIDES.get(name, SHOWN.get(name, "pass@1"))
        others = [each for each in methods(told)[1:] if each in NAMES]
        if figure == "drift" or len(others) < 3:
            continue
        sign = -1 if figure in LESS_IS_BETTER else 1
        net = {}
        for each in others:
            higher, lower, of = counts(told, each, figure)
            net[each] = (sign * (higher - lower), of)
        most = max(better / of for better, of in net.values())
        if most <= 0:
            continue
        digits = 0 if figure == "recovered" else 3
        found = "; ".join(
            f"{NAMES[each]}: {better} of {of} ({mean_over_first(told, each, figure):+.{digits}f})"
            for each, (better, of) in net.items()
            if better / of == most
        )
        lines.append(f"| {told['question']} (`{name}`) | {FIGURES[figure]} | {found} |")
    return lines


def best(name: str, told: Mapping[str, Any], figure: str) -> list[str]:
    """Returns a table of a map: in each cell the method with the best mean, and its value."""
    (first, across), (second, down) = told["axes"].items()
    less = figure in LESS_IS_BETTER
    lines = [
        f"| {word(name, first)} \\ {word(name, second)} | " + " | ".join(map(str, down)) + " |"
    ]
    lines += ["|---" * (len(down) + 1) + "|"]
    for a in across:
        cells = []
        for b in down:
            cell = told["cells"][f"{first} {a}, {second} {b}"]
            means = {m: each["figures"][figure]["mean"] for m, each in cell.items()}
            chosen = (min if less else max)(means, key=lambda m: means[m])
            digits = 0 if figure == "recovered" else 3
            base = means[methods(told)[0]]
            cells.append(f"{NAMES[chosen]} {means[chosen]:.{digits}f} ({base:.{digits}f})")
        lines.append(f"| {a} | " + " | ".join(cells) + " |")
    return lines


def crossings(told: Mapping[str, Any]) -> list[str]:
    """Returns a table of a drift map: for each row and method the change at the lowest and at the
    highest weight, and the weight at which the change is 0, by linear interpolation."""
    (first, across), (second, down) = told["axes"].items()
    lines = [
        f"| {WORDS[first]} | selection | change at {WORDS[second]} = {down[0]:g} | at {down[-1]:g}"
        " | 0 at |",
        "|---|---|---|---|---|",
    ]
    for a in across:
        for method in methods(told)[1:]:
            means = [
                told["cells"][f"{first} {a}, {second} {b}"][method]["figures"]["drift"]["mean"]
                for b in down
            ]
            zero = "none"
            for (w, y), (v, z) in pairwise(zip(down, means, strict=True)):
                if y < 0 <= z:
                    zero = f"{w - y * (v - w) / (z - y):.1f}"
            lines.append(f"| {a} | {NAMES[method]} | {means[0]:+.4f} | {means[-1]:+.4f} | {zero} |")
    return lines


def everywhere(maps: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the maps that compare all methods, in the page's order."""
    return {name: maps[name] for name in WORLDS if name in maps}


def signed(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table: for each of these maps the methods that are higher, and those that are
    lower, in at least half of the trainings and by at least `LEAST` on average."""
    lines = ["| toy worlds (grid) | higher pass@1 | lower pass@1 |", "|---|---|---|"]
    for name, told in everywhere(maps).items():
        found: dict[int, list[tuple[float, str]]] = {1: [], -1: []}
        for method in methods(told)[1:]:
            higher, lower, of = counts(told, method, "pass@1")
            mean = mean_over_first(told, method, "pass@1")
            for sign, number in ((1, higher), (-1, lower)):
                if 2 * number >= of and sign * mean >= LEAST:
                    found[sign].append((mean, f"{NAMES[method]} {mean:+.3f}"))
        cells = (
            "; ".join(text for _, text in sorted(each, key=lambda one: -abs(one[0]))) or "none"
            for each in found.values()
        )
        lines.append(f"| {WORLDS[name]} (`{name}`) | {' | '.join(cells)} |")
    return lines


def spoken(method: str) -> str:
    """Returns a method's name as a sentence says it: STARE O1 (strong weights)."""
    return "the entropy bonus" if method == "bonus" else outcome.in_words(NAMES[method])


def entropy_alone(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns sentences on the methods that end with more entropy and a lower pass@1 than GRPO in
    both maps with a fixed reward, and on STARE O1 with strong weights if it ends with less entropy
    and a higher pass@1."""
    fixed = [maps[name] for name in ("bands", "coupling")]
    more, less = {}, []
    for method in methods(fixed[0])[1:]:
        nats = [mean_over_first(told, method, "entropy") for told in fixed]
        gains = [mean_over_first(told, method, "pass@1") for told in fixed]
        if min(nats) >= 0.1 and max(gains) < 0:
            more[method] = min(nats)
        if method == "stare_o1_strong" and max(nats) < 0 < min(gains):
            less = nats
    said = []
    if more:
        named = " and ".join(spoken(each) for each in more)
        said.append(
            "More entropy alone does not raise pass@1. In the grids of experiments `bands` and"
            f" `coupling`, the reward is fixed. There, {named} end with at least"
            f" {min(more.values()):.2f} nats more entropy than GRPO, but with a lower pass@1."
        )
    if less:
        low, high = sorted(-each for each in less)
        said.append(
            f"In the grids of experiments `bands` and `coupling`, {spoken('stare_o1_strong')} ends"
            f" with a higher pass@1 than GRPO, but with {low:.3f} to {high:.3f} nats less entropy."
        )
    return said


def safe(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns sentences on how often STARE's strong variants are higher and lower than GRPO."""
    lines = []
    pair = ("stare_o1_strong", "stare_c2_strong")
    for method in pair:
        shown = [told for told in maps.values() if {"grpo", method} <= set(methods(told))]
        # maps share some trainings
        distinct = {key: one for told in shown for key, one in trainings(told, method).items()}
        found = [verdict(each) for each in distinct.values()]
        lower = found.count(-1) or "none"
        lines.append(
            ("" if found.count(-1) else f"A cautious choice is {spoken(method)}. ")
            + f"In the toy worlds, {spoken(method)} has a significantly higher pass@1 than GRPO in"
            f" {found.count(1)} of {len(found)} experiments, and a significantly lower pass@1 in"
            f" {lower}."
        )
    gains = {each: mean_over_first(maps["changing_reward"], each, "pass@1") for each in pair}
    most, least = sorted(pair, key=lambda each: -gains[each])
    lines.append(
        f"In toy worlds in which {WORLDS['changing_reward']}, {spoken(most)} raises pass@1 by"
        f" {gains[most]:.3f} over GRPO, and {spoken(least)} by {gains[least]:.3f}."
    )
    return lines


def gentle(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a sentence on what STARE changes with its paper's weights."""
    most = max(
        abs(mean_over_first(told, method, "pass@1"))
        for told in everywhere(maps).values()
        for method in ("stare_o1", "stare_c2")
    )
    return [
        "With the weights of the paper's recipes (W = 1.1, M = 0.9), STARE hardly changes pass@1 in"
        f" the toy worlds: the mean difference from GRPO is at most {most:.3f} in each of"
        f" {len(everywhere(maps))} grids of experiments."
    ]


def many(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns sentences that compare pass@1 and pass@64 over all methods and trainings of the maps
    that compare all methods."""
    sums = {}
    for figure in ("pass@1", "pass@64"):
        each = [
            counts(told, method, figure)
            for told in everywhere(maps).values()
            for method in methods(told)[1:]
        ]
        sums[figure] = [sum(column) for column in zip(*each, strict=True)]
    (one, less, of), (far, fewer, _) = sums["pass@1"], sums["pass@64"]
    return [
        f"Of {of} comparisons of a method with GRPO in toy worlds, {one} show a significantly"
        f" higher pass@1 than GRPO's, and {less} a significantly lower one. Of the same {of}"
        f" comparisons with GRPO, {far} show a significantly higher pass@64 than GRPO's, and"
        f" {fewer} a significantly lower one."
    ]


def fall(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns sentences on the weights at which amplified rare tokens stop the fall of entropy."""
    rows = [row.removesuffix(" |").split(" | ") for row in crossings(maps["critical_weight"])[2:]]
    largest = maps["critical_weight"]["axes"]["amplify"][-1]
    at: dict[str, list[str]] = {}
    for row in rows:
        name, _, kind = row[1].partition(", ")
        at.setdefault(f"{name} ({kind})", []).append(row[-1])
    never = [name for name, found in at.items() if set(found) == {"none"}]
    said = []
    if never:
        said.append(
            "In the grid of experiments `critical_weight`, a toy policy makes one small update, in"
            f" which STARE's weight W is at most {largest:g}. With these variants of STARE, the"
            " update lowers entropy for every W:"
            f" {'; '.join(name.removeprefix('STARE ') for name in never)}."
        )
    for name, found in at.items():
        if "none" not in found:
            said.append(
                f"With {name}, the update lowers entropy if W is small, and raises entropy if W is"
                f" large. The limit lies between W = {min(found, key=float)} and"
                f" W = {max(found, key=float)}, depending on the experiment."
            )
    return said


def matrix(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table: a row for each method, a column for each map that compares all methods."""
    shown = everywhere(maps)
    lines = [f"| method | {' | '.join(f'`{name}`' for name in shown)} |"]
    lines += ["|---" * (len(shown) + 1) + "|"]
    for method in methods(next(iter(shown.values())))[1:]:
        cells = []
        for told in shown.values():
            higher, lower, of = counts(told, method, "pass@1")
            mean = mean_over_first(told, method, "pass@1")
            cells.append(f"{mean:+.3f}, {higher}/{lower} of {of}")
        lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    return lines


def rest(maps: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table of the maps that compare some methods only."""
    lines = [
        "| grid | method | compared with | pass@1: mean difference, higher/lower of experiments |",
        "|---|---|---|---|",
    ]
    for name, told in maps.items():
        if name in WORLDS or SHOWN.get(name) == "drift":
            continue
        base, *others = methods(told)
        for method in others:
            higher, lower, of = counts(told, method, "pass@1")
            mean = mean_over_first(told, method, "pass@1")
            lines.append(
                f"| `{name}` | {NAMES[method]} | {NAMES[base]} | {mean:+.3f},"
                f" {higher}/{lower} of {of} |"
            )
    return lines


def compared(maps: Mapping[str, Mapping[str, Any]]) -> int:
    """Returns the number of comparisons of pass@1 that all maps make."""
    return sum(
        counts(told, method, "pass@1")[2]
        for name, told in maps.items()
        for method in methods(told)[1:]
        if SHOWN.get(name) != "drift"
    )


def wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    """Returns a paragraph, or an item of a list, in lines of at most 100 columns."""
    return textwrap.wrap(
        text,
        100,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def laid(text: str) -> list[str]:
    """Returns a text's lines, its paragraphs wrapped."""
    lines: list[str] = []
    for block in text.strip("\n").split("\n\n"):
        if block.startswith(("#", "<", "    ", "- ", "|", "!")):
            lines += [*block.splitlines(), ""]
        else:
            lines += [*wrapped(" ".join(block.split())), ""]
    return lines


def items(said: Iterable[str]) -> list[str]:
    """Returns a list of a page."""
    return [*(line for each in said for line in wrapped(each, "- ", "  ")), ""]


def page(maps: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns docs/study.md."""
    seeds = {told["seeds"] for told in maps.values()}
    trained = outcome.read()
    opening = OPENING.format(
        methods=len(methods(maps["bands"])) - 1,
        arms=len(trained["plan"]["arms"]) - 1 if trained else 0,
        least=LEAST,
    )
    by_other_figures = {name: maps[name] for name in ("bands", "changing_reward")}
    unknown = UNKNOWN.format(errors=ERRORS, comparisons=compared(maps))
    lines = [
        *laid(opening),
        *signed(maps),
        "",
        *items(
            [
                *(outcome.conclusions(trained) if trained else []),
                *entropy_alone(maps),
                *many(maps),
                *gentle(maps),
                *fall(maps),
            ]
        ),
        *laid(CHOOSING),
        *items(safe(maps)),
        *laid(TARGETS),
        *answers(by_other_figures),
        "",
        *laid(SETTINGS),
        *choices(maps),
        "",
        *laid(unknown)[:-1],
        *items(outcome.open_questions(trained) if trained else []),
        *laid(MEASURED.format(seeds=", ".join(map(str, sorted(seeds))))),
        *matrix(maps),
        "",
        *laid(OTHERS),
        *rest(maps),
        "",
        *(laid("\n".join(outcome.section(trained))) if trained else []),
        *laid(MAPS),
    ]
    for name, told in maps.items():
        lines += [
            f"### {told['question']} (`{name}`)",
            "",
            f"![Grid {name}](pictures/laboratory/{name}.svg)",
            "",
        ]
    return "\n".join([*lines, "<!-- to here: study -->", ""])


def details(maps: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns benchmarks/results/laboratory/README.md."""
    minutes = sum(told["seconds"] for told in maps.values()) / 60
    lines = [*laid(DETAILS.format(minutes=minutes)), *table(maps), ""]
    lines += [*laid(ANSWERS), *answers(maps), "", *laid(BEST)]
    for name, told in maps.items():
        figure = SHOWN.get(name, "pass@1")
        lines += [f"### {told['question']} (`{name}`)", ""]
        if figure == "drift":
            lines += [
                "The table shows the exact change of entropy by one small update, in nats per unit",
                "of step size:",
                "",
                *crossings(told),
                "",
            ]
        else:
            lines += [*best(name, told, figure), ""]
    if trained := outcome.read():
        lines += laid("\n".join(outcome.details(trained)))
    return "\n".join([*lines, "<!-- to here: study -->", ""])


def pictures(maps: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the page's pictures by name."""
    drawn = {name: picture(name, told) for name, told in maps.items()}
    trained = outcome.read()
    return drawn | ({"trained": outcome.picture(trained, STYLE + CURVES)} if trained else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a file would change")
    args = parser.parse_args()
    maps = read()
    made = {PAGE: page(maps), TABLES: details(maps)}
    made |= {PICTURES / f"{name}.svg": text for name, text in pictures(maps).items()}
    stale = [file for file, text in made.items() if not file.exists() or file.read_text() != text]
    if args.check:
        for file in stale:
            print(f"{file.relative_to(ROOT)} is stale: python benchmarks/laboratory/study.py")
        sys.exit(bool(stale))
    PICTURES.mkdir(exist_ok=True)
    for file in stale:
        file.write_text(made[file])


if __name__ == "__main__":
    main()
