"""Runs that are killed with SIGKILL and resumed, feature by feature, each beside its undisturbed
twin."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.runs import LOADING, metrics, model, train

from megatron_stare.rollout.sources.kept import from_bytes
from megatron_stare.run_dir.run_state import KEPT

pytestmark = pytest.mark.distributed
Rows = list[dict[str, Any]]

PROMPTS = 4  # of a step
COMMON = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "checkpoint.background": "false",  # complete before the next step begins
    "rollout.environment": "support.deadly.Deadly",
    "observability.sinks": "[console,jsonl,support.cursors_sink.Cursors]",
}
AHEAD_STEPS = 6


def begun(step: int) -> Callable[[Rows], int]:
    """The first prompt of a step, where every step takes the next ones."""
    return lambda _: PROMPTS * (step - 1)


def second_round_of_step_3(whole: Rows) -> int:
    used = [round(PROMPTS / (1 - step["sampling/dropped"])) for step in whole]
    return sum(used[:2]) + 3  # a round asks for three


def trained_on(run: Path) -> list[int]:
    """Prompts in the order of the steps."""
    return [
        cursor
        for step in json.loads((run / "cursors.json").read_text()).values()
        for cursor in step
    ]


def kept(checkpoint: Path) -> list[int]:
    """Prompts whose responses a checkpoint keeps."""
    return [group[0].prompt.cursor for group in from_bytes((checkpoint / KEPT).read_bytes())]


def several_updates(run: Path) -> None:
    rows = metrics(run)
    assert [row["update/count"] for row in rows] == [4.0] * 3
    assert all(row["ratio/first_max_abs_log"] == 0.0 < row["ratio/max_abs_log"] for row in rows)


def lagged_gate(run: Path) -> None:
    """The first step has the initial weights; the second those that the first one's training pass
    led to."""
    rows = metrics(run)
    assert rows[0]["stare/amplify"] == 1.1
    moved = 0.01 if rows[0]["entropy/mean"] < 0.3 else -0.01
    assert rows[1]["stare/amplify"] == pytest.approx(1.1 + moved)


def predicted(run: Path) -> None:
    """The controller acts from before the checkpoint on, so the resumed run still has its fit."""
    rows = metrics(run)
    assert rows[0]["predictive/active"] == 0.0
    assert [row["predictive/active"] for row in rows[11:]] == [1.0, 1.0, 1.0]


def loss_scale(run: Path) -> None:
    rows = metrics(run)
    for half in (rows[:10], rows[10:]):
        assert 0 < sum(row["update/skipped"] for row in half) < 10
    scales = {row["optimizer/loss_scale"] for row in rows[10:]}
    assert len(scales) > 1 and rows[10]["optimizer/loss_scale"] != 2.0**32


def sampled_ahead(run: Path) -> None:
    """Every prompt is trained on once, in its step, whatever had been sampled of it before."""
    rows = metrics(run)
    assert [row["step"] for row in rows] == [*range(1, AHEAD_STEPS + 1)]
    expected = {
        str(step): list(range(4 * step - 4, 4 * step)) for step in range(1, AHEAD_STEPS + 1)
    }
    assert json.loads((run / "cursors.json").read_text()) == expected
    assert {row["staleness/max_age"] for row in rows} >= {0, 1} and all(
        row["staleness/max_age"] <= 2 for row in rows
    )


def rounds(run: Path) -> None:
    rows = metrics(run)
    assert all(row["sampling/rounds"] >= 2 and row["group/degenerate"] == 0 for row in rows)
    assert any(row["sampling/dropped"] > 0 for row in rows)


def cut_responses(run: Path) -> None:
    rows, used = metrics(run), trained_on(run)
    assert len(used) == len(set(used)) == 16
    assert any(row["partial/continued"] > 0 for row in rows)
    assert max(row["staleness/max_age"] for row in rows) > 0
    left = kept(run / "checkpoints/step_000004")
    assert len(left) == 3 and sorted(used + left) == list(range(19))  # none is lost


@dataclass(frozen=True)
class Feature:
    """A run of some steps with a checkpoint after `saved`, and the prompt at which it is killed.

    killed_at: of the whole run's metrics.
    recorded: steps that the killed run has recorded, or None where the clock decides.
    shown: asserts what the whole run, and the resumed one, must show.
    """

    settings: dict[str, Any]
    killed_at: Callable[[Rows], int]
    recorded: int | None
    shown: Callable[[Path], None]
    saved: int = 2
    overrides: tuple[str, ...] = field(default=())


FEATURES = {
    "several_updates": Feature(
        {
            "run.steps": 3,
            "batch.mini_batch_prompts": 2,
            "batch.epochs": 2,
            "statistics.surprisal": "current",
        },
        begun(3),
        2,
        several_updates,
        overrides=("model.reference_refresh_every=2", "algorithm.reference_kl={coef: 0.1}"),
    ),
    "lagged_gate": Feature(
        {"run.steps": 3, "observability.entropy_forecast": "false", "batch.micro_batch_tokens": 64},
        begun(3),
        2,
        lagged_gate,
        overrides=(
            "statistics={surprisal: rollout, gate: lagged, scope: micro_batch}",
            "algorithm={name: stare, entropy_target: 0.3, adaptive: true}",
        ),
    ),
    "predictive": Feature(
        # large steps and batches, so that a dozen measurements show the line
        {"run.steps": 14, "optimizer.lr": 1.5e-3, "batch.samples_per_prompt": 32},
        begun(14),
        13,
        predicted,
        saved=12,
        overrides=(
            "algorithm={name: stare_predictive, entropy_target: 0.3, target_end: 0.5,"
            " ramp_start: 4, ramp_steps: 20}",
        ),
    ),
    "loss_scale": Feature(
        {
            **{"run.steps": 20, "model.dtype": "float16", "model.head": "gradient_in_forward"},
            **{"optimizer.initial_loss_scale": 2.0**32, "optimizer.loss_scale_window": 3},
            **{"optimizer.growth_factor": 2**16, "optimizer.backoff_factor": 2.0**-4},
        },
        begun(13),
        12,
        loss_scale,
        saved=10,
    ),
    "sampled_ahead": Feature(
        {"run.steps": AHEAD_STEPS, "rollout.staleness": 2},
        lambda _: 22,  # of step 6, sampled while step 4 or 5 is trained
        None,
        sampled_ahead,
        overrides=("algorithm.correction={mode: truncate}",),
    ),
    "dynamic_sampling": Feature(
        # of the 4 a step trains on: each has a second round
        {"run.steps": 3, "batch.generate_prompts": 3},
        second_round_of_step_3,
        2,
        rounds,
        saved=1,
    ),
    "partial": Feature(
        # at temperature 2 responses have 5 to 32 tokens; at 1 nearly all have 21
        {"run.steps": 4, "partial.tokens": 8, "partial.prompts": 7, "rollout.temperature": 2},
        lambda _: 17,  # begun in step 4, when three groups of the steps before are kept
        3,
        cut_responses,
        saved=3,
        overrides=("algorithm={name: stare, correction: {mode: truncate}}",),
    ),
}
LONG = {"lagged_gate", "loss_scale", "predictive"}


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each in LONG else ()) for each in FEATURES],
)
def test_killed_and_resumed_is_the_run_that_nobody_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    feature, order = FEATURES[name], tmp_path / "kill"
    settings = {**COMMON, "run.checkpoint_every": feature.saved, **feature.settings}
    monkeypatch.setenv("KILL_AT", str(order))
    done = train(model(), *feature.overrides, "run.dir=whole", cwd=tmp_path, **settings)
    assert (done.returncode, done.stderr) == (0, LOADING)
    whole = metrics(tmp_path / "whole")
    feature.shown(tmp_path / "whole")
    assert name != "lagged_gate" or "warning: statistics.scope=micro_batch" in done.stdout

    order.write_text(str(feature.killed_at(whole)))
    killed = train(model(), *feature.overrides, "run.dir=killed", cwd=tmp_path, **settings)
    assert killed.returncode == -signal.SIGKILL and not order.exists()
    recorded = metrics(tmp_path / "killed")
    if feature.recorded is None:
        assert len(recorded) < len(whole)
    else:
        assert recorded == whole[: feature.recorded]
    last = max((tmp_path / "killed/checkpoints").glob("step_*"))
    if name == "partial":
        assert len(kept(last)) == 3

    resumed = train(
        model(), *feature.overrides, "run.dir=killed", "--resume", cwd=tmp_path, **settings
    )
    assert (resumed.returncode, resumed.stderr) == (0, LOADING)
    assert f"continuing after step {int(last.name.removeprefix('step_'))}" in resumed.stdout
    feature.shown(tmp_path / "killed")
    if feature.recorded is not None:  # else responses are sampled again, by newer weights
        assert metrics(tmp_path / "killed") == whole
        assert trained_on(tmp_path / "killed") == trained_on(tmp_path / "whole")
        want, got = (
            load_file(tmp_path / run / "hf/model.safetensors") for run in ("whole", "killed")
        )
        assert want.keys() == got.keys() and all(
            torch.equal(want[each], got[each]) for each in want
        )
