"""Whole runs with the environment `tools`: killed in a call, continued, and equal to one that
nothing disturbed."""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT, metrics, train

OWN = Path(__file__).parent / "own_tools.py"


def settings(folder: Path, partial: bool = False, once: bool = False) -> dict[str, Any]:
    rows = folder / "sums.jsonl"
    if not rows.exists():
        sums = [(10 + 7 * n % 90, 11 + 13 * n % 88) for n in range(40)]
        rows.write_text(
            "".join(
                f"{json.dumps({'prompt': f'What is {a}+{b}?', 'answer': str(a + b)})}\n"
                for a, b in sums
            )
        )
    tool = {"name": f"{OWN}:code_interpreter", "once": once}
    environment = {"name": "tools", "tools": [tool], "max_turns": 3}
    return {
        "run.steps": 4,
        "run.checkpoint_every": 2,
        "run.rollouts_every": 1,
        "data.source": "files",
        "data.path": rows,
        "data.chat_template": True,
        "rollout.environment": json.dumps(environment),
        "rollout.max_prompt_tokens": 320,
        "rollout.max_new_tokens": 128,
        "batch.prompts": 3,
        "batch.samples_per_prompt": 4,
        "reward.verifier": "math_verify",
        "eval.prompts": 0,
        **(
            {"partial.tokens": 40, "partial.prompts": 4, "algorithm.correction": "{mode: truncate}"}
            if partial
            else {}
        ),
    }


LAYOUT = (
    f"model.path={ROOT / 'assets/tiny-chat'}",
    "runtime.runner=inline",
    "parallel.tensor=1",
)


def answered(run: Path) -> set[str]:
    """Ids of the calls whose answers are in the journal."""
    noted = [
        json.loads(line)
        for file in (run / "calls").iterdir()
        for line in file.read_text().splitlines()
    ]
    return {line["id"] for line in noted if "answer" in line}


def logged(log: Path) -> list[str]:
    return [json.loads(line)[0] for line in log.read_text().splitlines()]


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("partial", [False, True])
def test_a_run_killed_in_a_call_ends_as_if_it_had_not_been(
    partial: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """An answered call is never made again; one that was in flight is, under the same id."""
    given = settings(tmp_path, partial)
    log, order = tmp_path / "log", tmp_path / "order"
    monkeypatch.setenv("KILL_AT", str(order))
    monkeypatch.setenv("TOOL_LOG", str(tmp_path / "quiet"))
    done = train(*LAYOUT, cwd=tmp_path, **given, **{"run.dir": tmp_path / "undisturbed"})
    assert done.returncode == 0, done.stderr
    calls = len(logged(tmp_path / "quiet"))
    assert calls > 12

    monkeypatch.setenv("TOOL_LOG", str(log))
    order.write_text(str(calls * 5 // 8))
    run = {**given, "run.dir": tmp_path / "run"}
    killed = train(*LAYOUT, cwd=tmp_path, **run)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    known, before = answered(tmp_path / "run"), logged(log)
    done = train(*LAYOUT, "--resume", cwd=tmp_path, **run)
    assert done.returncode == 0, done.stderr
    times = Counter(logged(log))
    twice = {call for call, count in times.items() if count == 2}
    assert max(times.values()) <= 2
    assert twice == set(before) - known != set()
    assert len(times) == calls

    rows, quiet = metrics(tmp_path / "run"), metrics(tmp_path / "undisturbed")
    for row in (*rows, *quiet):
        for name in ("tools/seconds", "tools/seconds_of_code_interpreter"):
            assert row.pop(name) >= 0  # of the clock
        assert row["tools/calls_of_code_interpreter"] > 0
    assert rows == quiet

    def policy(name: str) -> str:
        return hashlib.sha256((tmp_path / name / "hf/model.safetensors").read_bytes()).hexdigest()

    assert policy("run") == policy("undisturbed")
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    called = [row for row in map(json.loads, lines) if "calls" in row]
    assert called
    assert all("<tool_response>" in row["response"] for row in called)


@pytest.mark.wide
@pytest.mark.distributed
def test_a_call_that_must_not_be_repeated_ends_its_response(
    tmp_path: Path, monkeypatch: Any
) -> None:
    log, order = tmp_path / "log", tmp_path / "order"
    monkeypatch.setenv("TOOL_LOG", str(log))
    monkeypatch.setenv("KILL_AT", str(order))
    order.write_text("24")  # of the third step, behind a checkpoint
    run = {**settings(tmp_path, once=True), "run.dir": tmp_path / "run"}
    killed = train(*LAYOUT, cwd=tmp_path, **run)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    cut = set(logged(log)) - answered(tmp_path / "run")
    assert cut
    done = train(*LAYOUT, "--resume", cwd=tmp_path, **run)
    assert done.returncode == 0, done.stderr
    assert max(Counter(logged(log)).values()) == 1
    rows = metrics(tmp_path / "run")
    assert 1 <= sum(row["environment/given_up"] for row in rows) <= len(cut) + 1
