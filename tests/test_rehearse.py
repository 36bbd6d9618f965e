"""A rehearsal of a recipe's launch: on paper for every size, and with real processes on two nodes
that share neither address, host name, /dev/shm nor /tmp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import sglang_servers as servers
from support.runs import ROOT

SCRIPT = ["bash", str(ROOT / "scripts/rehearse.sh")]


def rehearsed(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "SGLANG_PYTHON": servers.PYTHON}
    return subprocess.run(
        [*SCRIPT, *words], env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.wide
def test_on_paper_every_server_has_its_command_line_at_its_own_node() -> None:
    done = rehearsed("short_cot_qwen2.5_32b", "--nodes", "16", "--paper", "--sync", "tensor")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " server " in line]
    assert (
        len(lines) == 32 == len({(w[0], w[w.index("--port") + 1]) for w in map(str.split, lines)})
    )
    for words in map(str.split, lines):
        assert words[words.index("--host") + 1] == words[0] and words[3] == "4"  # senders
    assert "ranks 120 to 127, 2 servers" in done.stdout


@pytest.mark.wide
def test_on_paper_with_another_layout() -> None:
    layout = ("parallel.pipeline=2", "parallel.tensor=2", "sglang.tensor_parallel=4")
    words = ("short_cot_qwen2.5_14b", "--paper", "--sync", "tensor", "--set", *layout)
    done = rehearsed(*words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " server " in line]
    assert len(lines) == 4 and all("--tp-size 4" in line and "4 senders" in line for line in lines)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no_such_recipe",), "invalid choice"),
        (("short_cot_qwen2.5_32b", "--paper", "--set", "parallel.tensr=2"), "mean 'tensor'"),
        (("short_cot_qwen2.5_32b", "--paper", "--nodes", "0"), "at least 1"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(words: tuple[str, ...], said: str) -> None:
    done = rehearsed(*words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
@pytest.mark.parametrize(
    ("recipe", "sync"),
    [
        ("long_cot_r1_distill_1.5b", "tensor"),
        ("short_cot_qwen2.5_math_7b", "tensor"),
        ("short_cot_qwen2.5_math_7b", "disk"),
        ("short_cot_qwen2.5_math_7b", "distributed"),
        # servers of two GPUs
        ("short_cot_qwen2.5_14b", "tensor"),
        # 16 processes; with servers on the trainer's GPUs 32, for which 24 GiB are not enough
        ("short_cot_qwen2.5_32b", "distributed"),
    ],
)
def test_a_recipe_trains_through_a_killed_server_a_time_limit_and_a_killed_node(
    recipe: str, sync: str, tmp_path: Path
) -> None:
    """By the job script, run_recipe.sh and ray_up.sh, as on a cluster of two nodes."""
    out = tmp_path / "told.json"
    words = (recipe, "--sync", sync, "--out", str(out))
    done = rehearsed(*words, timeout=3000)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    (told,) = json.loads(out.read_text())["real"]
    assert told["steps"] == 10 and told["starts"] == 3 and told["agreement_max"] <= 1e-4
    assert [each.partition(": ")[2] for each in told["events"]] == [
        "a server is killed",
        "the time limit nears",
        "a node is killed",
    ]
