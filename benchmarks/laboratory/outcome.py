"""Says what the runs of `trained.py` came to, by the rules of `preregistration.yaml`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results/laboratory_trained.json"
NAMES = {
    "grpo": "GRPO",
    "dapo": "DAPO",
    "twenty_entropy": "20-Entropy",
    "stare_o1_strong": "STARE O1, strong",
    "stare_c2_strong": "STARE C2, strong",
    "bonus": "entropy bonus",
}
FIGURES = ("pass@1", "pass@16", "entropy")
# half-width of a 95 % interval in standard errors, by the number of values (Student's t)
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
W, H, LEFT, TOP, PAD = 420, 190, 46, 44, 34
IN_LEGEND = 3  # names in a line of the legend


def read() -> dict[str, Any] | None:
    """Returns the results, or None until every run of the evaluation is made."""
    if not RESULTS.exists():
        return None
    told = json.loads(RESULTS.read_text())
    plan = told["plan"]
    asked = itertools.product(plan["tasks"], plan["arms"], plan["seeds"]["evaluation"])
    whole = all(f"{task}, {arm}, seed {seed}" in told["runs"] for task, arm, seed in asked)
    return told if whole else None


def values(told: Mapping[str, Any], task: str, arm: str, figure: str) -> list[Any]:
    """Returns a figure of an arm's runs of the evaluation, by seed."""
    seeds = told["plan"]["seeds"]["evaluation"]
    return [told["runs"][f"{task}, {arm}, seed {seed}"][figure] for seed in seeds]


