"""Signals a small run at any time, as a scheduler or a person does: is it closed in order, and in two lines?

A seed draws the signal (SIGINT, SIGTERM, SIGUSR1) and the time, uniformly from where the run takes signals to a second
after its first step. It must end with the code of docs/checkpoints.md, say on stderr that the signal came, where it
stopped and what to type, and nothing else: no warning and no traceback of what was interrupted. None of its processes
and of its files in /dev/shm may be left. In one process, of the local engine; each run is a fork of this script, which
has imported the package once.

    python benchmarks/signal_anywhere.py --seeds 20
    python benchmarks/signal_anywhere.py --seeds 20 --first-seed 20        # goes on; what is recorded is left

Results are added to benchmarks/results/signal_anywhere.json, seed by seed, each with the code that it was run with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is run; the environment may have another's
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # of what a run leaves behind

from machine import machine
from support.leftovers import Traces

import megatron_stare.driver.session  # noqa: F401  # what a run imports as it starts
from megatron_stare.cli import main as command_line
from megatron_stare.process.interruption import AFTER_STEP, SIGNALS, TO_BE_CONTINUED
from megatron_stare.process.versions import code_digest

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/signal_anywhere.json"
LIMIT_S = 120.0
LOOK_S = 0.005
AFTER_S = 1.0  # of training that signals may come in

SETTINGS = {
    "run.steps": 1000,
    "run.checkpoint_every": 0,
    "run.dir": "run",
    "model.path": str(ROOT / "assets/tiny-adder"),
    "batch.prompts": 4,
    "batch.samples_per_prompt": 4,
    "eval.prompts": 0,
    "rollout.threads": 1,
    "runtime.runner": "inline",
    "parallel.tensor": 1,
}
COMMAND = ["train", str(ROOT / "configs/quickstart.yaml"), *(f"{key}={value}" for key, value in SETTINGS.items())]


class Run:
    """One run, in a process of its own and a new folder."""

    def __init__(self, folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        self._traces = Traces()
        self.pid = os.fork()
        if not self.pid:
            self._train(folder)
        self.wait_for(self._takes_signals)

    def _train(self, folder: Path) -> None:
        code = 1
        try:
            for file, number in ((self._out, 1), (self._err, 2)):
                os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
            os.chdir(folder)
            os.environ.update(self._traces.environment({}))
            for number in SIGNALS:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            code = command_line(COMMAND)
            sys.stdout.flush()
        finally:
            os._exit(code)

    def _takes_signals(self) -> bool:
        """The mask of signals that the process has handlers for; see proc_pid_status(5)."""
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{self.pid}/status").read_text())
        return bool(found and int(found[1], 16) & 1 << AFTER_STEP - 1)

    def has_made_a_step(self) -> bool:
        return bool(re.search(r"step\s+1/", self._out.read_text()))

    def wait_for(self, what: Callable[[], bool]) -> float:
        """Seconds that it took."""
        begun = time.monotonic()
        while not what():
            if (
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                or time.monotonic() - begun > LIMIT_S
            ):
                sys.exit(f"the run: {self._err.read_text()}")
            time.sleep(LOOK_S)
        return time.monotonic() - begun

    def end(self, number: int) -> dict[str, Any]:
        """Sends the signal. What the run did then."""
        self._traces.look()
        begun = time.monotonic()
        os.kill(self.pid, number)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        closing_s = time.monotonic() - begun
        said = self._err.read_text()
        steps = len(re.findall(r"^\s*step\s", self._out.read_text(), re.MULTILINE))
        left = self._traces.left()
        well = in_order(number, code, said) and not left
        faults = {} if well else {"said": said, "left": left}
        return {"code": code, "steps": steps, "closing_s": round(closing_s, 2), "in_order": well, **faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT, help=f"default: {RESULT.name}, beside the others")
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"machine": machine(), "seeds": {}}
    first_s = None
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        if str(seed) in found["seeds"]:
            continue
        if first_s is None:
            with tempfile.TemporaryDirectory() as folder:
                whole = Run(Path(folder))
                first_s = whole.wait_for(whole.has_made_a_step)
                whole.end(signal.SIGINT)
        drawn = random.Random(seed)
        number, at_s = drawn.choice(SIGNALS), drawn.uniform(0, first_s + AFTER_S)
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder))
            time.sleep(at_s)
            outcome = run.end(number)
        name = signal.Signals(number).name
        found["seeds"][str(seed)] = {"signal": name, "at_s": round(at_s, 3), **outcome, "package": code_digest()}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        said = "in order" if outcome["in_order"] else f"NOT in order\n{outcome['said']}{outcome['left']}"
        print(f"seed {seed}: {name} at {at_s:.2f} s, after {outcome['steps']} steps: {said}", flush=True)
    every = found["seeds"].values()
    print(f"{sum(each['in_order'] for each in every)} of {len(every)} in order")
    return 0 if all(each["in_order"] for each in every) else 1


def in_order(number: int, code: int, said: str) -> bool:
    """Whether a run that was sent this signal ended as docs/checkpoints.md has it."""
    name, lines = signal.Signals(number).name, said.splitlines()
    if len(lines) != 3 or not lines[0].startswith(f"{name}: ") or not lines[2].startswith("  megatron-stare train "):
        return False
    if lines[1].startswith(f"interrupted ({name}) before the run began; start it with"):
        return code == 128 + number
    if not lines[1].startswith(f"interrupted ({name}) after step "):
        return False
    if number == signal.SIGINT:
        return code == 128 + number and "there is no checkpoint yet" in lines[1]
    saved = "the last checkpoint is of step " in lines[1] or "after step 0 of" in lines[1]
    return saved and code == (TO_BE_CONTINUED if number == AFTER_STEP else 128 + number)


if __name__ == "__main__":
    sys.exit(main())
