"""Kills runs whose policy calls tools, at any time, and continues them: is every answered call made
once, and does training end as if nothing had happened?

A seed draws the mode and a time, uniform over most of an undisturbed run; every third seed draws a
second time, of the continued run. All processes of the run are killed then, and it is continued as
scripts/launch.sh does. A log that no run reads counts the calls.

    python benchmarks/killed_calls.py --mode synchronous --seeds 100
    python benchmarks/killed_calls.py --mode partial --seeds 100
    python benchmarks/killed_calls.py --mode stale --seeds 50      # staleness 1

synchronous, partial: weights and every metric that is no clock equal those of the undisturbed run.
stale: each step once, every prompt trained once, and no token older than a step. All modes: only a
call that was in flight at a kill is made again, under the id it had. Each run is a fork of this
script. Results are added to benchmarks/results/killed_calls.json, seed by seed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# the package that is run; the environment may have another's
sys.path.insert(0, str(Path(__file__).parents[1]))
# the runs and their tool are those of a test
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/environments"))

from machine import machine
from support.runs import SMALL, metrics
from test_tool_training import LAYOUT, answered, logged, settings

import megatron_stare.driver.session  # noqa: F401  # what a run imports as it starts
from megatron_stare.cli import main as command_line
from megatron_stare.process.versions import code_digest

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/killed_calls.json"
LIMIT_S = 300.0
CALL_S = 0.5  # of every call, so that kills find some in flight
BEFORE = 0.9  # of an undisturbed run: a kill is drawn before it, to come before the end
MODES = ("synchronous", "partial", "stale")
STALE = {"rollout.staleness": 1, "algorithm.correction": "{mode: truncate}"}


class Run:
    """A run of a mode in a folder, which may be killed and continued."""

    def __init__(self, folder: Path, mode: str, name: str) -> None:
        self.dir, self.log, self._folder = folder / name, folder / f"{name}.log", folder
        given = settings(folder, partial=mode == "partial")
        given |= {"run.dir": self.dir, **(STALE if mode == "stale" else {})}
        words = [f"{key}={value}" for key, value in {**SMALL, **given}.items()]
        self._words = ["train", str(ROOT / "configs/quickstart.yaml"), *words, *LAYOUT]
        self.log.touch()

    def until(self, seconds: float | None) -> bool:
        """Starts or continues the run, and kills it after some seconds; None: never. Returns
        whether it came to its end before. Raises RuntimeError if it failed."""
        resume = ["--resume"] if (self.dir / "config.yaml").exists() else []
        pid = os.fork()
        if not pid:
            self._train([*self._words, *resume])
        end = time.monotonic() + (LIMIT_S if seconds is None else seconds)
        while time.monotonic() < end:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                if code := os.waitstatus_to_exitcode(status):
                    said = self.log.with_suffix(".said").read_text()[-3000:]
                    raise RuntimeError(f"the run ended with {code}: {said}")
                return True
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if seconds is None:
            raise RuntimeError(f"the run took over {LIMIT_S:.0f} s")
        return False

    def _train(self, words: list[str]) -> None:
        code = 1
        try:
            os.setsid()
            said = os.open(self.log.with_suffix(".said"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.chdir(self._folder)
            os.environ |= {"TOOL_LOG": str(self.log), "KILL_AT": str(self._folder / "never")}
            os.environ["CALL_SECONDS"] = str(CALL_S)
            code = command_line(words)
            sys.stdout.flush()
        finally:
            os._exit(code)

    def found(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns the checksum of the policy, and the metrics that are no clock."""
        rows = [
            {key: value for key, value in row.items() if not key.startswith("tools/seconds")}
            for row in metrics(self.dir)
        ]
        policy = (self.dir / "hf/model.safetensors").read_bytes()
        return hashlib.sha256(policy).hexdigest(), rows

    def prompts(self) -> list[int]:
        """Returns the cursor of every prompt that a step trained on, step by step."""
        found = []
        for row in metrics(self.dir):
            lines = (self.dir / f"rollouts/step_{row['step']:06d}.jsonl").read_text().splitlines()
            found += sorted({json.loads(line)["cursor"] for line in lines})
        return found


def judged(mode: str, whole: Run, times: list[float], folder: Path, number: int) -> dict[str, Any]:
    """Kills a run at these times, continues it to its end, and returns what is wrong with it."""
    run, in_flight, faults, kills = Run(folder, mode, f"run{number}"), set[str](), [], 0
    for seconds in times:
        if run.until(seconds):
            break
        kills += 1
        known = answered(run.dir) if (run.dir / "calls").exists() else set()
        in_flight |= set(logged(run.log)) - known
    else:
        run.until(None)
    made = Counter(logged(run.log))
    twice = {call for call, count in made.items() if count > 1}
    if not twice <= in_flight:
        faults.append(f"{len(twice - in_flight)} answered calls were made again")
    if made and max(made.values()) > 1 + kills:
        faults.append(f"a call was made {max(made.values())} times with {kills} kills")
    if mode == "stale":
        rows, prompts = metrics(run.dir), run.prompts()
        if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
            faults.append("the steps are not each there once")
        if len(set(prompts)) < len(prompts) or len(prompts) != len(whole.prompts()):
            faults.append(f"prompts were trained on: {prompts}")
        if (oldest := max(row["staleness/max_age"] for row in rows)) > 1:
            faults.append(f"a token was {oldest:.0f} steps old")
    elif run.found() != whole.found():
        faults.append("weights or metrics differ from the undisturbed run's")
    return {
        "mode": mode,
        "killed_at_s": [round(each, 2) for each in times],
        "kills": kills,
        "calls": len(made),
        "in_flight": len(in_flight),
        "made_again": len(twice),
        "faults": faults,
        "package": code_digest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    mode, out = arguments.mode, arguments.out
    with tempfile.TemporaryDirectory() as place:
        whole = Run(Path(place), mode, "undisturbed")
        begun = time.monotonic()
        whole.until(None)
        took = time.monotonic() - begun
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            name = f"{mode} {seed}"
            if out.exists() and name in json.loads(out.read_text())["seeds"]:
                continue
            drawn = random.Random(seed)
            times = [drawn.uniform(0, BEFORE * took) for _ in range(1 + (seed % 3 == 0))]
            try:
                found = judged(mode, whole, times, Path(place), seed)
            except RuntimeError as error:
                found = {"mode": mode, "killed_at_s": times, "faults": [str(error)]}
            print(f"{name}: {found}", flush=True)
            _add(out, name, found)
    found = [each for each in json.loads(out.read_text())["seeds"].values() if each["mode"] == mode]
    killed = [each for each in found if each.get("kills") != 0]  # the others had ended before
    print(f"{sum(not each['faults'] for each in killed)} of {len(killed)} killed as undisturbed")
    return int(any(each["faults"] for each in found))


def _add(out: Path, name: str, found: dict[str, Any]) -> None:
    """Adds a seed to the results, which another process may add to as well."""
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = json.loads(out.read_text()) if out.exists() else {"machine": machine(), "seeds": {}}
        told["seeds"][name] = found
        out.write_text(json.dumps(told, indent=1) + "\n")
    out.with_suffix(".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
