"""Held-out evaluations run when they are due and not recorded, and the record is read once."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_stare.driver.parts import HeldOut
from megatron_stare.run_dir import run_files


def test_the_record_of_evaluations_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"step": 0}, {"step": 5, "task": "b"}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read: list[Path] = []
    read_jsonl = run_files.read_jsonl

    def reading(path: Path) -> list[dict[str, Any]]:
        read.append(path)
        return read_jsonl(path)

    monkeypatch.setattr(run_files, "read_jsonl", reading)
    made: list[tuple[int, str | None]] = []

    def evaluate(evaluation: Any, step: int, *_: Any) -> Any:
        made.append((step, evaluation.task.name))
        return SimpleNamespace(record={})

    state: Any = SimpleNamespace(step=0)
    parts: dict[str, Any] = {
        "config": SimpleNamespace(eval=SimpleNamespace(every=5), run=SimpleNamespace(steps=12)),
        "evaluations": [SimpleNamespace(task=SimpleNamespace(name=each)) for each in (None, "b")],
        "run_dir": SimpleNamespace(path=tmp_path),
        "monitor": SimpleNamespace(evaluation=lambda record: None),
        "samples": SimpleNamespace(version=0, quiet=nullcontext),
        "training": SimpleNamespace(evaluate=evaluate),
    }
    held_out = HeldOut(
        state=state,
        phase=lambda name: nullcontext(),
        own=None,
        weights=lambda: None,  # type: ignore[arg-type, return-value]
        synced=lambda: None,
        looking=nullcontext,
        progress=lambda done, of: None,
        **parts,
    )
    for state.step in (0, 0, 4, 5, 10, 12, 12):
        held_out.after_step()
    assert made == [(0, "b"), (5, None), (10, None), (10, "b"), (12, None), (12, "b")]
    assert read == [tmp_path / "eval.jsonl"]
