"""Whole runs that lose a process, open themselves again, and are not the undisturbed run to the
bit: SGLang samples other responses the second time, and what was sampled ahead, or kept, is sampled
by other weights. Whatever is killed, every prompt is trained on once, by tokens of the weights that
they say, and nothing is left.

Where the bits are the same: test_train_killed.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import sglang_servers as servers
from support.interrupts import interruptible
from support.leftovers import Traces
from support.runs import ROOT, command, environment, metrics, model
from support.trained_sink import cursors_of, off, trained_on, versions_of
from test_train_sglang import LIMIT, SGLANG, is_step

from megatron_stare.process.recovery import RESTARTS_FILE
from megatron_stare.rollout.sources.kept import from_bytes
from megatron_stare.run_dir.run_state import KEPT

sys.path.insert(0, str(ROOT / "benchmarks"))

import kill_anywhere  # a script

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS, PROMPTS, KILL_AFTER = 8, 4, 5  # of which step 4 has a checkpoint, and step 5 is made again
SETTINGS = {
    **kill_anywhere.SMALL,
    "run.steps": STEPS,
    "batch.prompts": PROMPTS,
    "run.keep_checkpoints": STEPS,
    "observability.sinks": "[jsonl, support.trained_sink.Trained, console]",
}
STALENESS = 2
AHEAD = {"rollout.staleness": STALENESS, "algorithm": "{name: stare, correction: {mode: truncate}}"}
PARTIAL = {
    "partial.tokens": 8,
    "partial.prompts": PROMPTS + 3,
    "rollout.temperature": 2,  # at which responses have 5 to 32 tokens
    "algorithm": "{name: stare, correction: {mode: truncate}}",
}
# who opens the run again; all other processes: the driver
BY = {"driver": ("supervisor",), "verifier": ()}


def server(supervisor: int) -> psutil.Process | None:
    """The process of a run's SGLang server, the first of its group."""
    for process in psutil.Process(supervisor).children(recursive=True):
        words = process.cmdline()
        if (
            "megatron_stare.rollout.engines.sglang.serve" in words
            and os.getpgid(process.pid) == process.pid
        ):
            return process
    return None


def killed(folder: Path, process: str, **settings: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A supervised run of which a process is killed after KILL_AFTER steps, and which ends well:
    its directory and record."""
    traces, said = Traces(), (folder / "said").open("w+")
    run = subprocess.Popen(
        command(model(), "--supervise", **{**SETTINGS, **settings}),
        cwd=folder,
        env=traces.environment(environment()),
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        preexec_fn=interruptible,
    )
    try:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if is_step(line, KILL_AFTER) and not any(
                is_step(each, KILL_AFTER) for each in lines[:-1]
            ):
                traces.look()
                if process == "server":
                    found = server(run.pid)
                    assert found is not None
                    os.killpg(found.pid, signal.SIGKILL)
                else:
                    assert kill_anywhere.kill(process, run, time.monotonic()) is not None
        code = run.wait()
    finally:
        run.kill()
        run.wait()
        said.seek(0)
        told = said.read()
        said.close()
    assert code == 0, told
    assert traces.left() == []
    rows = metrics(folder / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    restarts = folder / "run" / RESTARTS_FILE
    by = (
        tuple(json.loads(line)["by"] for line in restarts.read_text().splitlines())
        if restarts.exists()
        else ()
    )
    assert by == BY.get(process, ("driver",)), told
    assert any("continuing after step" in line for line in lines) == bool(by)
    return folder / "run", rows


IN_ORDER = {step: list(range(PROMPTS * (step - 1), PROMPTS * step)) for step in range(1, STEPS + 1)}


@pytest.mark.sglang
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
@pytest.mark.parametrize(
    ("runner", "process"), [("inline", "server"), ("inline", "driver"), ("ray", "driver")]
)
def test_with_servers_every_prompt_is_trained_on_once(
    tmp_path: Path, runner: str, process: str
) -> None:
    """The only server is killed, which the driver sees to, or the driver. Every token is of the
    newest weights, as the trainer's own log-probs of it say."""
    sglang = dict(each.split("=", 1) for each in SGLANG)
    settings = {**kill_anywhere.RUNNERS[runner], **sglang, "sglang.agreement_limit": LIMIT}
    run, rows = killed(tmp_path, process, **settings)
    trained = trained_on(run)
    assert {step: cursors_of(told) for step, told in trained.items()} == IN_ORDER
    assert {step: versions_of(told) for step, told in trained.items()} == {
        step: {step - 1} for step in IN_ORDER
    }
    for row in rows:
        assert row["agreement/max"] <= LIMIT and row["agreement/canary_max"] <= LIMIT
        assert row["agreement/max_of_age_1"] == row["agreement/max"]


LOCAL = [("inline", process) for process in ("driver", "verifier")]
LOCAL += [("ray", process) for process in ("driver", "rank", "engine")]


@pytest.mark.parametrize(("runner", "process"), LOCAL)
def test_sampled_ahead_every_prompt_is_trained_on_once(
    tmp_path: Path, runner: str, process: str
) -> None:
    run, rows = killed(tmp_path, process, **kill_anywhere.RUNNERS[runner], **AHEAD)
    trained = trained_on(run)
    assert {step: cursors_of(told) for step, told in trained.items()} == IN_ORDER
    for step, told in trained.items():
        assert versions_of(told) <= set(range(max(0, step - 1 - STALENESS), step))
    assert max(row["staleness/max_age"] for row in rows) >= 1  # some were sampled ahead
    check_versions(run, tmp_path, 1.0)


@pytest.mark.parametrize(("runner", "process"), LOCAL)
def test_cut_and_continued_every_prompt_is_trained_on_once(
    tmp_path: Path, runner: str, process: str
) -> None:
    """Or kept for a later step: which step a prompt comes to depends on how long its responses
    are."""
    run, rows = killed(tmp_path, process, **kill_anywhere.RUNNERS[runner], **PARTIAL)
    trained = trained_on(run)
    used = [cursor for told in trained.values() for cursor in cursors_of(told)]
    newest = from_bytes((run / f"checkpoints/step_{STEPS:06d}" / KEPT).read_bytes())
    kept = [group[0].prompt.cursor for group in newest]
    assert len(used) == STEPS * PROMPTS and sorted(used + kept) == list(
        range(STEPS * PROMPTS + len(kept))
    )
    assert all(max(versions_of(told)) < step for step, told in trained.items())
    assert any(row["partial/continued"] > 0 for row in rows[KILL_AFTER:])
    check_versions(run, tmp_path, 2.0)


def check_versions(run: Path, folder: Path, temperature: float) -> None:
    """Every token that is said to be of the model's weights, or of those of a checkpoint, is."""
    differences = off(run, ROOT / "assets/tiny-adder", temperature, folder)
    assert {0, 4} <= differences.keys()  # 4: what the run was continued with
    assert all(tokens and most <= LIMIT for tokens, most in differences.values()), differences
