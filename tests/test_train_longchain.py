"""The task of long chains, trained as a user trains it: searching pays, so responses become
longer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import fmean

import pytest
from support.runs import ROOT, TIMEOUT_S, command, environment, metrics

from megatron_stare.rewards.signs_verifier import verify
from megatron_stare.run_dir.rollout_files import read_rollouts


@pytest.mark.wide
def test_a_few_steps_make_responses_longer_and_better(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small = {
        "run.steps": 12,
        "batch.prompts": 16,
        "batch.samples_per_prompt": 8,
        "eval.prompts": 150,
    }
    arguments = command(
        f"run.dir={run_dir}",
        "run.rollouts_every=12",
        "run.rollouts_kept=128",
        config=ROOT / "configs/longchain.yaml",
        **small,
    )
    done = subprocess.run(
        arguments,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = metrics(run_dir)
    for grows, by in (
        ("response/length_mean", 1.4),
        ("response/reflections", 1.4),
        ("reward/mean", 1.2),
    ):
        values = [row[grows] for row in rows]
        assert fmean(values[-3:]) > by * fmean(values[:3]), grows
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-3

    responses = read_rollouts(run_dir / "rollouts/step_000012.jsonl")
    assert [each.reward for each in responses] == [
        verify(each.response, each.answer) for each in responses
    ]
    waits = [each.response.split().count("wait") for each in responses]
    assert rows[-1]["response/reflections"] == sum(waits) / len(waits)
    assert (
        "words a response, of observability.reflection_words"
        in (run_dir / "report.html").read_text()
    )

    before, after = (json.loads(line) for line in (run_dir / "eval.jsonl").open())
    # there is something to learn, greedily too
    assert 0.2 < before["pass1"] < 0.45 and 0.1 < before["greedy"] < 0.4
    assert after["pass1"] > before["pass1"] + 0.1
