"""Kills one process of a small run, of any kind and at any time, and leaves the rest to the run:
does it end with the weights that it would have ended with, and is nothing left?

A seed draws the runner, the process (driver, verifier; on Ray also rank, engine, raylet, GCS) and
the time, uniformly over the seconds that the undisturbed run takes, from its start to its end. The
process is killed by SIGKILL then, or as soon as it is there; at the end it may be gone already,
which is recorded as killed nothing. Nobody touches the run afterwards. It must exit with 0, its
policy must have the undisturbed run's SHA-256, its record every step once, and of its processes and
files in /dev/shm none may be left. Local engine, synchronous, one layout a runner.

    python benchmarks/kill_anywhere.py --seeds 20
    python benchmarks/kill_anywhere.py --seeds 20 --first-seed 20  # 20 more; earlier ones stay

Of a run this small most seconds are its start's. With --training it has forty steps, a save every
other one, and the process is killed once a step, drawn uniformly, is in its record, and a drawn
share of a step's seconds later; results then go to benchmarks/results/kill_training.json.

Results are added to benchmarks/results/kill_anywhere.json, seed by seed. Where the package has
changed since, the undisturbed run is made again; where it computes other numbers now, that of
before is kept under `before`: each seed was held against the code that it was killed with.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# the package that is run; the environment may have another's
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # of what a run leaves behind

import psutil
from machine import machine
from support.leftovers import Traces

from megatron_stare.process.recovery import RESTARTS_FILE
from megatron_stare.process.versions import code_digest
from megatron_stare.run_dir.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/kill_anywhere.json"
TRAINING, TRAINING_STEPS = RESULT.with_name("kill_training.json"), 40
LIMIT_S = 600.0
LOOK_S = 0.02  # between two looks for a process that is not there yet

SMALL = {
    "run.steps": 6,
    "run.checkpoint_every": 2,
    "run.dir": "run",
    "model.path": str(ROOT / "assets/tiny-adder"),
    "batch.prompts": 4,
    "batch.samples_per_prompt": 4,
    "eval.prompts": 0,
    "reward.workers": 1,
    "faults.run.back_off_s": 0.1,
    "observability.sinks": "[jsonl, console]",
}
# ranks and engines are told apart by their threads
RANK_THREADS, ENGINE_THREADS = 1, 2
RUNNERS = {
    "inline": {"runtime.runner": "inline", "parallel.tensor": 1, "rollout.threads": 1},
    "ray": {
        "parallel.tensor": 2,
        "runtime.trainer_threads": RANK_THREADS,
        "rollout.threads": ENGINE_THREADS,
    },
}
PROCESSES = {
    "inline": ("driver", "verifier"),
    "ray": ("driver", "rank", "engine", "verifier", "raylet", "gcs"),
}


@dataclass
class Outcome:
    """Outcome of one run; seconds are of the clock, from its start."""

    runner: str
    process: str | None = None  # to be killed
    at_s: float = 0.0  # drawn; after `after` steps, where these are not 0
    after: int = 0
    killed_s: float | None = None  # when it was; None: it was gone already
    step: int = 0  # the last in the record then
    restarts: int = 0
    by: tuple[str, ...] = ()  # who restarted it: driver or supervisor
    code: int | None = None
    sha256: str = ""
    steps: tuple[int, ...] = ()  # in the record
    left: tuple[str, ...] = ()
    seconds: float = 0.0
    step_s: float = 0.0  # of its median step, as it says
    said: str = ""  # its last words, where the code is not 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--runner", choices=[*RUNNERS, "any"], default="any")
    parser.add_argument(
        "--training", action="store_true", help="of a longer run, between its steps and in them"
    )
    parser.add_argument(
        "--out", type=Path, help=f"default: {RESULT.name}, or {TRAINING.name}, beside the others"
    )
    arguments = parser.parse_args()
    arguments.out = arguments.out or (TRAINING if arguments.training else RESULT)
    steps = TRAINING_STEPS if arguments.training else int(SMALL["run.steps"])
    runners = list(RUNNERS) if arguments.runner == "any" else [arguments.runner]
    found = read(arguments.out, steps)
    for runner in runners:
        if found["package"].get(runner) != code_digest():  # it may compute other numbers now
            outcome = run(runner, steps=steps)
            if outcome.code or outcome.left or outcome.restarts:
                sys.exit(f"the undisturbed run: {outcome}")
            before = found["undisturbed"].get(runner)
            # seeds say which policy theirs was
            if before is not None and before["sha256"] != outcome.sha256:
                found.setdefault("before", []).append(before)
            # its seconds, too, are of this code on this machine today
            found["undisturbed"][runner] = asdict(outcome)
            found["package"][runner] = code_digest()
            write(arguments.out, found)
        whole = found["undisturbed"][runner]
        print(
            f"undisturbed, {runner}: {whole['seconds']:.1f} s, policy {whole['sha256'][:12]}",
            flush=True,
        )
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        if str(seed) in found["seeds"]:
            continue
        runner, process, share = draw(seed, runners)
        whole = found["undisturbed"][runner]
        if arguments.training:
            after = random.Random(f"step {seed}").randrange(1, steps)
            outcome = run(runner, process, share * whole["step_s"], after, steps)
        else:
            outcome = run(runner, process, share * whole["seconds"], steps=steps)
        well = not outcome.code and (outcome.sha256, list(outcome.steps)) == (
            whole["sha256"],
            list(whole["steps"]),
        )
        found["seeds"][str(seed)] = asdict(outcome) | {
            "equal": well,
            "share": share,
            "date": time.strftime("%F %T%z"),
        }
        write(arguments.out, found)
        when = "nothing" if outcome.killed_s is None else f"at {outcome.killed_s:.1f} s"
        print(
            f"seed {seed}: {runner}, {process}, killed {when} after step {outcome.step},"
            f" {outcome.restarts} restarts, "
            f"{outcome.seconds:.1f} s:"
            f" {'equal' if well else 'NOT EQUAL'}{', LEFT ' if outcome.left else ''}"
            f"{' '.join(outcome.left)}{outcome.said}",
            flush=True,
        )
    bad = [seed for seed, each in found["seeds"].items() if not each["equal"] or each["left"]]
    print(
        f"{len(found['seeds'])} seeds recorded, {len(bad)} of them not as they must be:"
        f" {' '.join(bad) or 'none'}"
    )
    sys.exit(bool(bad))


def draw(seed: int, runners: list[str]) -> tuple[str, str, float]:
    """Runner, process, and the share of the run's time."""
    drawn = random.Random(seed)
    runner = drawn.choice(runners)
    return runner, drawn.choice(PROCESSES[runner]), drawn.random()


