"""The sentence on top of a report says what its figures say, and what a reader may trip over."""

from __future__ import annotations

import fcntl
import math
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from support.synthetic_runs import synthetic_run

from megatron_stare.errors import DataError
from megatron_stare.observability.metrics.figures import closing, started, verdict
from megatron_stare.observability.report.comparison import against, outcome, settings_that_tell
from megatron_stare.observability.report.headline import (
    GREEDY,
    Problem,
    alike,
    headline,
    problems,
)
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


HELD = {"entropy/mean": 0.11, "entropy/target": 0.1, "stare/gate": 1.0}


def test_entropy_held_and_greedy_lost() -> None:
    said = headline(run_of([HELD] * 60, evals((50, 90), (71, 80))))
    assert said.sentence == (
        "In 60 steps, sampled pass@1 rose from 0.500 to 0.710 (+0.210 [+0.129, +0.291]) by step 9;"
        " entropy held at 0.110 (target 0.100)."
    )
    assert said.greedy == (
        "Greedy pass@1 fell from 0.900 to 0.800 (−0.100 [−0.160, −0.040]), and is still above the"
        " sampled 0.710."
    )
    assert said.remarks == [GREEDY]


@pytest.mark.parametrize(
    ("before", "after", "sampled", "greedy", "explained"),
    [
        ((50, 90), (71, 89), "rose from 0.500 to 0.710 (", "went from 0.900 to 0.890 (", False),
        ((50, 90), (40, 80), "fell from 0.500 to 0.400 (", "fell from 0.900 to 0.800 (", False),
        ((50, 90), (51, 80), "went from 0.500 to 0.510 (", "fell from 0.900 to 0.800 (", False),
        ((50, 50), (50, 90), "stayed at 0.500 (", "rose from 0.500 to 0.900 (", False),
        ((50, 90), (71, 70), "rose from 0.500 to 0.710 (", "fell from 0.900 to 0.700 (", True),
    ],
)
def test_a_result_rose_fell_or_is_not_shown_to_differ(
    before: tuple[int, int],
    after: tuple[int, int],
    sampled: str,
    greedy: str,
    explained: bool,
) -> None:
    """One problem of a hundred is no news, and where sampling did not gain, greedy's loss is not
    explained away."""
    said = headline(run_of([HELD] * 9, evals(before, after)))
    assert said.sentence.startswith(f"In 9 steps, sampled pass@1 {sampled}")
    assert said.greedy.startswith(f"Greedy pass@1 {greedy}")
    assert (GREEDY in said.remarks) == explained
    for text, word in ((said.sentence, sampled), (said.greedy, greedy)):
        assert ("no significant difference" in text) == (not word.startswith(("rose", "fell")))
    assert ("still above" in said.greedy) == (
        greedy.startswith("fell") and after[1] > after[0]
    )  # 0.700 is not above 0.710


def test_no_tone_of_a_greedy_loss_warns_while_sampling_gained() -> None:
    def tones(before: tuple[int, int], after: tuple[int, int]) -> list[str]:
        return [f.tone for f in verdict(run_of([], evals(before, after)))[:2]]

    assert tones((50, 90), (71, 80)) == ["good", ""]
    assert tones((50, 90), (40, 80)) == ["warn", "warn"]
    assert tones((50, 90), (51, 80)) == ["", "warn"]
    greedy = verdict(run_of([], evals((50, 90), (71, 80))))[1]
    assert greedy.note.endswith("; training optimises sampled responses, not greedy decoding")


def test_evaluations_that_lack_one_side_or_an_interval() -> None:
    base, trained = evals((50, 90), (71, 80))
    rows = [{"reward/mean": 0.5}] * 40
    said = headline(run_of(rows, [base])).sentence
    assert said == (
        "In 40 steps, sampled pass@1 was 0.500 before training, with no evaluation since; reward"
        " stayed at 0.500."
    )
    assert headline(run_of(rows, [trained])).sentence == (
        "In 40 steps, sampled pass@1 is 0.710 at step 9, with no evaluation before training; reward"
        " stayed at 0.500."
    )
    assert headline(run_of(rows)).sentence == (
        "In 40 steps, reward stayed at 0.500, with no evaluation."
    )
    other = {**trained, "problem": [0] * 100}
    assert (
        "went from 0.500 to 0.710 (different problems, so no interval)"
        in headline(run_of(rows, [base, other])).sentence
    )
    named = [{**each, "task": "aime"} for each in (base, trained)]
    assert "sampled pass@1 on aime rose" in headline(run_of(rows, named)).sentence


