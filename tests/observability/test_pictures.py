"""The pictures of README and docs say what the committed results and a run's console say."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import entropy_figure  # noqa: E402
import pictures  # noqa: E402

MADE = sorted(each for each in (ROOT / "docs/pictures").iterdir() if each.is_file())


def setting(stare: list[float], grpo: list[float], paired: bool = True) -> Any:
    return entropy_figure.Setting(
        "name, steps", "runs", 0.5, {"stare": stare, "grpo": grpo}, paired
    )


def test_the_committed_figure_is_that_of_the_committed_results() -> None:
    assert (ROOT / "docs/pictures/entropy.svg").read_text() == entropy_figure.figure()


def test_pictures_are_few_and_small() -> None:
    assert 1 < len(MADE) <= 8
    assert {file.suffix for file in MADE} == {".png", ".svg"}
    for file in MADE:
        assert file.stat().st_size < pictures.MOST_BYTES, file.name
        if file.suffix == ".svg":
            ElementTree.fromstring(file.read_text())
    shot = {f"{shot.name}.png" for shot in pictures.SHOTS} | {"site.png"}
    assert {file.name for file in MADE if file.suffix == ".png"} == shot


def test_a_run_that_two_files_hold_is_drawn_once() -> None:
    long = entropy_figure.long_runs()
    assert {method: len(runs) for method, runs in long.items()} == {"stare": 5, "grpo": 3}


def test_differences_have_intervals_over_seeds() -> None:
    mean, low, high = setting([0.9, 0.8, 0.85], [0.8, 0.75, 0.85]).difference
    half = 4.302653 * 0.05 / math.sqrt(3)  # d = 0.1, 0.05, 0
    assert [mean, low, high] == pytest.approx([0.05, 0.05 - half, 0.05 + half], abs=1e-5)
    # Welch: variances 0.0025 and 0.01 over 3 and 3, 2.9412 degrees of freedom
    mean, low, high = setting([0.9, 0.8, 0.85], [0.5, 0.6, 0.7], paired=False).difference
    half = 3.2152 * math.sqrt(0.0125 / 3)
    assert [mean, low, high] == pytest.approx([0.25, 0.25 - half, 0.25 + half], abs=1e-3)


def test_titles_follow_the_figures() -> None:
    even = setting([0.9, 0.8, 0.85], [0.8, 0.75, 0.85])
    better = setting([0.9, 0.91, 0.92], [0.8, 0.81, 0.82001])
    worse = setting([0.8, 0.81, 0.82001], [0.9, 0.91, 0.92])
    assert [each.verdict for each in (even, better, worse)] == [
        "alike",
        "STARE higher",
        "GRPO higher",
    ]
    assert (
        entropy_figure.accuracy_title([even, even]) == "Sampled pass@1: no significant difference"
    )
    named = replace(worse, name="chains")
    assert entropy_figure.accuracy_title([even, named]) == (
        "Sampled pass@1: alike (name, steps); GRPO higher (chains)"
    )
    long = entropy_figure.long_runs()
    assert entropy_figure.entropy_title(long) == (
        "Entropy: STARE holds its target, GRPO falls to 0.011"
    )
    swapped = {"stare": long["grpo"], "grpo": long["stare"]}
    assert entropy_figure.entropy_title(swapped) == (
        "Entropy: STARE misses its target, GRPO ends at 0.113"
    )


def test_the_terminal_shows_the_lines_of_the_console() -> None:
    steps = [f"step {step:3}/100  reward {step / 100:.3f}" for step in range(1, 101)]
    trained = "pass@1 of the trained policy on 9 held-out problems: sampled 0.9"
    log = "\n".join(["run directory runs/a", *steps, trained, "", "  old  figures", "", "runs/a/"])
    shown = pictures.terminal_lines(log, "\n  new <figures>\n\nruns/a/\n  hf")
    assert shown == [
        "run directory runs/a",
        *steps[:4],
        "      ... 92 steps ...",
        *steps[-4:],
        trained,
        "",
        "  new <figures>",
    ]
    drawn = ElementTree.fromstring(pictures.terminal(shown))
    space = "{http://www.w3.org/2000/svg}"
    assert ["".join(text.itertext()) for text in drawn.iter(f"{space}text")] == shown
