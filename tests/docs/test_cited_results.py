"""Figures on the pages are those of the committed results, and of the right key."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from support.pages import DOCS, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import pairs


def result(name: str) -> Any:
    """The committed result of a benchmark."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def words(page: str) -> str:
    """A page's words with single spaces between them."""
    return " ".join((DOCS / page).read_text().split())


def evidence() -> str:
    """The words of the results' own page."""
    return " ".join((ROOT / "benchmarks/results/README.md").read_text().split())


def test_the_watchers_cost_is_the_measured_one() -> None:
    told = result("watcher_overhead")
    steps, runs = told["a step, with / without"], told["a whole run, with / without"]
    low, high = steps["median_95"]
    assert f"{steps['median']:.2f} times as long ({low:.2f} to {high:.2f})" in words("black_box.md")
    assert f"whole runs {runs['median']:.2f} times" in words("black_box.md")


@pytest.mark.parametrize(
    ("count", "outer"), [(1, None), (3, None), (5, None), (6, 0), (8, 0), (9, 1), (40, 13)]
)
def test_pairs_too_few_for_a_median_have_no_interval(count: int, outer: int | None) -> None:
    """The whole range encloses the median with 94 % for 5 values and 97 % for 6. The second value
    and the last but one enclose it with 93 % for 8 values and 96 % for 9."""
    assert pairs.left_out(count) == outer


def test_a_ratio_of_few_pairs_has_a_median_and_no_interval() -> None:
    assert pairs.spread([1.0] * 4, [1.0] * 4)["median_95"] is None
    told = pairs.spread([float(each) for each in range(9, 0, -1)], [1.0] * 9)
    assert (told["median"], told["median_95"]) == (5.0, [2.0, 8.0])


def test_the_interval_of_sampling_ahead_is_that_between_seeds() -> None:
    """Pooled over problems, the interval leaves out how much runs of one arm differ."""
    told = result("staleness_reward")
    for arm in ("staleness 1", "partial"):
        mean, low, high = told["arms"][arm]["against_synchronous"]["by_seed_95"]
        interval = rf"{mean:+.3f} \((?:95 % interval over 3 seeds: )?{low:+.3f} to {high:+.3f}\)"
        assert re.search(interval.replace("+0", r"\+0"), words("asynchrony.md")), interval
    assert (len(told["seeds"]), told["settings"]["steps"]) == (3, 100)


def test_the_selects_time_is_that_by_the_clock() -> None:
    """The processor time of the ranks, which wait for each other on two cores, is shorter."""
    told = result("distributed_select")["wall"]["select_against"]
    sorted_one, unsorted = told["topk of the keys"], told["unsorted topk of the keys"]
    row = f"| {sorted_one['median']:.2f} | time of exact top-k of 2^24 keys"
    assert row in (DOCS / "results.md").read_text()
    readme = evidence()
    for each in (sorted_one, unsorted):
        assert f"{each['median']:.2f} times ({each['from']:.2f} to {each['to']:.2f})" in readme


def test_the_words_of_readmes_figure_are_the_figures_own() -> None:
    figure = (DOCS / "pictures/entropy.svg").read_text()
    (title,) = re.findall(r">(Sampled pass@1: [^<]*)<", figure)
    assert f"{title}.](docs/pictures/entropy.svg)" in (ROOT / "README.md").read_text()


def test_the_harm_of_suggestions_is_said_with_their_gain() -> None:
    rows = result("laboratory_suggest_unseen")["settings"]
    ratios = [row["score"] / row["default"] for row in rows]
    below, farther = (sum(ratio < most for ratio in ratios) for most in (1.0, 0.99))
    worst = f"{100 * (1 - min(ratios)):.1f} %"
    assert f"below the default in {below}, more than 1 % below in {farther}" in evidence()
    assert f"at worst {worst} below" in evidence()
    constant = sum(row["suggested"][1:] == [3.0, 0.1] for row in rows)
    assert f"In {constant} of the {len(rows)} settings it is W = 3, M = 0.1" in evidence()
    caution = (
        f"In {below} of {len(rows)} simulated settings, the suggested values gave a lower reward"
        f" than the defaults, by up to {worst}"
    )
    assert caution in words("tuning.md")
    first = result("laboratory_suggest")
    gaps, closed = first["with a gap"], first["at least half closed"]
    assert f"sweep in {gaps}. In {closed} of these {gaps} the suggestion" in evidence()