@pytest.mark.parametrize(
    ("entropy", "target", "sentence"),
    [
        ([0.11] * 60, 0.05, "entropy ended above its target, at 0.110 (target 0.0500)"),
        ([0.11] * 60, 0.2, "entropy ended below its target, at 0.110 (target 0.200)"),
        ([0.4] * 60 + [0.04] * 40, 0.2, "entropy collapsed to 0.0400 (0.20 × its target 0.200)"),
        ([0.04] * 60, 0.2, "entropy ended below its target, at 0.0400 (target 0.200)"),
        ([0.4] * 60 + [0.05] * 40, None, "entropy collapsed to 0.0500 (from 0.400)"),
        ([0.4] * 60 + [0.2] * 40, None, "entropy went from 0.400 to 0.200"),
        # held for long, lost in the end: the mean of the last third is 0.080
        ([0.1] * 280 + [0.02] * 20, 0.1, "entropy collapsed to 0.0200 (0.20 × its target 0.100)"),
        # on target in 93 % of the last third, and not in the end
        (
            [0.1] * 880 + [0.07] * 20,
            0.1,
            "entropy ended below its target, at 0.0700 (target 0.100)",
        ),
        # in its mean alone
        (
            [0.05, 0.15] * 50,
            0.1,
            "entropy ended near its target, at 0.100 (target 0.100), but was not held there: in the"
            " last third of the run, 0% of the steps were within ±25% of the target",
        ),
        # through it: the mean of the last third is on target, its end is not
        (
            [0.2 - 0.0011 * i for i in range(150)],
            0.08,
            "entropy ended below its target, at 0.0466 (target 0.0800)",
        ),
    ],
)
def test_what_entropy_did(entropy: list[float], target: float | None, sentence: str) -> None:
    aim = {"entropy/target": target} if target else {}
    rows = [{"entropy/mean": value, "reward/mean": 0.5, **aim} for value in entropy]
    run = run_of(rows)
    assert headline(run).sentence == (
        f"In {len(rows):,} steps, reward stayed at 0.500, with no evaluation; {sentence}."
    )
    figure = next(f for f in verdict(run) if f.label == "Entropy, last third")
    assert figure.tone == ("warn" if target else "")


def test_few_steps_are_not_judged() -> None:
    """The first and the last 20 of fewer than 40 steps overlap."""
    rows = [{**HELD, "reward/mean": step / 39} for step in range(39)]
    assert headline(run_of(rows)).sentence == (
        "In 39 steps, reward was 0.731 in the last 20 steps, with no evaluation; entropy was 0.110"
        " in the last 20 steps (target 0.100); fewer than 40 steps are too few to judge it."
    )
    assert "in the last 3 steps" in headline(run_of(rows[:3])).sentence
    assert "held" in headline(run_of([*rows, rows[-1]])).sentence
    by_label = {f.label: f for f in verdict(run_of(rows))}
    entropy, reward = by_label["Entropy, last third"], by_label["Reward, last 20 steps"]
    assert entropy.tone == "" and "; too few steps to judge" in entropy.note
    assert reward.note == "mean"


def test_a_run_that_did_not_end_is_not_summed_up_as_one_that_did(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 60)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("steps: 60", "steps: 90"))
    here = {"host": socket.gethostname(), "step": 0}
    write_atomically(run / "starts.jsonl", [here])
    assert headline(read_run(run)).sentence.startswith("Interrupted after step 60 of 90: sampled")
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = headline(read_run(run)).sentence
    assert said.startswith("Still running, step 60 of 90 is done: sampled")
    write_atomically(run / "starts.jsonl", [{**here, "host": "elsewhere"}])
    assert headline(read_run(run)).sentence.startswith("Last seen at step 60 of 90: sampled")
    (run / "config.yaml").write_text(config)
    assert headline(read_run(run)).sentence.startswith("In 60 steps, sampled")


