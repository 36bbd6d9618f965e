"""Which checkpoints stay: the newest, every so many-th, the best by a metric; and what a real run
leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from support.runs import ROOT, command, metrics, model

from megatron_stare.cli import main
from megatron_stare.config.load import load_config
from megatron_stare.config.schema import CheckpointConfig
from megatron_stare.driver.checkpoints import Checkpoints, Retention, scores
from megatron_stare.errors import ConfigError
from megatron_stare.planning.preflight import check_best

STEPS = [20, 40, 60, 80, 100, 120]
SCORES = {20: 0.1, 40: 0.9, 60: 0.5, 80: 0.9, 100: math.nan, 120: 0.2}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(1), [120]),
        (Retention(2), [100, 120]),
        (Retention(9), STEPS),
        (Retention(1, every=60), [60, 120]),
        (Retention(1, every=40), [40, 80, 120]),
        (Retention(1, best=1), [80, 120]),  # of two alike the newer
        (Retention(1, best=2), [40, 80, 120]),
        (Retention(1, best=3), [40, 60, 80, 120]),
        (Retention(1, best=9), [20, 40, 60, 80, 120]),  # 100 has no score
        (Retention(1, best=1, higher=False), [20, 120]),
        (Retention(1, best=2, higher=False), [20, 120]),
        (Retention(2, every=60, best=1), [60, 80, 100, 120]),
    ],
    ids=str,
)
def test_what_stays(rule: Retention, kept: list[int]) -> None:
    assert set(STEPS) - rule.leaves(STEPS, SCORES) == set(kept)
    assert set(STEPS) - rule.leaves(STEPS[::-1], SCORES) == set(kept)


def test_the_newest_stays_whatever_is_asked() -> None:
    for rule in (Retention(0), Retention(1, best=1), Retention(1, every=7)):
        assert rule.leaves([20], {}) == set()
        assert 120 not in rule.leaves(STEPS, {20: 5.0})
    assert Retention(1).leaves([], {}) == set()


def test_scores_are_of_the_step_or_of_its_evaluation(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/mean": 0.5}, {"step": 2}, {"step": 3, "reward/mean": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = [
        {"step": 0, "pass1": 0.1, "task": "aime"},
        {"step": 2, "pass1": 0.4, "task": "aime", "results": {"pass@8": {"value": 0.6}}},
        {"step": 2, "pass1": 0.7, "task": "amc"},
        {"step": 2, "pass1": 0.2},
    ]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert scores(tmp_path, None) == []
    assert scores(tmp_path, "reward/mean") == [{1: 0.5, 3: 0.75}]
    assert scores(tmp_path, "eval/pass1") == [{2: 0.2}]
    assert scores(tmp_path, "eval/aime/pass1") == [{0: 0.1, 2: 0.4}]
    assert scores(tmp_path, "eval/aime/pass@8") == [{2: 0.6}]
    assert scores(tmp_path, "eval/amc/pass1") == [{2: 0.7}]
    assert scores(tmp_path / "nowhere", "reward/mean") == scores(tmp_path, "no/such") == []


def test_a_changed_evaluation_is_ranked_apart_and_removes_no_earlier_best(tmp_path: Path) -> None:
    """Easier problems from step 60 on: their worst result is above the best before."""
    hard, easy = ({"problems": name, "verifier": "math"} for name in ("hard", "easy"))
    hot, cold = ({"samples": 1, "temperature": t, "max_new_tokens": 8} for t in (1.0, 0.6))
    records = [
        {"step": step, "asked": asked, "decoding": decoding, "pass1": value, "greedy": value}
        for step, asked, decoding, value in (
            (20, hard, hot, 0.3),
            (40, hard, hot, 0.2),
            (60, easy, hot, 0.8),
            (80, easy, hot, 0.9),
            (100, easy, cold, 0.7),
        )
    ]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert scores(tmp_path, "eval/pass1") == [{20: 0.3, 40: 0.2}, {60: 0.8, 80: 0.9}, {100: 0.7}]
    # greedy responses do not depend on the temperature
    assert scores(tmp_path, "eval/greedy") == [{20: 0.3, 40: 0.2}, {60: 0.8, 80: 0.9, 100: 0.7}]
    config = load_config(
        ROOT / "configs/quickstart.yaml",
        ["checkpoint={keep_best: 1, best_by: eval/pass1}", "run.keep_checkpoints=1"],
    )
    forgotten: list[set[int]] = []
    run_dir = SimpleNamespace(
        path=tmp_path,
        checkpoints=lambda: [Path(f"step_{step:06}") for step in STEPS],
        forget=forgotten.append,
    )
    Checkpoints(config, None, run_dir)._retire()  # type: ignore[arg-type]
    assert forgotten == [{40, 60}]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_best": 1}, "keep_best needs best_by"),
        ({"best_by": "reward/mean"}, "best_by needs keep_best"),
        ({"keep_every": 0}, "keep_every"),
        ({"keep_best": -1}, "keep_best"),
        ({"grace_s": 0}, "grace_s"),
        ({"best_is": "largest"}, "best_is"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CheckpointConfig(**settings)


@pytest.mark.parametrize(
    ("metric", "more", "said"),
    [
        ("eval/pass1", [], ""),
        ("reward/mean", ["eval.every=0"], ""),
        ("eval/pass1", ["eval.every=0"], "no evaluation between steps measures eval/pass1"),
        ("eval/pass1", ["eval.prompts=0"], "no evaluation between steps measures eval/pass1"),
        ("eval/aime/pass1", [], "no task of this run has the metric"),
    ],
)
def test_an_evaluation_that_is_not_made_is_no_measure(
    metric: str, more: list[str], said: str
) -> None:
    asked = [
        f"checkpoint={{keep_best: 1, best_by: {metric}}}",
        "eval.every=10",
        "eval.prompts=4",
        *more,
    ]
    config = load_config(ROOT / "configs/quickstart.yaml", asked)
    if not said:
        check_best(config)
        return
    with pytest.raises(ConfigError, match=said):
        check_best(config)


@pytest.mark.wide
@pytest.mark.distributed
def test_a_run_leaves_the_newest_the_regular_and_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "runtime.runner": "inline",
        "parallel.tensor": 1,
        "eval.prompts": 0,
        "run.steps": 7,
        "run.checkpoint_every": 1,
        "run.keep_checkpoints": 1,
        "batch.prompts": 2,
        "checkpoint.keep_every": 4,
        "checkpoint.keep_best": 1,
        "checkpoint.best_by": "reward/mean",
    }
    run = tmp_path / "run"
    assert main(command(model(), f"run.dir={run}", **settings)[3:]) == 0
    rewards = {row["step"]: row["reward/mean"] for row in metrics(run)}
    best = max(rewards, key=lambda step: (rewards[step], step))
    assert best not in (4, 7)  # or this shows nothing
    kept = {int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir()}
    assert kept == {4, 7, best}
    misspelt = {**settings, "run.steps": 8, "checkpoint.best_by": "reward/maen"}
    assert main(command(model(), f"run.dir={run}", "--resume", **misspelt)[3:]) == 0
    assert capsys.readouterr().out.count("nothing was logged as reward/maen so far") == 1
