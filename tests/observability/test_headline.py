"""The sentence on top of a report says what its figures say, and what a reader may trip over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_runs import synthetic_run

from megatron_stare.errors import DataError
from megatron_stare.observability.metrics.figures import started
from megatron_stare.observability.report.comparison import against, settings_that_tell
from megatron_stare.observability.report.headline import GREEDY, alike, headline
from megatron_stare.observability.report.page import write_report
from megatron_stare.run_dir.json_lines import read_jsonl, write_atomically
from megatron_stare.run_dir.run_files import RunRecord, read_run, read_runs


def run_of(
    rows: list[dict[str, Any]], evals: list[dict[str, Any]] | None = None, **config: Any
) -> RunRecord:
    metrics = [{"step": step, **row} for step, row in enumerate(rows, start=1)]
    return RunRecord("run", Path("run"), "", config, metrics, evals or [])


def evals(before: tuple[int, int], after: tuple[int, int], of: int = 100) -> list[dict[str, Any]]:
    """Right answers, sampled and greedy."""
    return [
        {
            "step": step,
            "weights": weights,
            "problem": list(range(of)),
            "correct": [int(i < sampled) for i in range(of)],
            "pass1": sampled / of,
            "greedy_correct": [int(i < greedy) for i in range(of)],
            "greedy": greedy / of,
        }
        for step, weights, (sampled, greedy) in ((0, "base", before), (9, "trained", after))
    ]


def test_entropy_held_and_greedy_lost() -> None:
    run = run_of(
        [{"entropy/mean": 0.11, "entropy/target": 0.1, "stare/gate": 1.0}] * 9,
        evals((50, 90), (71, 80)),
    )
    said = headline(run)
    assert (
        said.sentence == "Entropy held at 0.110 (target 0.100), sampled pass@1 +0.21, greedy −0.10."
    )
    assert said.remarks == [GREEDY]
    # one problem of a hundred is no news, and where sampling lost as well, greedy needs no
    # explanation
    assert (
        "greedy −0.01 (within its noise)"
        in headline(run_of([], evals((50, 90), (71, 89)))).sentence
    )
    assert headline(run_of([], evals((50, 90), (40, 80)))).remarks == []


@pytest.mark.parametrize(
    ("entropy", "target", "sentence"),
    [
        ([0.11] * 9, 0.05, "Entropy ended above its target, at 0.110 (target 0.0500)"),
        ([0.11] * 9, 0.2, "Entropy ended below its target, at 0.110 (target 0.200)"),
        ([0.04] * 9, 0.2, "Entropy collapsed to 0.0400 (0.20 × its target 0.200)"),
        ([0.4] * 60 + [0.05] * 40, None, "Entropy collapsed to 0.0500 (from 0.400)"),
        ([0.4] * 60 + [0.2] * 40, None, "Entropy went from 0.400 to 0.200"),
    ],
)
def test_what_entropy_did(entropy: list[float], target: float | None, sentence: str) -> None:
    aim = {"entropy/target": target} if target else {}
    rows = [{"entropy/mean": value, "reward/mean": 0.5, **aim} for value in entropy]
    assert (
        headline(run_of(rows)).sentence
        == f"{sentence}, reward from 0.500 to 0.500, no evaluation before and after."
    )


def test_a_gate_that_never_opened_is_said() -> None:
    closed = [{"entropy/mean": 0.4, "entropy/target": 0.1, "stare/gate": 0.0}] * 30
    assert (
        headline(run_of(closed)).sentence.startswith(
            "Entropy ended at 0.400 without its gate (target 0.100) ever opening, reward"
        )
        or headline(run_of(closed)).sentence
        == "Entropy ended at 0.400 without its gate (target 0.100) ever opening."
    )
    near = [{"entropy/mean": 0.14, "entropy/target": 0.12, "stare/gate": 0.0}] * 30
    # near its target by itself: nothing held it there
    assert "held" not in headline(run_of(near)).sentence
    opened = headline(run_of([*near, {**near[0], "stare/gate": 1.0}])).sentence
    assert opened.startswith("Entropy held at 0.140 (target 0.120)")
    (remark,) = headline(run_of(closed)).remarks
    assert remark.startswith(
        "The gate never opened in 30 steps: its entropy never came below the target"
    )
    assert headline(run_of([*closed, {**closed[0], "stare/gate": 1.0}])).remarks == []
    assert headline(run_of([{"entropy/mean": 0.4}] * 3)).remarks == []  # a method without a gate
    assert headline(run_of([])).sentence == "No step is recorded yet."


def test_runs_that_are_the_same_are_called_so(tmp_path: Path) -> None:
    runs = read_runs(
        [synthetic_run(tmp_path / kind, kind, 60) for kind in ("closed", "twin", "collapsed")]
    )
    # by method where that tells
    assert [run.name for run in runs] == ["stare, closed", "grpo", "stare, collapsed"]
    assert alike(runs) == [
        "stare, closed and grpo have the same entropy and reward in all 60 steps they share: their"
        " lines cover each other, since the gate of stare, closed was closed."
    ]
    rows = [dict(row) for row in runs[1].metrics]
    rows[40]["reward/mean"] += 1e-9
    parted = RunRecord(**{**vars(runs[1]), "metrics": rows})
    assert "up to step 40: " in alike([runs[0], parted])[0]
    rows[0]["reward/mean"] += 1e-9
    assert alike([runs[0], parted]) == []


def test_a_comparison_is_paired_by_problem_and_by_step(tmp_path: Path) -> None:
    rewards = [0.1 * (step % 7) for step in range(120)]
    one = run_of([{"reward/mean": r} for r in rewards], evals((50, 90), (60, 90)))
    two = run_of([{"reward/mean": r + 0.25} for r in rewards], evals((50, 90), (80, 90)))
    found = against(one, two)
    sampled, reward = found["pass@1, sampled"], found["Reward, last 20 steps"]
    assert sampled.value == "+0.200"
    assert sampled.note == "[+0.120, +0.280], 95 %, paired by problem"  # 1.984 sqrt(.16/99)
    assert sampled.tone == "good" and against(two, one)["pass@1, sampled"].tone == "warn"
    assert found["pass@1, greedy"].value == "+0.000"
    assert found["pass@1, greedy"].note.endswith("no difference is shown")
    assert reward.value == "+0.25"  # the scatter of the batches cancels
    assert reward.note.startswith("[0.250, 0.250], 95 %, paired by step in blocks of 20, ")
    assert re.search(
        r", 0\.\d+ and 0\.\d+ in the 40 last steps of both$", reward.note.partition(";")[0]
    )
    other = [{**record, "problem": [0] * 100} for record in two.evals]
    assert against(one, run_of([], other))["pass@1, sampled"].note == "different problems"


def test_a_difference_says_what_it_is_the_difference_of() -> None:
    """A longer run's own last third is of other steps: beside 0.117 and 0.140 a difference of 0 is
    not to be read."""
    long = run_of([{"entropy/mean": 0.14}] * 30 + [{"entropy/mean": 0.1}] * 60)
    short_one = run_of([{"entropy/mean": 0.14}] * 30)
    entropy = against(short_one, long)["Entropy, last third"]
    assert entropy.value == "+0" and "0.140 and 0.140 in the 10 last steps of both" in entropy.note


def test_only_settings_that_tell_are_shown(tmp_path: Path) -> None:
    runs = read_runs([synthetic_run(tmp_path / kind, kind, 3) for kind in ("held", "twin")])
    rows, about = settings_that_tell(runs)
    shown = dict(rows)
    assert about == "Those that differ from the defaults or between the runs."
    assert shown["algorithm.name"] == ["stare", "grpo"] and shown["algorithm.amplify"] == [
        "2",
        None,
    ]
    # the same, and not the default
    assert shown["run.steps"] == ["3", "3"] and "batch.prompts" not in shown
    (alone,) = read_runs([tmp_path / "held"])
    default = RunRecord(
        **{**vars(alone), "config": {**alone.config, "rollout": {"temperature": 1.0}}}
    )
    assert "rollout.temperature" not in dict(settings_that_tell([default])[0])
    unknown = RunRecord(
        **{**vars(alone), "config": {**alone.config, "algorithm": {"name": "no.such.Method"}}}
    )
    rows, about = settings_that_tell([unknown])
    assert about.startswith("All, ") and "algorithm.name" in dict(rows)


def test_the_page_says_what_it_cuts_and_folds_away_what_is_flat(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 300)
    page = write_report([run], tmp_path / "a.html").read_text()
    assert "Flat throughout: clip fraction 0; responses cut off 0" in page
    drawn, folded = page.split('<details class="flat">')[:2]
    assert "<h3>Clip fraction" not in drawn and "<h3>Clip fraction" in folded
    assert re.search(
        r"▲ 3 of 300 values of held lie beyond the edge, as far as 40\.0 \(step 97\)", page
    )  # W* at 97, 194, 291
    for words in (
        "Threshold of surprisal",
        "Tokens selected",
        "Groups that teach nothing",
        "Learning rate",
    ):
        assert f"<h3>{words}" in drawn
    for words in (
        "started 2026-01-31 12:00 on node7, commit 0123456789ab",
        "0.500 s, 49 %",
        "Time of a step",
    ):
        assert words in page
    closed = write_report(
        [synthetic_run(tmp_path / "b", "closed", 30)], tmp_path / "b.html"
    ).read_text()
    assert "The gate never opened in 30 steps" in closed and "Shaded strips" not in closed


def test_five_thousand_steps_are_drawn_by_their_extremes(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 5000)
    page = write_report([run], tmp_path / "a.html").read_text()
    assert len(page) < 2_500_000
    assert max(d.count("L") for d in re.findall(r' d="(M[^"]*)"', page)) <= 710
    hover = re.findall(r'"rows":\[\{.*?"values":(\[.*?\])', page)
    assert hover and max(values.count('","') for values in hover) < 410
    assert '"900"' in page  # one step's spike of the gradient norm can be pointed at


def test_a_comparison_never_takes_the_place_of_a_report(tmp_path: Path) -> None:
    one, two = (synthetic_run(tmp_path / name, "held", 3) for name in ("a", "b"))
    own = write_report([one], one / "report.html").read_text()
    for out in (one / "report.html", tmp_path / "b" / ".." / "a" / "report.html"):
        with pytest.raises(DataError, match="report of one of its runs"):
            write_report([one, two], out)
    assert (one / "report.html").read_text() == own
    assert write_report([one, two], one / "other.html").exists()


def test_the_start_of_a_run_is_noted(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 3)
    write_atomically(
        run / "starts.jsonl",
        [
            *read_jsonl(run / "starts.jsonl"),
            {"step": 2, "date": "2026-02-01T08:30:00+0000", "host": "b", "version": "1"},
        ],
    )
    assert len(read_run(run).starts) == 2
    page = write_report([run], tmp_path / "a.html").read_text()
    assert "; resumed after step 2 2026-02-01 08:30 on b, release 1" in page


def test_many_starts_in_one_place_are_told_in_a_few_words(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 3)
    places = [("a", "c1"), ("a", "c1"), ("b", "c1"), ("b", "c1"), ("b", "c1"), ("b", "c2")]
    starts = [
        {
            "step": 10 * at,
            "date": f"2026-02-0{at + 1}T08:30:00+0000",
            "host": host,
            "commit": commit,
        }
        for at, (host, commit) in enumerate(places)
    ]
    write_atomically(run / "starts.jsonl", starts)
    assert (
        started(read_run(run))
        == "started 2026-02-01 08:30 on a, commit c1; resumed after step 10 2026-02-02 08:30; "
        "resumed after step 20 2026-02-03 08:30 on b, commit c1; "
        "resumed 2 times there, the last after step 40 2026-02-05 08:30; "
        "resumed after step 50 2026-02-06 08:30 on b, commit c2"
    )
