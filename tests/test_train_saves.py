"""Runs that are told to end: what they save, and that what is continued is the run that nobody
disturbed, bit for bit.

The signals are real and sent at exact moments, by the run to itself. The runs are in this process,
where they take a second each; test_train_signals.py has some as users start them.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.moments import at
from support.runs import TIMEOUT_S, command, environment, metrics, model

from megatron_stare.cli import main
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.process import interruption
from megatron_stare.process.interruption import AFTER_STEP, TO_BE_CONTINUED
from megatron_stare.process.time_limit import TimeLimit
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.run_dir.run_state import RunState

pytestmark = pytest.mark.distributed
TERMINATED = 128 + signal.SIGTERM
SETTINGS = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "run.steps": 4,
    "run.checkpoint_every": 0,
    "batch.prompts": 2,
    "batch.samples_per_prompt": 4,
    "observability.sinks": "[jsonl]",
}
PARTIAL = {
    "partial.tokens": 6,
    "partial.prompts": 4,
    "algorithm": "{name: grpo, correction: {mode: truncate}}",
}


def typed(run_dir: Path, *more: str, **settings: Any) -> list[str]:
    return command(model(), f"run.dir={run_dir}", *more, **{**SETTINGS, **settings})[3:]


def send(*numbers: int) -> Callable[[], None]:
    """Sends the run's own process signals; each that counts has been taken when the next is
    sent."""

    def sent() -> None:
        for number in numbers:
            before = interruption._current.number
            os.kill(os.getpid(), number)
            if before is None or (before == AFTER_STEP and number != AFTER_STEP):
                while interruption._current.number != number:
                    threading.Event().wait(0.001)

    return sent


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run that nobody disturbed, made once for its settings."""
    made: dict[str, Path] = {}

    def of(**settings: Any) -> Path:
        key = json.dumps(settings)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole") / "run"
            assert main(typed(made[key], **settings)) == 0
        return made[key]

    return of


def checkpoints(run: Path) -> list[str]:
    return (
        sorted(path.name for path in (run / "checkpoints").iterdir())
        if (run / "checkpoints").exists()
        else []
    )


def continued(run: Path, whole: Path, **settings: Any) -> None:
    """Goes on to the end, which is the undisturbed run's."""
    assert main(typed(run, "--resume", **settings)) == 0
    assert metrics(run) == metrics(whole)
    got, want = (load_file(folder / "hf/model.safetensors") for folder in (run, whole))
    assert all(torch.equal(got[name], want[name]) for name in want)


SAMPLING_3 = 2 * 8 + 5  # the fifth of the eight responses of the third step


@pytest.mark.wide
@pytest.mark.parametrize(
    ("signals", "owner", "method", "call", "code", "saved"),
    [
        ([signal.SIGTERM], SingleTurn, "run", SAMPLING_3, TERMINATED, 2),
        ([signal.SIGUSR1], SingleTurn, "run", SAMPLING_3, TO_BE_CONTINUED, 3),
        (
            [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1],
            SingleTurn,
            "run",
            SAMPLING_3,
            TERMINATED,
            2,
        ),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1], Trainer, "update", 3, TERMINATED, 3),
        ([signal.SIGINT], Trainer, "update", 3, 128 + signal.SIGINT, 3),
        pytest.param(
            [signal.SIGTERM], EnginePool, "update_weights", 4, TERMINATED, 3, marks=pytest.mark.slow
        ),
    ],
    ids=["sampling", "after-step", "in-a-hurry", "update-twice", "ctrl-c", "sync"],
)
def test_what_is_saved_is_the_last_whole_step_and_it_goes_on_from_there(
    undisturbed: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: list[int],
    owner: type,
    method: str,
    call: int,
    code: int,
    saved: int,
) -> None:
    whole, run = undisturbed(), tmp_path / "run"
    with monkeypatch.context() as patch:
        calls = at(patch, owner, method, {call: send(*signals)})
        assert main(typed(run)) == code
    assert calls() >= call
    error = capsys.readouterr().err
    assert (
        f"after step {saved} of 4; the last checkpoint is of step {saved}; continue with" in error
    )
    assert shlex.split(error.splitlines()[-1])[-1] == "--resume"
    assert checkpoints(run) == [f"step_{saved:06d}"]
    assert len(metrics(run)) == saved
    continued(run, whole)


