"""A run whose verifier misbehaves ends as soon as it must, and says where."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import model, train

VERIFIER = """
import threading

def verify(response, answer):
    with open("asked", "a") as file:
        file.write("x")
        first = file.tell() == 1
    if first:
        raise ValueError("no such unit: furlong")
    threading.Event().wait()
"""


@pytest.mark.wide
def test_a_verifier_that_crashes_and_hangs_stops_the_run_once_the_limit_is_passed(
    tmp_path: Path,
) -> None:
    """1 of 16 answers may fail; the second that does is the last that is tried."""
    (tmp_path / "mine.py").write_text(VERIFIER)
    alone = {"runtime.runner": "inline", "parallel.tensor": 1, "eval.prompts": 0}
    strict = {"reward.verifier": "mine.verify", "reward.workers": 1, "reward.timeout_s": 1}
    done = train(
        model(),
        f"run.dir={tmp_path / 'run'}",
        "reward.max_failure_rate=0.1",
        cwd=tmp_path,
        **alone,
        **strict,
    )
    assert done.returncode == 2
    assert (tmp_path / "asked").read_text() == "xx"
    assert (
        "2 of 16 answers could not be verified, the limit is 10% and 14 more were not waited for;"
        f" the first: crash ValueError: no such unit: furlong ({tmp_path / 'mine.py'}:9, in verify)"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