def test_a_gate_that_never_opened_is_said() -> None:
    closed = [{"entropy/mean": 0.4, "entropy/target": 0.1, "stare/gate": 0.0}] * 60
    assert headline(run_of(closed)).sentence == (
        "In 60 steps, entropy ended at 0.400 (target 0.100), and the gate never opened."
    )
    near = [{"entropy/mean": 0.12, "entropy/target": 0.11, "stare/gate": 0.0}] * 60
    # near its target by itself: nothing held it there
    assert "held" not in headline(run_of(near)).sentence
    opened = headline(run_of([*near, {**near[0], "stare/gate": 1.0}])).sentence
    assert opened == "In 61 steps, entropy held at 0.120 (target 0.110)."
    (remark,) = headline(run_of(closed)).remarks
    assert remark.startswith(
        "The gate never opened in 60 steps because the entropy never fell below the target."
    )
    below = headline(run_of([*closed, {**closed[0], "entropy/mean": 0.09}])).remarks[0]
    assert below.startswith("The gate never opened in 61 steps. STARE's weights were therefore 1")
    assert headline(run_of([*closed, {**closed[0], "stare/gate": 1.0}])).remarks == []
    assert headline(run_of([{"entropy/mean": 0.4}] * 3)).remarks == []  # a method without a gate
    assert headline(run_of([])).sentence == "No step is recorded yet."


def test_a_reward_that_fell_is_said_beside_a_result_that_rose() -> None:
    rows = [{**HELD, "reward/mean": 0.8 if step < 60 else 0.3} for step in range(100)]
    said = headline(run_of(rows, evals((50, 90), (71, 80)))).sentence
    assert said.endswith("; reward fell from 0.800 to 0.300.") and "pass@1 rose" in said


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([-0.9] * 30 + [-0.2] * 30 + [-0.9] * 30, "reward fell from -0.200 to -0.900"),
        ([-0.2] * 30 + [-0.9] * 30, "reward fell from -0.200 to -0.900"),
        ([0.3] * 30 + [-0.2] * 30, "reward fell from 0.300 to -0.200"),
        ([-0.9 + 0.01 * step for step in range(60)], ""),
        ([-0.5 + 0.001 * (step % 7) for step in range(60)], ""),  # noise
    ],
)
def test_a_negative_reward_fell_only_if_it_is_lower_than_before(
    rewards: list[float], said: str
) -> None:
    sentence = headline(run_of([{**HELD, "reward/mean": each} for each in rewards])).sentence
    assert ("reward fell" in sentence) == bool(said) and said in sentence


def test_problems_are_the_alerts_of_the_steps() -> None:
    fine = {"group/degenerate": 0.1, "response/truncated": 0.0}
    bad, cut = {**fine, "group/degenerate": 0.95}, {**fine, "response/truncated": 0.5}
    rows = [fine] * 4 + [bad] * 3 + [fine] * 9 + [bad] + [fine] * 9 + [cut] * 2
    assert problems(run_of(rows)) == [  # the most serious first
        Problem(
            "responses cut off",
            "steps 27 to 28, still active at the last step",
            "50% of the responses are cut off at rollout.max_new_tokens",
        ),
        Problem(
            "groups without signal",
            "2 times, steps 5 to 17",
            "95% of the groups have equal rewards and teach nothing",
        ),
    ]
    assert problems(run_of([fine] * 9)) == [] == problems(run_of([]))
    differ = run_of([{"rollout/logprob_diff_max": 0.01}])
    assert [p.name for p in problems(differ)] == ["engine and trainer differ"]
    half = run_of(differ.metrics, model={"dtype": "bfloat16"})  # what is normal there
    assert problems(half) == []
    for served in (
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
    ):
        assert problems(run_of(differ.metrics, sglang=served)) == []
        assert problems(run_of(differ.metrics, sglang=dict.fromkeys(served))) == problems(differ)