def test_what_a_save_took_is_logged_with_the_step_after_it(tmp_path: Path) -> None:
    assert main(typed(tmp_path / "run", **{"run.steps": 3, "run.checkpoint_every": 2})) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["perf/save_s"] > 0.0 for row in rows] == [False, False, True]


@pytest.mark.wide
def test_an_evaluation_is_not_waited_for_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its step is whole. The base is evaluated by calls 1 to 4, and step 2 after two steps of 8."""
    settings, run = {"run.steps": 2, "eval.prompts": 4, "eval.greedy": "false"}, tmp_path / "run"
    with monkeypatch.context() as patch:
        at(patch, SingleTurn, "run", {4 + 2 * 8 + 2: send(signal.SIGUSR1)})
        assert main(typed(run, **settings)) == TO_BE_CONTINUED
    assert checkpoints(run) == ["step_000002"]
    assert main(typed(run, "--resume", **settings)) == 0
    assert [json.loads(line)["step"] for line in (run / "eval.jsonl").read_text().splitlines()] == [
        0,
        2,
    ]
    assert [row["step"] for row in metrics(run)] == [1, 2]


@pytest.mark.wide
def test_responses_under_way_are_those_of_the_saved_step(
    undisturbed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout that ends in its middle has taken prompts and grown responses that the saved step
    knows nothing of."""
    whole, run = undisturbed(**PARTIAL), tmp_path / "run"
    with monkeypatch.context() as patch:
        original, sampled = EnginePool.serving, []

        def serving(self: EnginePool, params: Any, *more: Any) -> Any:
            sampled.append(params.step)
            if sampled.count(3) == 2:  # the second round of the third step
                send(signal.SIGTERM)()
            return original(self, params, *more)

        patch.setattr(EnginePool, "serving", serving)
        assert main(typed(run, **PARTIAL)) == TERMINATED
    assert checkpoints(run) == ["step_000002"]
    assert RunState.read(run / "checkpoints/step_000002").kept
    continued(run, whole, **PARTIAL)


HANGS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from test_train_saves import at, interruption, main, send, signal, Trainer

def hang():
    send(signal.SIGTERM)()
    threading.Event().wait()

class Patch:
    setattr = staticmethod(setattr)

interruption.UNHEARD_S = 0.2
at(Patch, Trainer, "update", {3: hang})
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.wide
def test_an_update_that_does_not_end_is_not_waited_for(tmp_path: Path) -> None:
    settings = {
        "checkpoint.grace_s": 0.2,
        "run.checkpoint_every": 2,
        "checkpoint.background": "false",
    }
    words = typed(tmp_path / "run", **settings)
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(Path(__file__).parent), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == TERMINATED, done.stderr
    told = done.stderr.splitlines()
    said = [line for line in told if "Warning" not in line and not line.startswith("loading ")]
    assert said[:3] == [
        "SIGTERM: the run is saved and closed after the update under way",
        "0.2 s are over: closing the run without a checkpoint",
        "the run did not close in time: ending at once, without saving",
    ]
    assert "after step 2 of 4; the last checkpoint is of step 2" in said[3]
    assert "step_000002" in checkpoints(tmp_path / "run")


@pytest.mark.wide
def test_a_run_out_of_time_saves_and_is_continued(
    undisturbed: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def passed(self: TimeLimit, save_s: float) -> bool:
        asked.append(save_s)
        return len(asked) == 4

    with monkeypatch.context() as patch:
        patch.setattr(TimeLimit, "passed_before_another", passed)
        code = main(typed(tmp_path / "run", "--stop-after", "1h30m", **{"run.checkpoint_every": 1}))
    assert code == TO_BE_CONTINUED
    # the first save is seen to be complete after the second step
    assert asked[0] == asked[1] == 0 < asked[2]
    error = capsys.readouterr().err
    assert (
        "stopped, as --stop-after asks, after step 3 of 4; the last checkpoint is of step 3"
        in error
    )
    assert "--stop-after 1h30m" in error.splitlines()[-1]
    continued(tmp_path / "run", undisturbed(), **{"run.checkpoint_every": 1})
