"""Output of workers is kept in files of the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_stare.process.output import FOLDER, carried_output, kept_output, leave_tail

WORKER = """
import os, subprocess, sys
from megatron_stare.process.output import keep_own_output
print("before")
print(keep_own_output("training ranks 3"))
print("printed")
print("complained", file=sys.stderr)
sys.stdout.flush()
subprocess.run(["sh", "-c", "echo by a child; echo and its stderr >&2"])
os.abort()
"""


def worker() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True)


def test_a_worker_and_what_it_starts_append_to_one_file(tmp_path: Path) -> None:
    with kept_output(tmp_path / "logs"):
        ended = [worker(), worker()]
    assert FOLDER not in carried_output()
    assert [each.stdout for each in ended] == ["before\n"] * 2 and not ended[0].stderr
    (file,) = (tmp_path / "logs").iterdir()
    assert file.name == "training_ranks_3.log"
    lines = file.read_text().splitlines()
    assert [line for line in lines if line.startswith("--- training ranks 3: process ")] == [
        lines[0],
        lines[len(lines) // 2],
    ]
    for said in ("printed", "complained", "by a child", "and its stderr"):
        assert lines.count(said) == 2
    assert "before" not in lines


def test_a_folder_that_cannot_be_written_leaves_the_output_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with kept_output(tmp_path / "file" / "logs"):
        assert worker().stdout.splitlines()[:3] == ["before", "None", "printed"]
    assert worker().stdout.splitlines()[1] == "None"  # nobody keeps anything


def test_the_end_of_a_servers_log_is_left(tmp_path: Path) -> None:
    leave_tail("server http://10.0.0.1:3000", "nobody keeps it")
    with kept_output(tmp_path / "logs"):
        leave_tail("server http://10.0.0.1:3000", "first " + "x" * (1 << 20) + " last words")
    (file,) = (tmp_path / "logs").iterdir()
    assert file.name == "server_http_10_0_0_1_3000.log"
    assert file.stat().st_size == 200_000 and file.read_text().endswith(" last words")