def run(
    runner: str,
    process: str | None = None,
    at_s: float = 0.0,
    after: int = 0,
    steps: int = int(SMALL["run.steps"]),
) -> Outcome:
    """A supervised run of which a process is killed; None: none is.

    Args:
        after: steps that are in its record before; 0: it has been started.
        at_s: seconds from then on.
        steps: of the run.
    """
    outcome, traces = Outcome(runner, process, at_s, after), Traces()
    settings = {**SMALL, **RUNNERS[runner], "run.steps": steps}
    arguments = [
        str(ROOT / "configs/quickstart.yaml"),
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+") as said:
        begun = time.monotonic()
        command = [sys.executable, "-m", "megatron_stare.cli", "train", *arguments, "--supervise"]
        supervisor = subprocess.Popen(
            command,
            cwd=folder,
            env=traces.environment({**os.environ, "PYTHONPATH": str(ROOT)}),
            stdout=subprocess.DEVNULL,
            stderr=said,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            directory = Path(folder) / "run"
            if process is not None:
                while max(recorded(directory), default=0) < after and supervisor.poll() is None:
                    time.sleep(LOOK_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    supervisor.wait(at_s)
                traces.look()
                outcome.killed_s = kill(process, supervisor, begun)
                outcome.step = max(recorded(directory), default=0)
            outcome.code = supervisor.wait(LIMIT_S)
        finally:
            supervisor.kill()
            supervisor.wait()
        outcome.seconds = time.monotonic() - begun
        outcome.left = tuple(traces.left())
        restarts = read_jsonl(directory / RESTARTS_FILE)
        outcome.restarts, outcome.by = len(restarts), tuple(each["by"] for each in restarts)
        outcome.steps = tuple(recorded(directory))
        seconds = [row["time/step_s"] for row in read_jsonl(directory / "metrics.jsonl")]
        outcome.step_s = statistics.median(seconds) if seconds else 0.0
        policy = directory / "hf/model.safetensors"
        outcome.sha256 = hashlib.sha256(policy.read_bytes()).hexdigest() if policy.exists() else ""
        said.seek(0)
        outcome.said = said.read()[-2000:] if outcome.code else ""
    return outcome


def kill(kind: str, supervisor: subprocess.Popen[bytes], begun: float) -> float | None:
    """Kills a process of the run, as soon as there is one of this kind. Seconds from the run's
    start; None: it ended before."""
    while supervisor.poll() is None:
        for process in psutil.Process(supervisor.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if kind == kind_of(process, supervisor.pid):
                    process.kill()
                    return time.monotonic() - begun
        time.sleep(LOOK_S)
    return None


def kind_of(process: psutil.Process, supervisor: int) -> str | None:
    """Which of PROCESSES it is."""
    if process.ppid() == supervisor and "megatron_stare.cli" in process.cmdline():
        return "driver"
    if "megatron_stare.rewards.worker" in process.cmdline():
        return "verifier"
    if process.name() == "raylet":
        return "raylet"
    if process.name() == "gcs_server":
        return "gcs"
    if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Actor"):
        threads = int(process.environ().get("OMP_NUM_THREADS", 0))
        return {RANK_THREADS: "rank", ENGINE_THREADS: "engine"}.get(threads)
    return None


def recorded(directory: Path) -> list[int]:
    """The steps of a run's record, as they stand there."""
    return [int(row["step"]) for row in read_jsonl(directory / "metrics.jsonl")]


def read(path: Path, steps: int) -> dict[str, Any]:
    """Reads the results of earlier runs, or begins empty ones; exits where the file has other
    settings."""
    of_all = {"model.path": "assets/tiny-adder", "run.steps": steps}
    settings = {runner: {**SMALL, **each, **of_all} for runner, each in RUNNERS.items()}
    empty = {
        "machine": machine(),
        "settings": settings,
        "package": {},
        "undisturbed": {},
        "seeds": {},
    }
    if not path.exists():
        return empty
    found: dict[str, Any] = json.loads(path.read_text())
    if found["settings"] != settings:
        sys.exit(f"{path} is of other settings: give another --out, or remove it")
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