def test_runs_that_are_the_same_are_called_so(tmp_path: Path) -> None:
    runs = read_runs(
        [synthetic_run(tmp_path / kind, kind, 60) for kind in ("closed", "twin", "collapsed")]
    )
    # by method where that tells
    assert [run.name for run in runs] == ["stare, closed", "grpo", "stare, collapsed"]
    assert alike(runs) == [
        "stare, closed and grpo have the same entropy and reward in all 60 steps they share, so"
        " their lines overlap. The gate of stare, closed was closed throughout."
    ]
    rows = [dict(row) for row in runs[1].metrics]
    rows[40]["reward/mean"] += 1e-9
    parted = RunRecord(**{**vars(runs[1]), "metrics": rows})
    assert "up to step 40, so " in alike([runs[0], parted])[0]
    # the update of a step shows in the next step's entropy: the gate may open in the last step
    opened = [dict(row) for row in runs[0].metrics]
    opened[39]["stare/gate"] = 1.0
    opening = RunRecord(**{**vars(runs[0]), "metrics": opened})
    assert alike([opening, parted])[0].endswith("The gate of stare, closed was closed until then.")
    opened[38]["stare/gate"] = 1.0
    assert alike([opening, parted])[0].endswith("so their lines overlap.")
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
    assert found["pass@1, greedy"].note.endswith("no significant difference")
    assert reward.value == "+0.25"  # the scatter of the batches cancels
    assert reward.note.startswith("[0.250, 0.250], 95 %, paired by step in blocks of 20, ")
    assert re.search(
        r", 0\.\d+ against 0\.\d+ in the last 40 steps that both have$",
        reward.note.partition(";")[0],
    )
    other = [{**record, "problem": [0] * 100} for record in two.evals]
    assert against(one, run_of([], other))["pass@1, sampled"].note == "different problems"


def test_a_comparison_is_summed_up_in_a_sentence() -> None:
    rows = [{"entropy/mean": 0.12, "reward/mean": 0.5}] * 60
    lower = [{"entropy/mean": 0.05, "reward/mean": 0.5}] * 60
    one = run_of(rows, evals((50, 90), (60, 90)))
    alike_one = outcome(one, run_of(lower, evals((50, 90), (61, 90))))
    assert alike_one == (
        "run against run: sampled pass@1 not significantly different (+0.010 [-0.010, +0.030]);"
        " entropy measured in too few steps to judge, 0.0500 against 0.120 in the last 20 steps"
        " that both have."
    )
    longer = outcome(run_of(rows * 3), run_of(lower * 3))
    assert longer == (
        "run against run: entropy lower, 0.0500 against 0.120 in the last 60 steps that both have;"
        " reward not significantly different, 0.500 against 0.500 in the last 60 steps that both"
        " have."
    )
    higher = outcome(one, run_of(rows, evals((50, 90), (80, 90))))
    assert "sampled pass@1 higher (+0.200 [" in higher
    assert "sampled pass@1 lower (-0.200 [" in outcome(run_of(rows, evals((50, 90), (80, 90))), one)
    late = [{**each, "step": each["step"] * 2} for each in evals((50, 90), (80, 90))]
    assert "; after steps 9 and 18)" in outcome(one, run_of(rows, late))
    other = [{**each, "problem": [0] * 100} for each in one.evals]
    assert "cannot be compared (different problems)" in outcome(one, run_of(rows, other))
    assert outcome(run_of([]), run_of([])) == ""


def test_a_greedy_loss_against_another_run_is_no_warning_where_sampling_won() -> None:
    one = run_of([], evals((50, 90), (60, 90)))
    found = against(one, run_of([], evals((50, 90), (80, 70))))
    assert found["pass@1, sampled"].tone == "good" and found["pass@1, greedy"].tone == ""
    found = against(one, run_of([], evals((50, 90), (50, 70))))
    assert found["pass@1, sampled"].tone == found["pass@1, greedy"].tone == "warn"


def test_a_difference_says_what_it_is_the_difference_of() -> None:
    """A longer run's own last third is of other steps: beside 0.117 and 0.140 a difference of 0 is
    not to be read."""
    long = run_of([{"entropy/mean": 0.14}] * 30 + [{"entropy/mean": 0.1}] * 60)
    short_one = run_of([{"entropy/mean": 0.14}] * 30)
    entropy = against(short_one, long)["Entropy, last third"]
    assert entropy.value == "+0"
    assert "0.140 against 0.140 in the last 10 steps that both have" in entropy.note


def test_only_settings_that_tell_are_shown(tmp_path: Path) -> None:
    runs = read_runs([synthetic_run(tmp_path / kind, kind, 3) for kind in ("held", "twin")])
    rows, about = settings_that_tell(runs)
    shown = dict(rows)
    assert about == "Settings that differ from the defaults or between the runs."
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
    assert about.startswith("All settings, ") and "algorithm.name" in dict(rows)


