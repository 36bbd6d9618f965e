"""Runs whose engines sample ahead of training, or until enough groups differ: what is equal, and
what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import metrics, model, train

INLINE = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 8,
    "eval.greedy": "false",
}


def same_numbers(a: Path, b: Path) -> None:
    """In every metric that both have and that no clock moves, in every evaluation, and in the
    weights at the end."""
    one, other = (
        [{k: v for k, v in step.items() if "staleness/" not in k} for step in metrics(run)]
        for run in (a, b)
    )
    assert one == other
    evaluated = [
        [
            {k: v for k, v in json.loads(line).items() if "time" not in k}
            for line in (run / "eval.jsonl").open()
        ]
        for run in (a, b)
    ]
    assert evaluated[0] == evaluated[1] != []
    want, got = (load_file(run / "hf/model.safetensors") for run in (a, b))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.wide
@pytest.mark.parametrize(
    "runner",
    [
        pytest.param(INLINE, id="inline"),
        pytest.param(
            {**INLINE, "runtime.runner": "ray", "parallel.tensor": 2},
            id="ray",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_thirty_steps_at_a_bound_of_0_are_the_synchronous_ones(
    tmp_path: Path, runner: dict[str, object]
) -> None:
    settings = {**runner, "run.steps": 30, "eval.every": 10, "run.checkpoint_every": 7}
    for staleness in ("null", "0"):
        done = train(
            model(),
            f"rollout.staleness={staleness}",
            f"run.dir=at_{staleness}",
            cwd=tmp_path,
            **settings,
        )
        assert done.returncode == 0, done.stderr
    same_numbers(tmp_path / "at_null", tmp_path / "at_0")
    assert all(step["staleness/max_age"] == 0 for step in metrics(tmp_path / "at_0"))


@pytest.mark.wide
def test_what_staleness_does_not_go_with(tmp_path: Path) -> None:
    done = train(model(), "rollout.staleness=1", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "rollout.staleness: tokens may be sampled by weights that are 1 steps old" in done.stderr
    done = train(
        model(),
        "rollout.staleness=0",
        "rollout.engine=sglang",
        "sglang.colocated=true",
        "--dry-run",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "cannot sample ahead of it" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.wide
def test_rounds_that_cannot_fill_a_step_are_refused(tmp_path: Path) -> None:
    done = train(
        model(), "batch.generate_prompts=1", "batch.max_rounds=3", "--dry-run", cwd=tmp_path
    )
    assert done.returncode == 2
    assert (
        "batch.generate_prompts: 3 rounds of 1 prompt groups cannot give the step's 4"
        in done.stderr
    )
    assert "at least 2" in done.stderr
