"""The task of long chains, trained as a user trains it: guesses and searches are sampled, judged and counted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from support.runs import ROOT, TIMEOUT_S, command, environment, metrics

from megatron_stare.observability.rollout_files import read_rollouts
from megatron_stare.rewards.signs_verifier import verify


def test_three_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = command(
        f"run.dir={run_dir}",
        "run.rollouts_every=1",
        config=ROOT / "configs/longchain.yaml",
        **{"run.steps": 3, "batch.prompts": 8, "batch.samples_per_prompt": 8, "eval.prompts": 200},
    )
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = metrics(run_dir)
    assert len(rows) == 3
    for row in rows:
        responses = read_rollouts(run_dir / "rollouts" / f"step_{row['step']:06d}.jsonl")
        assert [each.reward for each in responses] == [verify(each.response, each.answer) for each in responses]
        waits = [each.response.split().count("wait") for each in responses]
        assert row["response/reflections"] == sum(waits) / len(waits) > 0
        assert row["response/truncated"] == 0
        assert row["rollout/logprob_diff_max"] < 1e-4
    assert "Reflection" in (run_dir / "report.html").read_text()
    before, _ = (json.loads(line) for line in (run_dir / "eval.jsonl").open())
    # Where reinforcement learning starts from: between never and nearly always, and greedy decoding no exception.
    assert 0.2 < before["pass1"] < 0.6
    assert 0.2 < before["greedy"] < 0.75