def interval(found: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean and the ends of its 95 % interval."""
    mean, half = fmean(found), STUDENT[len(found)] * stdev(found) / math.sqrt(len(found))
    return mean, mean - half, mean + half


def stated(found: Sequence[float]) -> str:
    """Returns the mean with its 95 % interval as text. Equal values have no spread from which an
    interval could be computed."""
    mean, low, high = interval(found)
    return f"{mean:.3f}, all alike" if same(found) else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def same(found: Sequence[float]) -> bool:
    """Returns True if all values are equal up to rounding."""
    return max(found) - min(found) < 1e-9


def most_successes(runs: int) -> float:
    """Returns the upper end of the two-sided 95 % interval of a share of runs, if it was 0 in all
    of them (Clopper and Pearson)."""
    return 1 - 0.025 ** (1 / runs)


def sign_flip(differences: Sequence[float]) -> float:
    """Returns the two-sided p of the exact sign-flip test: the share of all choices of signs whose
    mean is at least as far from 0."""
    seen = abs(sum(differences)) - 1e-12  # rounding must not part equal sums
    flipped = itertools.product(*((each, -each) for each in differences))
    sums = [abs(sum(each)) for each in flipped]
    return sum(each >= seen for each in sums) / len(sums)


def holm(found: Mapping[Any, float]) -> dict[Any, float]:
    """Returns p values corrected by Holm's rule for having made them all."""
    corrected: dict[Any, float] = {}
    largest = 0.0
    for rank, key in enumerate(sorted(found, key=lambda key: found[key])):
        largest = max(largest, min(1.0, (len(found) - rank) * found[key]))
        corrected[key] = largest
    return corrected


def differences(told: Mapping[str, Any], task: str, arm: str) -> list[float]:
    """Returns an arm's pass@1 less that of the arm it is compared with, by seed."""
    base = values(told, task, told["plan"]["with"], "pass@1")
    return [a - b for a, b in zip(values(told, task, arm, "pass@1"), base, strict=True)]


def tested(told: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Returns the corrected p of the comparisons that decide, by task and arm."""
    plan = told["plan"]
    pairs = [(task, arm) for task in plan["tasks"] for arm in plan["compared"]]
    corrected = holm({pair: sign_flip(differences(told, *pair)) for pair in pairs})
    return {pair: corrected[pair] for pair in pairs}


def proven(told: Mapping[str, Any]) -> dict[tuple[str, str], bool]:
    """Returns whether each comparison that decides shows a difference, by task and arm."""
    plan = told["plan"]
    return {
        pair: p < plan["level"] and abs(fmean(differences(told, *pair))) >= plan["least"]
        for pair, p in tested(told).items()
    }


def decided(told: Mapping[str, Any]) -> list[str]:
    """Returns a table of the comparisons that decide."""
    base, p, clear = NAMES[told["plan"]["with"]], tested(told), proven(told)
    lines = [
        f"| task | method | pass@1 minus {base}'s, 95 % interval | p (Holm) | |",
        "|---|---|---|---|---|",
    ]
    for task, arm in p:
        each = differences(told, task, arm)
        mean, low, high = interval(each)
        shown = (
            f"{mean:+.3f}, all alike" if same(each) else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        )
        if clear[task, arm]:
            said = "higher" if mean > 0 else "lower"
        else:
            said = "not shown; " + unshown(told, task, arm)
        lines.append(f"| `{task}` | {NAMES[arm]} | {shown} | {p[task, arm]:.3f} | {said} |")
    return lines


def unshown(told: Mapping[str, Any], task: str, arm: str) -> str:
    """Returns the effects that an arm's runs exclude though they show none."""
    each, least = differences(told, task, arm), told["plan"]["least"]
    base = values(told, task, told["plan"]["with"], "pass@1")
    if not any(base) and not any(each):
        return (
            f"all {len(base)} runs of both methods are at 0, which rules out only that the share of"
            f" runs above 0 is more than {most_successes(len(base)):.2f}"
        )
    if same(each):
        return "all differences are equal and give no interval"
    _, low, high = interval(each)
    if -least < low and high < least:
        return f"{least} either way is excluded"
    # pass@1 lies between 0 and 1, so differences beyond these ends are impossible, not excluded
    ends = [f"above {high:+.3f}"] if high < 1 - fmean(base) else []
    ends += [f"below {low:+.3f}"] if low > -fmean(base) else []
    return f"{' and '.join(ends)} is excluded" if ends else "no possible difference is excluded"


def arms(told: Mapping[str, Any], task: str) -> list[str]:
    """Returns a table of what each arm came to on a task."""
    recovers = "changes_after" in told["plan"]["tasks"][task]
    head = ["method", *FIGURES[:-1], "entropy, nats", *(["steps to recover"] if recovers else [])]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm in told["plan"]["arms"]:
        cells = [stated(values(told, task, arm, figure)) for figure in FIGURES]
        if recovers:
            steps = values(told, task, arm, "steps to recover")
            done = [each for each in steps if each is not None]
            cells.append(f"{fmean(done):.0f} in {len(done)} of {len(steps)}" if done else "none")
        lines.append(f"| {NAMES[arm]} | {' | '.join(cells)} |")
    return lines


def observed(found: Sequence[float], least: float) -> str:
    """Returns `higher` or `lower` if the mean is at least `least` from 0 and the 95 % interval does
    not contain 0, `same` if the interval lies within `least` of 0, or `undecided`."""
    mean, low, high = interval(found)
    if same(found):
        return "undecided"  # without spread the interval says nothing
    if -least < low and high < least:
        return "same"
    if abs(mean) >= least and low * high > 0:
        return "higher" if mean > 0 else "lower"
    return "undecided"


def predicted(told: Mapping[str, Any]) -> list[str]:
    """Returns a table of what the maps let one expect and what was seen."""
    lines = ["| task | method | expected | seen |", "|---|---|---|---|"]
    for task, expected in told["plan"]["predictions"].items():
        for arm, each in expected.items():
            seen = observed(differences(told, task, arm), told["plan"]["least"])
            wrong = "" if seen in (each, "undecided") else ", **wrong**"
            lines.append(f"| `{task}` | {NAMES[arm]} | {each} | {seen}{wrong} |")
    return lines


def held_before(told: Mapping[str, Any], task: str) -> dict[str, float]:
    """Returns every arm's mean entropy in the last 5 steps before the reward changes, in nats."""
    at = told["plan"]["tasks"][task]["changes_after"] // 5 - 1
    return {
        arm: fmean(each[at] for each in values(told, task, arm, "entropy by 5 steps"))
        for arm in told["plan"]["arms"]
    }


def before_the_change(told: Mapping[str, Any], task: str) -> list[str]:
    """Returns sentences if the arm that ended best did not hold the most entropy before the reward
    changed."""
    held = held_before(told, task)
    best = max(held, key=lambda arm: fmean(values(told, task, arm, "pass@1")))
    most = max(held, key=lambda arm: held[arm])
    if held[best] == held[most]:
        return []
    return [
        "Entropy alone does not decide how well a policy recovers. Just before the right answers"
        f" changed, {spoken(most)} had the highest entropy ({held[most]:.2f} nats), and"
        f" {spoken(best)} had only {held[best]:.2f} nats. Nevertheless, {spoken(best)} reached the"
        " highest final pass@1."
    ]


def at_the_edge(told: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for every task on which the sweep chose the lowest or highest learning
    rate of the arm that the others are compared with, unless all rates of the arm were alike."""
    plan = told["plan"]
    arm, lines = plan["with"], []
    for task in plan["tasks"]:
        means = {
            rate: fmean(
                told["runs"][f"sweep, {task}, {arm}, try {number}, seed {seed}"]["pass@1"]
                for seed in plan["seeds"]["sweep"]
            )
            for number, rate in enumerate(plan["arms"][arm]["lr"])
        }
        chosen = max(means, key=lambda rate: means[rate])
        if chosen in (min(means), max(means)) and len(set(means.values())) > 1:
            lines += [
                f"On `{task}` the sweep chose a learning rate at the edge of {NAMES[arm]}'s tries,"
                f" {chosen:g}. Rates beyond are not run.",
                "",
            ]
    return lines


def afterwards(told: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on the runs that were not in the plan, or nothing if there are none."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, run in told["runs"].items():
        if key.startswith("afterwards, "):
            _, task, arm, rate, _ = key.split(", ")
            found.setdefault(f"{NAMES[arm]} on `{task}`", {}).setdefault(rate, []).append(
                run["pass@1"]
            )
    lines = []
    for what, rates in found.items():
        said = [
            f"| {rate.removeprefix('lr ')} | {mean:.3f} [{low:.3f}, {high:.3f}] |"
            for rate, each in rates.items()
            for mean, low, high in (interval(each),)
        ]
        lines += [
            f"The best learning rate of {what} was the lowest in the plan. Runs at lower learning"
            " rates were added later, with the same seeds:",
            "",
            "| learning rate | pass@1 |",
            "|---|---|",
            *said,
            "",
        ]
    return lines


def tried(told: Mapping[str, Any]) -> list[str]:
    """Returns a table of every task that was tried."""
    lines = ["| task | GRPO's pass@1 at each learning rate |", "|---|---|"]
    for each in told["plan"]["tried"]:
        scores = ", ".join(f"{float(lr):g}: {value:g}" for lr, value in each["pass@1"].items())
        taken = " (taken)" if each.get("taken") else ""
        lines.append(f"| {each['task']}{taken} | {scores} |")
    return lines


def in_words(name: str) -> str:
    """Returns a table's name of a method as a sentence says it: STARE O1 (strong weights)."""
    name, _, kind = name.partition(", ")
    if kind in ("strong", "adaptive"):
        kind += " weights"
    return f"{name} ({kind})" if kind else name


def spoken(arm: str) -> str:
    """Returns an arm's name as a sentence says it: STARE O1 (strong weights)."""
    return in_words(NAMES[arm])


# what is special about a task, as a sentence says it
TASKS = {
    "changing": ", in which the right answers change during training",
    "rare": ", in which the best answers are rarely sampled",
}


def conclusions(told: Mapping[str, Any]) -> list[str]:
    """Returns sentences on what the comparisons that decide show."""
    base, clear = told["plan"]["with"], proven(told)
    lines = []
    for task in told["plan"]["tasks"]:
        means = {arm: fmean(values(told, task, arm, "pass@1")) for arm in told["plan"]["arms"]}
        of_task = [arm for other, arm in clear if other == task]
        if found := [arm for arm in of_task if clear[task, arm]]:
            reached = " and ".join(f"{means[arm]:.2f} with {spoken(arm)}" for arm in found)
            lines.append(
                f"On task `{task}`{TASKS.get(task, '')}, the [trained model](#on-a-trained-model)"
                f" reaches a final pass@1 of {means[base]:.2f} with {NAMES[base]}, {reached}."
            )
        if found := [arm for arm in of_task if not clear[task, arm]]:
            lines.append(
                f"On task `{task}`{TASKS.get(task, '')}, the trained model's pass@1 shows no"
                f" significant difference between {NAMES[base]} and these methods:"
                f" {', '.join(map(spoken, found))}."
            )
    return lines


def judged(told: Mapping[str, Any]) -> dict[str, int]:
    """Returns how many predictions were seen, were not seen, and are undecided."""
    counted = {"right": 0, "wrong": 0, "undecided": 0}
    for task, expected in told["plan"]["predictions"].items():
        for arm, each in expected.items():
            seen = observed(differences(told, task, arm), told["plan"]["least"])
            counted[
                "undecided" if seen == "undecided" else "right" if seen == each else "wrong"
            ] += 1
    return counted


def open_questions(told: Mapping[str, Any]) -> list[str]:
    """Returns what the runs leave open, as items of a list."""
    undecided: dict[str, list[str]] = {}
    for (task, arm), clear in proven(told).items():
        if not clear and "either way is excluded" not in unshown(told, task, arm):
            undecided.setdefault(task, []).append(spoken(arm))
    return [
        *(
            f"The runs of the trained model do not show whether {' or '.join(named)} raises pass@1"
            f" on task `{task}`."
            for task, named in undecided.items()
        ),
        "The trained model's greedy accuracy is unknown, because the runs did not record it.",
    ]


def beyond(told: Mapping[str, Any]) -> list[str]:
    """Returns a sentence on the learning rates below the plan's, if they are all worse."""
    base, lines = told["plan"]["with"], []
    for task in told["plan"]["tasks"]:
        rates: dict[str, list[float]] = {}
        for key, run in told["runs"].items():
            if key.startswith(f"afterwards, {task}, {base}, "):
                rates.setdefault(key.split(", ")[3], []).append(run["pass@1"])
        means = [fmean(each) for each in rates.values()]
        if means and max(means) < fmean(values(told, task, base, "pass@1")):
            lines.append(
                f"On task `{task}`, {NAMES[base]} did best with the lowest of its planned learning"
                f" rates. Even lower learning rates were tried later, and were worse: pass@1 was"
                f" {' and '.join(f'{mean:.2f}' for mean in means)}."
            )
    return lines


def section(told: Mapping[str, Any]) -> list[str]:
    """Returns the page's part on the trained model, as lines."""
    plan = told["plan"]
    each = sum(key.startswith("sweep, ") for key in told["runs"]) // (
        len(plan["arms"]) * len(plan["tasks"])
    )
    seeds = len(plan["seeds"]["evaluation"])
    counted = judged(told)
    lines = [
        "## On a trained model",
        "",
        # the plan's question in plainer words
        "Does STARE raise a tiny model's pass@1 on tasks that a policy with collapsed entropy"
        " cannot solve?",
        "",
        "    python benchmarks/laboratory/trained.py --out"
        " benchmarks/results/laboratory_trained.json",
        "",
        "The trained model is a Qwen2 of 2 layers and width 64 that answers with three digits. In"
        " task `changing`, the right answers change after half of the training steps. In task"
        " `rare`, the answers with the highest reward start with a 7, but the starting model seldom"
        f" samples a 7. On each task, every method had {each} tuning runs, and then {seeds}"
        " evaluation runs with other seeds. The tasks, learning rates, comparisons and predictions"
        " for the trained model were committed before the runs"
        " (`benchmarks/laboratory/preregistration.yaml`).",
        "",
        *decided(told),
        "",
        "On the trained model, a difference between two methods' pass@1 counts as significant if"
        f" the p value of a sign-flip test is below {plan['level']} and the mean difference is at"
        f" least {plan['least']}. These p values are corrected for the number of"
        " comparisons by Holm's method.",
        "",
        "![Reward and entropy by step](pictures/laboratory/trained.svg)",
        "",
    ]
    for task in plan["tasks"]:
        if plan["tasks"][task].get("changes_after"):
            lines += [
                f"The next table shows the trained model's results on task `{task}`, as means over"
                " seeds with 95 % intervals:",
                "",
                *arms(told, task),
                "",
                *before_the_change(told, task),
                "",
            ]
    return [
        *lines,
        *beyond(told),
        "",
        f"Of {sum(counted.values())} predictions made from toy worlds for the trained model,"
        f" {counted['right']} proved right, {counted['wrong']} proved wrong, and"
        f" {counted['undecided']} remain undecided.",
        "",
    ]


def details(told: Mapping[str, Any]) -> list[str]:
    """Returns the tables of the trained model that the page leaves out, as lines."""
    plan = told["plan"]
    hours = sum(run["seconds"] for run in told["runs"].values()) / 3600
    lines = [
        "## The trained model",
        "",
        f"All runs took {hours:.1f} hours. `benchmarks/laboratory/digits.py` implements the tasks.",
        "",
    ]
    for task in plan["tasks"]:
        lines += [
            f"Results on task `{task}` are means over seeds, with 95 % intervals in brackets:",
            "",
            *arms(told, task),
            "",
        ]
        if plan["tasks"][task].get("changes_after"):
            lines += [
                "The list has each arm's mean entropy over the last 5 steps before the reward"
                " changes, in nats:",
                "",
                *(f"- {NAMES[arm]}: {nats:.3f}" for arm, nats in held_before(told, task).items()),
                "",
            ]
    lines += afterwards(told) or at_the_edge(told)
    return [
        *lines,
        "The next table compares predictions from toy worlds with the runs. The entries say how"
        " pass@1 differs from GRPO's. *Same* means that the difference's 95 % interval lies within"
        f" {plan['least']} of 0. *Higher* and *lower* mean that the interval does not contain 0 and"
        f" that the mean is at least {plan['least']} from 0. In all other cases, and if all"
        " differences are equal, the result is *undecided*.",
        "",
        *predicted(told),
        "",
        "Every task that was tried:",
        "",
        *tried(told),
        "",
    ]


def picture(told: Mapping[str, Any], style: str) -> str:
    """Returns an SVG: reward and entropy by step, mean over seeds, of every arm on every task."""
    tasks, names = list(told["plan"]["tasks"]), list(told["plan"]["arms"])
    width, height = 2 * W, len(tasks) * H + 2 * PAD + 20 * ((len(names) - 1) // IN_LEGEND)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" role="img"'
        f' aria-label="Reward and entropy by step"><style>{style}</style>'
        f'<rect class="bg" width="{width}" height="{height}"/>'
    ]
    for row, task in enumerate(tasks):
        for column, (figure, unit) in enumerate((("reward", ""), ("entropy", ", nats"))):
            curves = {
                arm: [fmean(at) for at in zip(*values(told, task, arm, key), strict=True)]
                for arm in names
                for key in (f"{figure} by 5 steps",)
            }
            most = max(1.0 if figure == "reward" else 0.1, *map(max, curves.values()))
            x0, y0 = column * W + LEFT, row * H + TOP
            wide, high = W - LEFT - 20, H - TOP - 10
            parts.append(
                f'<text class="h ink" x="{x0}" y="{y0 - 10}">{escape(task)}: {figure}{unit}</text>'
                f'<text class="soft" text-anchor="end" x="{x0 - 6}" y="{y0 + 10}">{most:.1f}</text>'
                f'<text class="soft" text-anchor="end" x="{x0 - 6}" y="{y0 + high}">0</text>'
                f'<text class="soft" text-anchor="end" x="{x0 + wide}" y="{y0 + high + 15}">step'
                f" {told['plan']['tasks'][task]['steps']}</text>"
            )
            for arm, curve in curves.items():
                points = " ".join(
                    f"{x0 + wide * i / (len(curve) - 1):.1f},{y0 + high * (1 - each / most):.1f}"
                    for i, each in enumerate(curve)
                )
                parts.append(f'<polyline class="arm{names.index(arm)}" points="{points}"/>')
    for number, arm in enumerate(names):
        x = LEFT + (number % IN_LEGEND) * (width - LEFT) / IN_LEGEND
        y = len(tasks) * H + PAD + 10 + 20 * (number // IN_LEGEND)
        parts.append(
            f'<polyline class="arm{number}" points="{x},{y - 4} {x + 18},{y - 4}"/>'
            f'<text class="ink" x="{x + 23}" y="{y}">{escape(NAMES[arm])}</text>'
        )
    return "".join(parts) + "</svg>\n"
