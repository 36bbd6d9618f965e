"""Signals a small run at any time, as a scheduler or a person does: is it closed in order, and in
two lines?

A seed draws the signal (SIGINT, SIGTERM, SIGUSR1) and the time, uniformly from where the run takes
signals to --after-s seconds after the first step of the first run; every third seed draws a second
signal, up to SECOND_S after the first. The run must end with the code of docs/checkpoints.md, say
on stderr that each signal came, where it stopped and what to type, and nothing else: no warning and
no traceback of what was interrupted. None of its processes, of its files in /dev/shm and of its
temporary folders may be left. Each run is a fork of this script, which has imported the package
once.

    python benchmarks/signal_anywhere.py --seeds 20        # one process, the local engine
    python benchmarks/signal_anywhere.py --seeds 20 --first-seed 20  # 20 more; earlier ones stay
    python benchmarks/signal_anywhere.py --seeds 20 --ray  # two ranks of Ray, its start included

Results are added to benchmarks/results/signal_anywhere.json (signal_anywhere_ray.json), seed by
seed, each with the code that it was run with.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# the package that is run; the environment may have another's
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # of what a run leaves behind

from machine import machine
from support.leftovers import Traces

import megatron_stare.driver.session  # noqa: F401  # what a run imports as it starts
from megatron_stare.cli import main as command_line
from megatron_stare.process.interruption import AFTER_STEP, SIGNALS, TO_BE_CONTINUED
from megatron_stare.process.versions import code_digest

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/signal_anywhere.json"
RAY_RESULT = RESULT.with_name("signal_anywhere_ray.json")
LIMIT_S = 120.0
LOOK_S = 0.005
AFTER_S = 1.0  # of training that signals may come in
AT_ONCE_S = 2.0  # that a second Ctrl-C may take
SECOND_S = 1.5  # after the first signal, at most
AT_ONCE = "SIGINT: ending at once, without saving"

SETTINGS = {
    "run.steps": 1000,
    "run.checkpoint_every": 0,
    "run.dir": "run",
    "model.path": str(ROOT / "assets/tiny-adder"),
    "batch.prompts": 4,
    "batch.samples_per_prompt": 4,
    "eval.prompts": 0,
    "rollout.threads": 1,
}
INLINE = {"runtime.runner": "inline", "parallel.tensor": 1}


class Run:
    """One run, in a process of its own and a new folder."""

    def __init__(self, folder: Path, *, ray: bool) -> None:
        self._out, self._err, self._scratch = folder / "out", folder / "err", folder / "tmp"
        self._scratch.mkdir()
        settings = SETTINGS if ray else SETTINGS | INLINE
        words = [f"{key}={value}" for key, value in settings.items()]
        self._command = ["train", str(ROOT / "configs/quickstart.yaml"), *words]
        # Ray's sockets need a short path
        self._variables = {} if ray else {"TMPDIR": str(self._scratch)}
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
            os.environ.update(self._traces.environment(self._variables))
            tempfile.tempdir = None
            for number in SIGNALS:
                signal.signal(
                    number,
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                )
            code = command_line(self._command)
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

    def end(self, number: int, second: int | None = None, after_s: float = 0.0) -> dict[str, Any]:
        """Sends the signal, and the second one if there is one and the run still lives. Returns
        what the run did."""
        self._traces.look()
        begun = sent = time.monotonic()
        os.kill(self.pid, number)
        if second is not None:
            time.sleep(after_s)
            sent = time.monotonic()
            os.kill(self.pid, second)  # nobody else has waited for it
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        ended = time.monotonic()
        said = self._err.read_text()
        steps = len(re.findall(r"^\s*step\s", self._out.read_text(), re.MULTILINE))
        left = [*self._traces.left(), *map(str, self._scratch.iterdir())]
        well = in_order([number, *([] if second is None else [second])], code, said) and not left
        well &= AT_ONCE not in said or ended - sent <= AT_ONCE_S
        faults = {} if well else {"said": said, "left": left}
        figures = {
            "code": code,
            "steps": steps,
            "closing_s": round(ended - begun, 2),
            "in_order": well,
        }
        return figures | ({"at_once_s": round(ended - sent, 2)} if AT_ONCE in said else {}) | faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--after-s", type=float, default=AFTER_S, help="of training that signals may come in"
    )
    parser.add_argument(
        "--ray", action="store_true", help="two ranks and an engine of Ray instead of one process"
    )
    parser.add_argument(
        "--out", type=Path, help=f"default: {RESULT.name} or {RAY_RESULT.name}, beside the others"
    )
    arguments = parser.parse_args()
    arguments.out = arguments.out or (RAY_RESULT if arguments.ray else RESULT)
    found = (
        json.loads(arguments.out.read_text())
        if arguments.out.exists()
        else {"machine": machine(), "seeds": {}}
    )
    first_s = None
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        if str(seed) in found["seeds"]:
            continue
        if first_s is None:
            with tempfile.TemporaryDirectory() as folder:
                whole = Run(Path(folder), ray=arguments.ray)
                first_s = whole.wait_for(whole.has_made_a_step)
                whole.end(signal.SIGINT)
        drawn = random.Random(seed)
        number, at_s = drawn.choice(SIGNALS), drawn.uniform(0, first_s + arguments.after_s)
        second, after_s = (
            (drawn.choice(SIGNALS), drawn.uniform(0, SECOND_S)) if seed % 3 == 0 else (None, 0.0)
        )
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder), ray=arguments.ray)
            time.sleep(at_s)
            outcome = run.end(number, second, after_s)
        name = signal.Signals(number).name
        sent: dict[str, Any] = {"signal": name, "at_s": round(at_s, 3)}
        if second is not None:
            sent |= {"second": signal.Signals(second).name, "after_s": round(after_s, 3)}
        found["seeds"][str(seed)] = {**sent, **outcome, "package": code_digest()}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        said = (
            "in order"
            if outcome["in_order"]
            else f"NOT in order\n{outcome['said']}{outcome['left']}"
        )
        print(
            f"seed {seed}: {name} at {at_s:.2f} s, after {outcome['steps']} steps: {said}",
            flush=True,
        )
    every = found["seeds"].values()
    print(f"{sum(each['in_order'] for each in every)} of {len(every)} in order")
    return 0 if all(each["in_order"] for each in every) else 1


def in_order(numbers: Sequence[int], code: int, said: str) -> bool:
    """Returns whether a run that was sent these signals ended as docs/checkpoints.md has it. The
    last may have come too late to be said."""
    *signals, stopped, command = said.splitlines() if said.count("\n") > 2 else ("", "", "")
    names = [signal.Signals(number).name for number in numbers]
    told = [line.partition(": ")[0] for line in signals]
    if told == names[::-1]:  # those that come while the process cannot look have no order
        numbers = numbers[::-1]
    elif told not in (names, names[:1]):
        return False
    first, *later = numbers
    hurried = (
        len(signals) == 2
        and first == AFTER_STEP
        and "already" not in signals[1]
        and signals[1] != AT_ONCE
    )
    number = later[0] if hurried else first
    interrupted = f"interrupted ({signal.Signals(number).name})"
    if not stopped.startswith(interrupted) or not command.startswith("  megatron-stare train "):
        return False
    if (
        stopped.startswith(f"{interrupted} before the run began; start it with")
        or signals[-1] == AT_ONCE
    ):
        return code == 128 + number
    if not stopped.startswith(f"{interrupted} after step "):
        return False
    saved = "the last checkpoint is of step " in stopped or "after step 0 of" in stopped
    return saved and code == (TO_BE_CONTINUED if number == AFTER_STEP else 128 + number)


if __name__ == "__main__":
    sys.exit(main())
