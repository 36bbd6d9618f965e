"""Runs that do not do what their configuration says, and a command that has to name why.

Each fault but one is planted into a real run from outside, so that its configuration knows nothing
of it, and is gone when the command makes the steps again. The last one is in the code that the
configuration names, and stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import ROOT, SMALL, model

from megatron_stare.algorithms import clip_cov
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.stare import Stare
from megatron_stare.cli import main
from megatron_stare.config.load import load_config
from megatron_stare.rollout.agreement.limits import LARGEST
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.train import train

FIRST, LAST = 4, 10
SETTINGS = {
    **SMALL,
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "run.steps": 12,  # more than are made again: schedules are the run's
    "run.checkpoint_every": FIRST,
    "run.keep_checkpoints": 5,
    "batch.samples_per_prompt": 4,
    "batch.micro_batch_tokens": 96,
    "eval.prompts": 0,
    "optimizer.lr": 1e-3,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 0,
    "observability.sinks": "[jsonl]",
    "faults.hangs.enabled": "false",
}
# it always is
OPEN = "algorithm={name: stare, variant: C2, amplify: 2.0, attenuate: 0.3, entropy_target: 100.0}"
CORRECTED = (
    "algorithm={name: stare, entropy_target: null, correction: {mode: truncate, high: 1.05}}"
)
DRAWN = "algorithm={name: clip_cov, share: 0.2, cov_low: 0.0, cov_high: 100.0}"
CUT = (
    "partial={tokens: 8, prompts: 7}",
    "rollout.temperature=1.5",
)  # so that tokens of older weights are trained on, which are corrected


def stuck_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps STARE's gate closed, as if the entropy had not reached the target."""
    sound = Stare.control

    def control(self: Stare, state: Any, statistics: Any) -> Any:
        return {**sound(self, state, statistics), "gate": torch.zeros((), dtype=torch.float64)}

    monkeypatch.setattr(Stare, "control", control)


def lost_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are computed and thrown away."""
    sound = Correction.weights
    monkeypatch.setattr(
        Correction, "weights", lambda self, *args: torch.ones_like(sound(self, *args))
    )


def stale_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update reaches the engine, is proven, and takes effect an update too late; in a run
    whose limits let such a difference pass, as those of 16 bits may."""
    monkeypatch.setitem(LARGEST, "float32", 10.0)
    held: dict[int, list[torch.Tensor]] = {}
    begin, collect = LocalEngine.begin_weight_update, LocalEngine.collect

    def late_begin(self: Any, version: int, prove: bool = True) -> None:
        if version > 0:
            held[id(self)] = [parameter.detach().clone() for parameter in self._model.parameters()]
        begin(self, version, prove)

    def late_collect(self: Any, wait_s: float) -> Any:
        parameters = list(self._model.parameters())
        newest = [parameter.detach().clone() for parameter in parameters]
        for parameter, old in zip(parameters, held.get(id(self), newest), strict=True):
            parameter.copy_(old)
        try:
            return collect(self, wait_s)
        finally:
            for parameter, new in zip(parameters, newest, strict=True):
                parameter.copy_(new)

    monkeypatch.setattr(LocalEngine, "begin_weight_update", late_begin)
    monkeypatch.setattr(LocalEngine, "collect", late_collect)


def draw_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's number in a draw is where it lies among those at hand, which the layout decides."""
    sound = clip_cov.uniform
    monkeypatch.setattr(
        clip_cov, "uniform", lambda seed, step, index: sound(seed, step, torch.arange(len(index)))
    )


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run as it should be."""


def recorded(where: Path, *overrides: str) -> Path:
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    config = load_config(
        ROOT / "configs/quickstart.yaml", [*settings, model(), f"run.dir={where}", *overrides]
    )
    return train(config)


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash of every file's contents, and the time at which it was written last."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in files
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "overrides", "cause", "change"),
    [
        (nothing, (OPEN,), "", ""),
        (stuck_gate, (OPEN,), "gate", "gate-closed"),
        (lost_correction, (CORRECTED, *CUT), "correction", "correction-off"),
        (stale_weights, (OPEN,), "staleness", "weights-late"),
        (draw_by_place, (DRAWN,), "layout", "draws-by-place"),
        (
            nothing,
            (DRAWN.replace("clip_cov", "support.placed_draws.PlacedDraws"),),
            "layout",
            "micro-batches",
        ),
    ],
    ids=["clean", "gate", "correction", "stale", "draw", "own-code"],
)
def test_the_planted_cause_is_named_and_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plant: Callable[[pytest.MonkeyPatch], None],
    overrides: tuple[str, ...],
    cause: str,
    change: str,
) -> None:
    with monkeypatch.context() as planted:
        plant(planted)
        run = recorded(tmp_path / "run", *overrides)
    before = contents(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    code = main(["bisect", str(run), "--from", str(FIRST), "--to", str(LAST)])
    shown = capsys.readouterr()
    print(shown.out)  # where a test fails, this is what one wants to see
    place = tmp_path / f"bisects/run-{FIRST}-{LAST}"
    found = json.loads((place / "findings.json").read_text())
    assert (found["cause"], found["change"]) == (cause, change)
    # the code at hand, which made the record where nothing was planted
    sound = plant is not nothing
    assert code == (1 if cause else 0) and found["reproduced"] != sound
    lines = {line["name"]: line for line in found["lines"]}
    assert not any(line["failed"] for line in lines.values())
    assert [name for name, line in lines.items() if line["breaks"]] == (
        [change] if cause and not sound else []
    )
    assert contents(run) == before
    if not sound:
        assert lines["unchanged"]["equal"] == LAST - FIRST
    else:
        assert lines["unchanged"]["equal"] < LAST - FIRST
    if not cause:
        assert lines["gate-closed"]["equal"] < LAST - FIRST  # it would be seen
    if cause in ("gate", "correction") or change == "draws-by-place":
        assert lines[change]["equal"] == LAST - FIRST  # bit for bit the record
    (left_out,) = (each["cause"] for each in found["left_out"]) if cause == "correction" else ("",)
    assert left_out in ("", "gate")
