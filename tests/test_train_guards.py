"""Whole runs that meet a spike, or numbers that are not finite: what they do, and what they end
with."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.guarded import LEFT_OUT, PAID
from support.runs import ROOT, SMALL, metrics, model

from megatron_stare.config.load import load_config
from megatron_stare.data.arithmetic import draw_problem
from megatron_stare.data.streams import stream_seed
from megatron_stare.driver.guards import read_guarded, step_folder
from megatron_stare.errors import GuardError, NonFiniteError
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.observability.metrics.monitor import Monitor
from megatron_stare.process.time_limit import TimeLimit
from megatron_stare.run_dir.run_state import RunState
from megatron_stare.train import train

pytestmark = pytest.mark.distributed

PROMPTS, STEPS, SPIKE = 2, 8, 7  # a step, of a run, and the step whose batch is far too well paid
SETTINGS = {
    **SMALL,
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "run.steps": STEPS,
    "run.checkpoint_every": 6,
    "run.keep_checkpoints": 5,
    "batch.prompts": PROMPTS,
    "batch.samples_per_prompt": 4,
    "rollout.max_new_tokens": 6,
    "data.source": "support.guarded.Prompts",
    "reward.verifier": "support.guarded.verify",
    "algorithm": "{name: dr_grpo}",  # which does not divide rewards by their spread
    "eval.prompts": 0,
    "observability.sinks": "[jsonl]",
    "observability.entropy_forecast": "false",
    "faults.hangs.enabled": "false",
    "faults.guards.window": 5,
    "faults.guards.known": 5,
}


def run(where: Path, *overrides: str, resume: bool = False, limit: TimeLimit | None = None) -> Path:
    """In this process, whose torch has one thread."""
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    config = load_config(
        ROOT / "configs/quickstart.yaml", [*settings, model(), f"run.dir={where}", *overrides]
    )
    return train(config, resume=resume, limit=limit)


def weights(run_dir: Path) -> bytes:
    return (run_dir / "hf/model.safetensors").read_bytes()


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Without what a rollback adds."""
    return [
        {k: v for k, v in row.items() if not k.startswith("guard/")} for row in metrics(run_dir)
    ]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects what is said to the person who watches."""
    said: list[str] = []
    monkeypatch.setattr(Monitor, "note", lambda self, text: said.append(text))
    return said


@pytest.mark.wide
def test_a_spike_stops_a_run_or_sends_it_back_past_its_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notes: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = stream_seed(1, "train")
    drawn = [draw_problem(seed, "train", i).answer for i in range(PROMPTS * (STEPS + 1))]
    first = PROMPTS * (SPIKE - 1)
    assert drawn.count(drawn[first]) == 1
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # of the verifiers' processes
    monkeypatch.setenv(PAID, drawn[first])

    stopped = tmp_path / "stopped"
    with pytest.raises(
        GuardError, match=rf"step {SPIKE}: the gradient norm .* spreads from the median"
    ):
        run(stopped, "faults.guards.grad_norm.action=stop")
    last = metrics(stopped)[-1]
    assert (
        last["step"],
        last["guard/grad_norm_spike"],
        last["update/held"],
        last["update/count"],
    ) == (SPIKE, 1, 1, 0)
    assert last["guard/grad_norm"] > 1e3
    assert [each.name for each in (stopped / "checkpoints").iterdir()] == ["step_000006"]
    batch = read_guarded(step_folder(stopped / "guards", SPIKE))
    assert "the gradient norm" in batch.why and not batch.first
    assert {each.cursor for each in batch.responses} == {first, first + 1}
    assert max(each.reward for each in batch.responses) >= 1e5
    for each in batch.responses:  # which the engine and the trainer see alike
        assert torch.allclose(each.log_probs, each.rollout_log_probs, atol=1e-4)
        assert len(each.tokens) == len(each.log_probs) and each.prompt_tokens

    # opening the run again takes 1000 s of 1500, and is not what a step takes, of which the next
    # would be too many
    limit = TimeLimit(1500.0, clock=lambda: 1000.0 * sum("rolls back" in note for note in notes))
    down = "support.guarded.DownAfterOneResume"  # which does not keep the run from going on
    settings = ("faults.guards.grad_norm.action=rollback", f"observability.sinks=[jsonl,{down}]")
    assert run(stopped, *settings, resume=True, limit=limit) == stopped
    assert f"goes on without the sink '{down}' of" in capsys.readouterr().err
    (rollback,) = json.loads((stopped / "rollbacks.json").read_text())
    assert (rollback["step"], rollback["prompts"]) == (SPIKE, [first, first + 1])
    assert any(
        f"step {SPIKE}: the gradient norm" in note and "rolls back" in note for note in notes
    )
    assert [row.get("guard/rollbacks", 0) for row in metrics(stopped)] == [0] * 6 + [1] * 2
    assert RunState.read(stopped / f"checkpoints/step_{STEPS:06d}").left_out == {first, first + 1}

    # a run whose prompts never were among the data
    monkeypatch.setenv(LEFT_OUT, f"{first},{first + PROMPTS}")
    plain = run(tmp_path / "plain")
    monkeypatch.delenv(LEFT_OUT)
    assert weights(stopped) == weights(plain)
    # guards that end a run say how many updates they held; nothing else differs
    held = [{k: v for k, v in row.items() if k != "update/held"} for row in rows_of(stopped)]
    assert held == rows_of(plain)
    assert not (plain / "rollbacks.json").exists()

    # killed after it went back, before the next checkpoint: it does not meet the batch again
    for name in (f"checkpoints/step_{STEPS:06d}", "hf"):
        shutil.rmtree(stopped / name)
    run(stopped, "faults.guards.grad_norm.action=stop", resume=True)
    assert weights(stopped) == weights(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("runtime.runner=ray", "parallel.data=2", "optimizer.distributed=true"),
            id="two-data-ranks",
        ),
        pytest.param(("batch.generate_prompts=4", "batch.max_rounds=2"), id="dynamic-sampling"),
        pytest.param(
            ("rollout.staleness=1", "algorithm={name: dr_grpo, correction: {mode: truncate}}"),
            id="ahead",
        ),
    ],
)
def test_a_rollback_leaves_out_the_batch_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """Whatever of it was sampled, where, and when."""
    seed = stream_seed(1, "train")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    sinks = "observability.sinks=[jsonl, support.cursors_sink.Cursors]"
    plain = run(tmp_path / "plain", sinks, *overrides)
    used = {
        int(step): cursors
        for step, cursors in json.loads((plain / "cursors.json").read_text()).items()
    }
    drawn = [draw_problem(seed, "train", i).answer for i in range(max(used[STEPS]) + 8)]
    answer = next(drawn[cursor] for cursor in used[SPIKE] if drawn.count(drawn[cursor]) == 1)
    monkeypatch.setenv(PAID, answer)
    back = run(tmp_path / "back", sinks, "faults.guards.grad_norm.action=rollback", *overrides)
    assert metrics(back)[-1]["guard/rollbacks"] == 1
    (rollback,) = json.loads((back / "rollbacks.json").read_text())
    assert rollback["step"] == SPIKE and rollback["prompts"] == sorted(used[SPIKE])
    taken = {
        int(step): cursors
        for step, cursors in json.loads((back / "cursors.json").read_text()).items()
    }
    assert sorted(taken) == list(range(1, STEPS + 1))
    everything = [cursor for cursors in taken.values() for cursor in cursors]
    assert len(everything) == len(set(everything)) and not set(everything) & set(
        rollback["prompts"]
    )
    assert all(taken[step] == used[step] for step in range(1, SPIKE))
    if "rollout.staleness=1" not in overrides:
        monkeypatch.setenv(LEFT_OUT, f"{min(used[SPIKE])},{max(used[SPIKE]) + 1}")
        if max(used[SPIKE]) - min(used[SPIKE]) < PROMPTS:  # nothing lies between them
            assert weights(back) == weights(run(tmp_path / "without", sinks, *overrides))


@pytest.mark.wide
def test_a_batch_that_is_not_finite_is_left_out_and_written_down_until_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample's advantage is not a number in step 2, and in all steps from 4 on."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    measure = Trainer.measure

    def broken(self: Trainer, state: dict[str, float]) -> None:
        measure(self, state)
        measured = self.step.measured
        assert measured is not None
        if (step := self.step.batch.share.step) == 2 or step >= 4:
            measured.tokens.advantage[measured.tokens.sequence == 5] = torch.nan

    monkeypatch.setattr(Trainer, "measure", broken)
    with pytest.raises(
        NonFiniteError,
        match=r"step 5: loss or gradient was not finite in 2 optimizer steps in a row",
    ):
        run(tmp_path, "faults.guards.not_finite=2", "faults.guards.dumps=2")
    rows = metrics(tmp_path)
    assert [(row["step"], row["update/finite"], row["update/count"]) for row in rows] == [
        *((1, 1.0, 1.0), (2, 0.0, 0.0), (3, 1.0, 1.0), (4, 0.0, 0.0))
    ]
    folders = sorted((tmp_path / "guards").iterdir())
    # as many as are wanted
    assert [folder.name for folder in folders] == ["step_000002", "step_000004"]
    batch = read_guarded(folders[0])
    assert (
        batch.first
        == "log-prob, advantage or loss of sample 5, on rank 0 (data 0, tensor 0, stage 0)"
    )
    assert batch.ranks[0]["own_gradient"] and batch.ranks[0]["samples"] == [5]
    # of the driver, which was sound
    assert [math.isfinite(each.advantage) for each in batch.responses] == [True] * 8
