"""A launch script's run, for real and on CPUs: the 7B recipe on a tiny model of the same
architecture, by variables."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.cluster import FAKE, Nodes, simulated
from support.runs import ROOT, metrics

from megatron_stare.data.arithmetic import draw_problem

SCRIPT = [ROOT / "scripts/run_recipe.sh", "short_cot_qwen2.5_math_7b"]


UP = ROOT / "scripts/ray_up.sh"


def sums(count: int) -> str:
    """Problems that the tiny model was made for, as JSON lines."""
    problems = [draw_problem(1, "train", index) for index in range(count)]
    return "".join(
        json.dumps({"prompt": each.text, "answer": each.answer}) + "\n" for each in problems
    )


def variables(work: Path, run: str = "run", settings: str = "") -> dict[str, str]:
    """Variables of the script that make the recipe small: two ranks of a tiny model."""
    (work / "data").mkdir(exist_ok=True)
    (work / "data/sums.jsonl").write_text(sums(64))
    return {
        "MODEL": str(ROOT / "assets/tiny-adder"),
        "DATA": "data/sums.jsonl",
        "EVALUATE": "0",
        "ENGINE": "local",
        "DEVICE": "cpu",
        "TENSOR": "1",
        "DATA_PARALLEL": "2",
        "ENGINES": "1",
        "DTYPE": "float32",
        "PROMPTS": "4",
        "GENERATE_PROMPTS": "8",
        "SAMPLES": "4",
        "MAX_PROMPT_TOKENS": "16",
        "MAX_NEW_TOKENS": "32",
        "MICRO_BATCH_TOKENS": "1024",
        "GPU_RESOURCE": FAKE,
        "INTERFACE": "lo",
        "WORK": str(work),
        "RUN_DIR": str(work / run),
        "PYTHON": sys.executable,
        "SETTINGS": (
            "data.chat_template=false data.template=null reward.verifier=arithmetic"
            f" reward.workers=1 runtime.object_store_mb=128 {settings}"
        ),
    }


@pytest.mark.slow
@pytest.mark.distributed
def test_the_7b_script_trains_on_two_simulated_nodes_and_goes_on(tmp_path: Path) -> None:
    """Two ranks, a node each, and then one step more: the same command goes on where its run
    stopped."""
    with simulated(2, 1) as nodes:
        for steps in ("2", "3"):
            environment = {
                **os.environ,
                **variables(tmp_path),
                "STEPS": steps,
                "RAY_ADDRESS": nodes.address,
            }
            done = subprocess.run(
                ["bash", *SCRIPT], env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]
    placed = (tmp_path / "run/placement.txt").read_text().splitlines()
    assert placed[0].startswith("placement: 2 GPUs of 2 nodes")
    assert len((tmp_path / "run/starts.jsonl").read_text().splitlines()) == 2


@contextlib.contextmanager
def joining(nodes: Nodes) -> Iterator[psutil.Process]:
    """One node more, by the script that starts nodes; what it starts are its children."""
    head, _, port = nodes.address.rpartition(":")
    settings = {
        "HEAD": head,
        "NODE_IP": head,
        "RAY_PORT": port,
        "CPUS": "1",
        "GPUS": "1",
        "BLOCK": "1",
    }
    here = {**os.environ, **settings, "RESOURCES": json.dumps({FAKE: 1}), "PYTHON": sys.executable}
    started = subprocess.Popen(
        ["bash", str(UP)], env=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    node = psutil.Process(started.pid)
    try:
        there = {
            **os.environ,
            "HEAD": head,
            "RAY_PORT": port,
            "WAIT_NODES": "3",
            "PYTHON": sys.executable,
        }
        subprocess.run(["bash", str(UP)], env=there, check=True, timeout=120)
        yield node
    finally:
        killed(node)
        started.wait()


def killed(node: psutil.Process) -> None:
    """The node's agent with everything that runs on it, at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*node.children(recursive=True), node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def policy(run: Path) -> str:
    return hashlib.sha256((run / "hf/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_node_is_killed_in_mid_run_comes_back_and_the_run_ends_as_undisturbed(
    tmp_path: Path,
) -> None:
    """A rank's node is killed with everything on it once step 3 is made, whose checkpoint is that
    of step 2, and starts again when the run says that it waits for it. Nobody touches the run,
    which ends with the undisturbed run's policy, bit for bit, and every step once in its record."""
    settings = (
        "run.checkpoint_every=2 checkpoint.background=false faults.run.back_off_s=0.1"
        " rollout.threads=1"
    )
    with simulated(1, 1) as nodes:
        here = {**os.environ, "STEPS": "6", "RAY_ADDRESS": nodes.address, "PYTHONUNBUFFERED": "1"}
        command = ["bash", *map(str, SCRIPT)]
        with joining(nodes):
            environment = {**here, **variables(tmp_path, "whole", settings)}
            whole = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300
            )
            assert whole.returncode == 0, whole.stdout + whole.stderr
        with contextlib.ExitStack() as second:
            node = second.enter_context(joining(nodes))
            environment = {**here, **variables(tmp_path, "cut", settings)}
            with subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as run:
                assert run.stdout is not None
                said, waits = [], False
                for line in run.stdout:
                    said.append(line)
                    if line.lstrip().startswith("step 3/6") and node.is_running():
                        killed(node)
                    if line.startswith("waiting up to") and not waits:
                        waits = True
                        second.pop_all().close()
                        second.enter_context(joining(nodes))
                assert run.wait() == 0, "".join(said)
    assert policy(tmp_path / "cut") == policy(tmp_path / "whole")
    assert [row["step"] for row in metrics(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]
    lost = [json.loads(line) for line in (tmp_path / "cut/restarts.jsonl").read_text().splitlines()]
    assert lost and lost[0]["by"] == "driver" and lost[0]["step"] == 3
    assert waits, "".join(said)
    before, after = ((tmp_path / run / "placement.txt").read_text() for run in ("whole", "cut"))
    assert "2 GPUs of 2 nodes" in before and "2 GPUs of 2 nodes" in after


@pytest.mark.slow
@pytest.mark.distributed
def test_a_cluster_comes_up_though_its_user_has_a_token_of_ray(tmp_path: Path) -> None:
    """A run that starts Ray itself leaves one, for which `ray start --head` asks from then on. A
    head that a user starts so can be joined, too."""
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text("0123456789abcdef" * 4)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    scratch = Path(tempfile.mkdtemp(prefix="ms-ray-", dir="/tmp"))  # short: Ray keeps sockets in it
    here = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    here |= {"HOME": str(home), "RAY_PORT": port, "PYTHON": sys.executable, "CPUS": "1"}
    by_hand = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    by_hand += [f"--port={port}", "--num-cpus=1", f"--temp-dir={scratch}"]
    joins = (
        "import sys\nfrom megatron_stare.cluster import ray as ours\n"
        "from megatron_stare.config.schema import Config\n"
        "ours.start_ray(Config.model_validate({'model': {'path': 'm'},"
        " 'runtime': {'ray_address': sys.argv[1]}}))\n"
        # joining is not enough: calls of the cluster to the driver must be taken, too
        "workers = ours.start_actors([{}], 1, 'rank', 60.0)\n"
        "print(len(workers.wait(workers.everywhere('host', None))), 'actor')\nworkers.close()"
    )
    try:
        for command, more in (
            (["bash", str(UP)], {"BLOCK": "1", "RAY_TMP": str(scratch), "NODE_IP": "127.0.0.1"}),
            ([*by_hand, "--node-ip-address=127.0.0.1"], {}),
        ):
            head = subprocess.Popen(command, env=here | more, stdout=subprocess.DEVNULL)
            try:
                if more:
                    there = here | {"HEAD": "127.0.0.1", "WAIT_NODES": "1", "WAIT_S": "90"}
                    subprocess.run(["bash", str(UP)], env=there, check=True, timeout=150)
                else:
                    until_it_listens(int(port), head)
                joined = subprocess.run(
                    [sys.executable, "-c", joins, f"127.0.0.1:{port}"],
                    env=here | {"PYTHONPATH": str(ROOT)},
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                assert joined.stdout == "1 actor\n", joined.stderr
            finally:
                killed(psutil.Process(head.pid))
                head.wait()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def until_it_listens(port: int, head: subprocess.Popen) -> None:
    while head.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
    raise AssertionError("Ray has ended")
