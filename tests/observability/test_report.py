"""The report holds what the run directory holds, loads nothing, and trusts no text a model
wrote."""

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from megatron_stare.errors import DataError
from megatron_stare.observability.metrics.figures import verdict
from megatron_stare.observability.metrics.scales import (
    intervals_on,
    nice_ticks,
    short,
    smooth,
    thin,
    tick_label,
)
from megatron_stare.observability.report.page import write_report
from megatron_stare.run_dir.json_lines import to_line
from megatron_stare.run_dir.run_files import read_run

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
VOID = {"meta", "line", "rect", "circle", "path", "img"}


class Page(HTMLParser):
    """Collects what a browser would see, and checks that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.stack, self.texts, self.data = [], [], [], []
        self.source = text
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or (tag, dict(attrs).get("class")) == ("line", "cursor"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        script = self.stack and self.stack[-1] in ("script", "style")
        (self.data if script else self.texts).append(data)

    @property
    def text(self):
        return " ".join(self.texts)

    def count(self, tag, kind):
        return sum(t == tag and kind in (a.get("class") or "").split() for t, a in self.tags)


def make_run(
    directory,
    steps=40,
    name="tiny",
    target=0.1,
    evals=True,
    text="It is 4",
    algorithm="stare",
    drop=(),
):
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(
        f"run: {{name: {json.dumps(name)}, steps: {steps}}}\nmodel: {{path: models/tiny}}\n"
        f"batch: {{prompts: 4, samples_per_prompt: 8}}\nalgorithm: {{name: {algorithm}}}\n"
    )
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {
                "step": step,
                "reward/mean": math.nan if step == 20 else step / steps,
                "entropy/mean": 0.11,
                "response/length_mean": 17.0,
                "optimizer/grad_norm": 0.5,
                "loss/clip_fraction": 0.0,
                "perf/tokens_per_s": 4000.0,
                "time/step_s": 1.5,
                "memory/tree_pss_gb": 2.5,
            }
            if target:
                row |= {"entropy/target": target, "stare/gate": float(step % 10 < 3)}
            file.write(to_line({key: value for key, value in row.items() if key not in drop}))
    if evals:
        with (directory / "eval.jsonl").open("w") as file:
            for step, weights, correct in (
                (0, "base", [0, 1, 0, 0]),
                (steps, "trained", [1, 1, 1, 0]),
            ):
                shown = {
                    "prompt": "What is 2 + 2?",
                    "response": f"{weights}: {text}",
                    "answer": "4",
                    "reward": 1.0,
                }
                record = {
                    "step": step,
                    "weights": weights,
                    "pass1": sum(correct) / 4,
                    "greedy": None,
                    "problems": 4,
                }
                file.write(
                    to_line(record | {"correct": correct, "greedy_correct": [], "samples": [shown]})
                )
    return directory


def report(tmp_path, *runs):
    out = write_report(runs, tmp_path / "out" / "report.html")
    return Page(out.read_text(encoding="utf-8"))


def test_the_verdict_is_there(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run"))
    for words in (
        "stare · models/tiny · 4 prompts × 8 responses",
        "0.250 → 0.750",
        # d = 1, 0, 1, 0: 3.182 s / sqrt(n) = 0.9187
        "+0.500 [-0.419, +1.419], 95 %, paired, 4 problems",
        "1.10 × target 0.100, inside ±25%",
        "of 40 planned",
        "1 min 0 s",
        "base: It is 4",
        "trained: It is 4",
    ):
        assert words in page.text
    assert page.count("figure", "chart") == 6
    assert page.count("path", "band") == page.count("path", "target") == 1
    assert page.count("rect", "gate") == 5  # steps 1-2, 10-12, 20-22, 30-32, 40


def test_it_loads_nothing(tmp_path):
    out = write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    text = out.read_text(encoding="utf-8")
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", text)
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"link", "img", "iframe", "object", "embed", "base", "form"}
    )
    assert not any(
        key in attrs for _, attrs in page.tags for key in ("src", "xlink:href", "srcset")
    )
    # within the page alone
    assert all(attrs["href"][0] == "#" for _, attrs in page.tags if "href" in attrs)
    policy = next(
        a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")


def test_the_contents_name_every_part_and_parts_are_folded_with_a_line_on_each(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    for page in (report(tmp_path, runs[0]), report(tmp_path, *runs)):
        links = [attrs["href"][1:] for tag, attrs in page.tags if tag == "a"]
        parts = [a for t, a in page.tags if t == "details" and a.get("class") == "part"]
        assert links == ["outcome", *(attrs["id"] for attrs in parts)] and len(parts) > 3
        assert len(set(links)) == len(links)
        assert not any("open" in attrs for attrs in parts)
        assert page.count("span", "about") == len(parts)
        first = "".join(page.source.partition('<details class="part"')[0])
        for words in ("pass@1, sampled", "<h3>Entropy", "<h3>Reward", "<h2>Problems</h2>"):
            assert words in first
        for words in ("Training time", "<h3>Gradient norm", "base: It is 4"):
            assert words not in first and words in page.source


def test_a_run_without_an_evaluation_shows_no_empty_cards_first(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run", evals=False))
    first, _, folded = page.source.partition('<details class="part"')
    assert "no evaluation</div>" not in first and "no evaluation</div>" in folded


def test_problems_stand_on_the_first_screen(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(to_line({"step": 41, "response/truncated": 0.5}))
    page = report(tmp_path, run)
    assert "<b>responses cut off</b> (step 41, still active at the last step): 50%" in page.source
    assert page.count("div", "some") == 1
    fine = report(tmp_path, make_run(tmp_path / "fine"))
    assert "no alert in 40 steps" in fine.text and fine.count("div", "some") == 0


def test_text_from_outside_stays_text(tmp_path):
    runs = [make_run(tmp_path / "a", name=ATTACK, text=ATTACK), make_run(tmp_path / "b", name="b")]
    page = report(tmp_path, *runs)
    kinds = [tag for tag, _ in page.tags]
    charts = page.count("figure", "chart")
    assert kinds.count("script") == charts + 1  # one of data in every chart, and the page's own
    assert kinds.count("img") == 0
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)
    assert f"trained: {ATTACK}" in "".join(page.texts)
    data = [json.loads(text) for text in page.data if text.startswith("{")]
    assert len(data) == charts
    # whole, and still inside its script element
    assert data[0]["rows"][0]["name"] == f"stare, {ATTACK}"


def test_half_of_a_character_is_written_as_a_question_mark(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "a", text="so \ud83d it is"))
    assert "trained: so ? it is" in "".join(page.texts)


def test_several_runs_share_the_charts(tmp_path):
    runs = [
        make_run(tmp_path / "one"),
        make_run(tmp_path / "two", target=0.3),
        make_run(tmp_path / "three", name="grpo", target=None, evals=False, steps=25),
    ]
    page = report(tmp_path, *runs)
    assert "3 runs compared" in page.text
    # two runs of one name are told apart by directory
    for name in ("tiny (one)", "tiny (two)", "grpo"):
        assert name in page.text
    assert page.count("path", "target") == page.count("path", "band") == 2
    assert page.count("rect", "gate") == 0
    assert page.count("rect", "lane") == 10  # five strips in each of two lanes
    assert {f"c{i}" for i in range(3)} <= {
        c for t, a in page.tags if t == "path" for c in a["class"].split()
    }


def with_task(run, task, decoding, changed=None):
    """The run, evaluated on one more task of four problems; `changed` is the decoding after
    training."""
    with (run / "eval.jsonl").open("a") as file:
        for step, weights, correct in (
            (0, "base", [0.25, 0, 0.5, 0]),
            (40, "trained", [1, 0.5, 0.75, 0.25]),
        ):
            settings = changed if changed and step else decoding
            record = {
                "step": step,
                "weights": weights,
                "task": task,
                "decoding": settings,
                "pass1": sum(correct) / 4,
            }
            shown = {
                "prompt": "1 + 1?",
                "response": f"{task} {weights}",
                "answer": "2",
                "reward": 1.0,
            }
            file.write(
                to_line(
                    record | {"greedy": None, "problems": 4, "correct": correct, "samples": [shown]}
                )
            )
    return run


def test_tasks_are_told_apart(tmp_path):
    run = with_task(make_run(tmp_path / "run"), "aime", {"samples": 4})
    with_task(run, "gsm", {"samples": 1}, changed={"samples": 1, "top_p": 0.9})
    page = report(tmp_path, run)
    assert "0.250 → 0.750" in page.text  # the run's own, as without tasks
    for words in (
        "aime: avg@4, sampled",
        "0.188 → 0.625",
        # d = 3/4, 1/2, 1/4, 1/4: 3.182 s / sqrt(n) = 0.3809
        "+0.438 [+0.057, +0.818], 95 %, paired, 4 problems",
        "gsm: pass@1, sampled",
        "decoded differently before and after, so no interval",
        "Responses before and after, aime",
        "gsm trained",
    ):
        assert words in page.text, words


def test_runs_of_different_tasks_are_compared_row_by_row(tmp_path):
    one = with_task(make_run(tmp_path / "one"), "aime", {"samples": 4})
    two = with_task(make_run(tmp_path / "two", evals=False, target=None), "gsm", {"samples": 1})
    page = report(tmp_path, one, two)
    for words in ("pass@1, sampled", "aime: avg@4, sampled", "gsm: pass@1, sampled"):
        assert words in page.text, words


def test_runs_with_one_target_share_one_band(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "one"), make_run(tmp_path / "two", steps=60))
    assert page.count("path", "band") == 1


def test_entropy_far_above_its_target_gets_a_second_chart(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run", target=0.03))
    assert "Entropy near the target" in page.text
    assert "3.67 × target 0.0300, outside ±25%" in page.text
    assert page.count("path", "band") == 2
    assert (
        len({attrs["id"] for tag, attrs in page.tags if tag.lower() == "clippath"})
        == page.count("figure", "chart")
        == 7
    )


def test_reading_a_report_needs_no_torch():
    code = "import sys, megatron_stare.observability.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("steps", [1, 2, 13])
def test_short_runs(tmp_path, steps):
    page = report(tmp_path, make_run(tmp_path / "run", steps=steps))
    assert page.count("figure", "empty") == 0
    assert "NaN" not in page.text
    assert not any(
        "nan" in (value or "")
        for tag, attrs in page.tags
        if tag == "path"
        for value in attrs.values()
    )


def test_a_gap_breaks_the_line(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run"))
    smoothed = [
        attrs["d"] for tag, attrs in page.tags if tag == "path" and attrs.get("class") == "line c0"
    ]
    assert len(smoothed) == 7  # reward in two stretches, five charts in one


def test_missing_metrics_and_evaluations(tmp_path):
    run = make_run(
        tmp_path / "run", evals=False, target=None, drop=("reward/mean", "optimizer/grad_norm")
    )
    page = report(tmp_path, run)
    assert page.count("figure", "empty") == 2
    assert "no evaluation" in page.text
    assert "the run has no target" in page.text
    assert "Gate on" not in page.text


def test_a_run_that_just_started_and_one_cut_off(tmp_path):
    started = tmp_path / "started"
    started.mkdir()
    (started / "config.yaml").write_text("run: {name: fresh}\n")
    assert report(tmp_path, started).count("figure", "empty") == 6
    cut = make_run(tmp_path / "cut")
    for name in ("metrics.jsonl", "eval.jsonl"):
        (cut / name).write_bytes((cut / name).read_bytes()[:-9])
    assert "before training" in report(tmp_path, cut).text


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a run directory"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(DataError, match="no run directory"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_repeated_step_counts_once(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(to_line({"step": 3, "time/step_s": 2.0}))
    assert "5.00 s" in report(tmp_path, run).text


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0, 0.87), (-0.3, 0.9), (3, 3), (0, 0), (0, 5e-5), (0, 1e-30), (0, 123456)],
)
def test_ticks_are_round_and_enclose(low, high):
    ticks = nice_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert 3 <= len(ticks) <= 9
    assert ticks[0] <= low <= high <= ticks[-1]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert round(mantissa, 6) in (1, 2, 5)
    assert len({tick_label(tick, step) for tick in ticks}) == len(ticks)


def test_labels():
    assert [
        tick_label(*pair) for pair in ((0.25, 0.05), (1200, 200), (15000, 5000), (2e-5, 1e-5))
    ] == [
        "0.25",
        "1,200",
        "15k",
        "2e-5",
    ]
    assert [short(x) for x in (0.10349, 4184.2, 0.0, 3.14159e-6, None, math.nan)] == [
        "0.103",
        "4,184",
        "0",
        "3.14e-06",
        "–",
        "–",
    ]


def test_smoothing_keeps_level_and_gaps():
    flat = [2.0] * 30 + [math.nan] + [2.0] * 30
    smoothed = smooth(flat)
    assert math.isnan(smoothed[30])
    assert [v for v in smoothed if math.isfinite(v)] == pytest.approx([2.0] * 60)
    for length in (1, 2, 3, 5):
        assert smooth([1.0] * length) == pytest.approx([1.0] * length)


def test_thinning_keeps_spikes_and_gaps():
    points = [(float(i), 0.0) for i in range(10_000)]
    points[5_003], points[7_000] = (5003.0, 9.0), (7000.0, math.nan)
    kept = thin(points)
    assert len(kept) <= 710
    assert (5003.0, 9.0) in kept
    assert any(math.isnan(value) for _, value in kept)
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_gate_intervals():
    assert intervals_on([1, 2, 3, 4, 5], [1, 1, 0, math.nan, 1]) == [(0.5, 2.5), (4.5, 5.5)]


def test_the_interval_minds_prompts_of_the_same_problem(tmp_path):
    """Four prompts, two of them one problem: d = 1, 0, 1, 1 as in the worked interval of
    test_paired."""
    run = make_run(tmp_path / "run", evals=False)

    def note(*problems):
        records = [
            {"step": step, "weights": weights, "pass1": p, "problems": 4, "correct": right}
            | problem
            for (step, weights, p, right), problem in zip(
                ((0, "base", 0.0, [0, 0, 0, 0]), (40, "trained", 0.75, [1, 0, 1, 1])),
                problems,
                strict=True,
            )
        ]
        (run / "eval.jsonl").write_text("".join(map(to_line, records)))
        return verdict(read_run(run))[0].note

    shared, alone = {"problem": [0, 1, 0, 2]}, {"problem": [0, 1, 2, 3]}
    half = 5.2422651305838315 * math.sqrt(8 / 5 * 7 / 8) / 4
    counted = f"{0.75 - half:+.3f}, {0.75 + half:+.3f}], 95 %, paired, 4 problems (3 distinct)"
    assert note(shared, shared).endswith(counted)
    assert note(alone, alone).endswith("[-0.046, +1.546], 95 %, paired, 4 problems")
    assert note({}, {}) == note(alone, alone)  # of a run before the numbers were kept
    assert note(shared, alone) == "different problems before and after, so no interval"
    # begun by a release that did not say, and continued by this one
    assert note({}, shared).endswith(counted)