def test_the_page_says_what_it_cuts_and_folds_away_what_is_flat(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "held", 300)
    page = write_report([run], tmp_path / "a.html").read_text()
    assert "Flat throughout: clip fraction 0; responses cut off 0" in page
    drawn, folded = page.split('<details class="flat">')[:2]
    assert "<h3>Clip fraction" not in drawn and "<h3>Clip fraction" in folded
    assert re.search(
        r"▲ 3 of 300 values of held are off the chart, the farthest 40\.0 \(step 97\)", page
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
    assert "; resumed after step 2, 2026-02-01 08:30 on b, release 1" in page


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
        == "started 2026-02-01 08:30 on a, commit c1; resumed after step 10, 2026-02-02 08:30; "
        "resumed after step 20, 2026-02-03 08:30 on b, commit c1; "
        "resumed 2 times there, last after step 40, 2026-02-05 08:30; "
        "resumed after step 50, 2026-02-06 08:30 on b, commit c2"
    )


def test_a_loss_is_not_said_to_stay_because_few_steps_overlap() -> None:
    def of(losses: list[float]) -> RunRecord:
        return run_of([{"loss/policy": loss} for loss in losses], algorithm={"name": "sft"})

    falling = [4.0 - step / 10 for step in range(39)]
    run = of(falling)
    assert run.supervised
    assert headline(run).sentence == (
        "In 39 steps, the loss went from 4.00 nats a token in the first step to 0.200 in the last."
    )
    loss = verdict(run)[0]
    assert (loss.label, loss.value) == ("Loss, last step", "0.200")
    assert loss.note == "nats a token; first step 4.00"
    assert headline(of(falling[:1])).sentence == "In 1 step, the loss was 4.00 nats a token."
    assert headline(of([math.nan])).sentence == "In 1 step, no loss is recorded."
    whole = of([*falling, 0.1])
    assert headline(whole).sentence == "In 40 steps, the loss went from 3.05 to 1.05 nats a token."
    assert verdict(whole)[0].label == "Loss, last 20 steps"


def test_figures_of_fewer_than_twenty_steps_say_how_many() -> None:
    notes = {f.label: f.note for f in verdict(run_of([{**HELD, "reward/mean": 0.5}] * 3))}
    assert notes["Reward, last 20 steps"] == "mean of 3 steps"
    assert notes["Entropy, last 20 steps"] == "nats, mean of 3 steps"


def test_one_step_is_not_called_steps(tmp_path: Path) -> None:
    row = {"reward/mean": 0.5, "entropy/mean": 0.3, "entropy/target": 0.1, "stare/gate": 0.0}
    said = headline(run_of([row]))
    assert said.sentence == (
        "In 1 step, reward was 0.500 in the only step, with no evaluation; entropy was 0.300 in the"
        " only step (target 0.100); fewer than 40 steps are too few to judge it."
    )
    assert said.remarks[0].startswith("The gate never opened in 1 step because")
    page = write_report([synthetic_run(tmp_path / "run", "held", 1)], tmp_path / "a.html")
    assert not re.search(r"\b1 steps", page.read_text())


def test_seven_runs_have_seven_looks_and_one_sentence_on_what_is_cut(tmp_path: Path) -> None:
    runs = [synthetic_run(tmp_path / f"run-{i}", "held", 60, seed=i) for i in range(7)]
    page = write_report(runs, tmp_path / "a.html").read_text()
    looks = re.findall(r'<li><span class="dot ([^"]*)"', page)
    assert looks[:7] == [*(f"c{i}" for i in range(6)), "c0 again"]
    assert 'class="line c0 again"' in page
    cut = re.findall(r"▲ ([^<]*)<", page)
    assert re.match(r"\d+ values of 7 lines are off the chart, the farthest 0\.\d+ \(", cut[0])
    assert cut[0].count("off the chart") == 1


def test_the_closing_figures_fit_the_terminal(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "run", "collapsed", 60)
    whole, narrow = closing(run), closing(run, 80)
    figures = narrow.split("\n\n")[0]
    assert max(map(len, figures.splitlines())) <= 80 < max(map(len, whole.splitlines()))
    assert whole.split() == narrow.split()
