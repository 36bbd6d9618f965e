"""A job near its time limit on a real Slurm of one node: its run is ended, it is requeued, and goes
on with the run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.runs import ROOT
from support.slurm import asked, one_node, reason_against, until

from megatron_stare.process.network import free_port

# Ray: stays until it is ended, and says that one node has joined. A run: stays until it is to save;
# resumed, it ends
PYTHON = """#!/usr/bin/env bash
here="$(dirname "$0")"
case "$*" in
*"ray.scripts.scripts start"*) exec sleep 600 ;;
-c*) echo 1 ;;
*train*)
    case "$*" in *--resume*) echo resumed >>"$here/said"; exit 0 ;; esac
    for word in "$@"; do case "$word" in run.dir=*) folder="${word#run.dir=}" ;; esac; done
    mkdir -p "$folder"
    touch "$folder/config.yaml"
    echo "began in $folder" >>"$here/said"
    trap 'echo closed >>"$here/said"; exit 75' USR1
    while true; do sleep 0.2; done
    ;;
esac
"""


@pytest.mark.slow
def test_a_job_is_requeued_at_its_time_limit_and_goes_on(tmp_path: Path) -> None:
    """The scripts and Slurm are real, Ray and training are not: what they do is in
    test_launch_for_real.py."""
    if reason := reason_against():
        pytest.skip(reason)
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(PYTHON)
    python.chmod(0o755)
    ports = free_port("127.0.0.1", (0,)), free_port("127.0.0.1", (0,))
    with one_node(tmp_path / "slurm", ports) as slurm:
        sizes = {
            "NODES": "1",
            "GPUS_PER_NODE": "0",
            "CPUS_PER_NODE": "1",
            "TIME": "00:01:00",
            "GRACE_S": "55",
        }
        environment = {**os.environ, **slurm, **sizes, "PYTHON": str(python), "WORK": str(tmp_path)}
        command = ["bash", ROOT / "scripts/slurm_submit.sh", "gtpo_qwen2.5_7b"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        job = done.stdout.split()[-1]

        def shown(word: str) -> bool:
            return word in asked(environment, "scontrol", "show", "job", job)

        try:
            until(
                lambda: shown("Restarts=1") and shown("JobState=PENDING"), "the requeued job", 150
            )
            # Slurm lets two minutes pass before it starts a requeued job
            asked(environment, "scontrol", "update", f"jobid={job}", "StartTime=now")
            until(lambda: shown("JobState=COMPLETED"), "the job's end", 100)
        finally:
            asked(environment, "scancel", job)
    folder = tmp_path / f"runs/gtpo_qwen2.5_7b-{job}"
    assert said.read_text().splitlines() == [f"began in {folder}", "closed", "resumed"]
    log = (tmp_path / f"slurm-{job}.log").read_text()
    assert (
        "requeued; the job resumes from the newest checkpoint" in log
        and f"start 2 of job {job} on 1 nodes" in log
    )
