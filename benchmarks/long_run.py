"""2,000 steps of STARE on two cores of a processor, of which twelve times something is killed or
stopped and which nobody touches, and the same steps of GRPO, undisturbed.

The quickstart's configuration on Ray at TP2, a save every 20 steps, under `train --supervise`.
Kinds and steps of the faults are drawn with a seed: each process of the run is killed (SIGKILL) at
least once, and one rank is stopped (SIGSTOP), which the black box has to end. Every ten steps it is
looked at what all processes of the run hold: memory (Pss), descriptors, entries of /dev/shm.

Where the system lets it, the run has a /dev/shm of its own, so that nothing else on the machine
counts.

Resumable: where this is killed, the run ends in order with it, and the same command goes on from
its directory; what was done to it and seen of it is on disk, and not done again.

    python benchmarks/long_run.py
    python benchmarks/long_run.py --only grpo --runs FOLDER --out FILE

Exit code 1: one of the lines under `judged` is false.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# the package that is run; the environment may have another's
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # of what a run leaves behind

import psutil
from kill_anywhere import PROCESSES, kind_of
from long_run_figures import figures, judged
from machine import machine
from support.leftovers import Traces

from megatron_stare.hangs.driver_side import PREFIX
from megatron_stare.process.versions import code_digest
from megatron_stare.run_dir.json_lines import read_jsonl, to_line

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results/long_run.json"
STARE = {
    "run.checkpoint_every": 20,
    "faults.hangs.end_run": True,
    "rollout.threads": 1,
    # several micro-batches a step, as any run but a tiny one has: in one of the whole batch tensors
    # are as large as the batch happens to be, and the C library's heap breaks into pieces for some
    # 200 steps after each start
    "batch.micro_batch_tokens": 2048,
}
# what STARE is compared with differs from it in nothing but weights and gate: scripts/quickstart.sh
GRPO = {
    "algorithm": "grpo",
    "algorithm.aggregation": "token_mean",
    "algorithm.clip_high": 0.28,
    "algorithm.dual_clip": 10,
    # nothing is done to it, so one process does: its numbers are those of two ranks on Ray, to
    # rounding
    "runtime.runner": "inline",
    "parallel.tensor": 1,
}
SETTINGS = {"stare": STARE, "grpo": STARE | GRPO}
STOPPED = "rank stopped"
STARTING = "starting"  # a worker that has been asked nothing yet
# Ray gives its workers way to everything else on the machine (nice 15): beside other work they
# would hardly run
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}
# exit codes of a run that somebody has told to end, or that losses ended, and that goes on by the
# same command
CONTINUED = (75, 130, 143)
LOOK_S = 0.05
SAMPLES_EVERY, SAMPLE_AT = 10, 5  # steps; saves are begun at multiples of 20
TAIL_BYTES = 64_000  # of the record, more than two lines
PR_SET_PDEATHSIG = 1
OWN_SHM = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@dataclass(frozen=True)
class Fault:
    """Comes once this step is in the run's record, and then a share of such a step later."""

    step: int
    kind: str  # of kill_anywhere.PROCESSES, or STOPPED
    share: float
    which: float  # of the processes of its kind, as a share of their number


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", choices=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs/long_run", help="where the run directories go"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("overrides", nargs="*", help="settings of both runs, key=value")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    for name in [args.only] if args.only else SETTINGS:
        faults = draw(args.seed, args.faults, args.steps) if name == "stare" else []
        LongRun(name, args.runs.absolute(), args.steps, args.overrides, faults).make()
    found: dict[str, Any] = {"machine": machine(), "steps": args.steps, "runs": {}}
    for name in SETTINGS:
        if (args.runs / name / "metrics.jsonl").exists():
            found["runs"][name] = figures(args.runs / name, read_jsonl(events_of(args.runs, name)))
    found["judged"] = judged(found["runs"], args.steps)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: each for name, each in found.items() if name == "judged"}, indent=1))
    sys.exit(not all(found["judged"].values()))


def draw(seed: int, count: int, steps: int) -> list[Fault]:
    """Each kind once and a rank stopped, as far as the count goes, then any kind; steps anywhere
    but in the last hundredth, after which nothing would be seen to go on."""
    drawn = random.Random(seed)
    each = [*PROCESSES["ray"], STOPPED]
    drawn.shuffle(each)
    kinds = (each + drawn.choices(PROCESSES["ray"], k=count))[:count]
    drawn.shuffle(kinds)
    at = sorted(drawn.sample(range(1, steps - steps // 100), count))
    return [
        Fault(step, kind, drawn.random(), drawn.random())
        for step, kind in zip(at, kinds, strict=True)
    ]


def events_of(runs: Path, name: str) -> Path:
    """File of what was done to a run and observed of it, a line each. The file lies beside the
    run's directory, because a run may begin that directory anew."""
    return runs / f"{name}.events.jsonl"


class LongRun:
    """One run, made to its end by as many calls of this script as it takes.

    Args:
        overrides: settings, key=value.
    """

    def __init__(
        self, name: str, runs: Path, steps: int, overrides: list[str], faults: list[Fault]
    ) -> None:
        self._dir, self._events, self._faults = runs / name, events_of(runs, name), faults
        self._said = runs / f"{name}.log"
        settings = {**SETTINGS[name], "run.name": name, "run.steps": steps}
        self._settings = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
        self._kinds: dict[psutil.Process, str] = {}

    def make(self) -> None:
        """Goes on until the run has ended; nothing where it has."""
        done = read_jsonl(self._events)
        if any(each["event"] == "ended" and each["code"] not in CONTINUED for each in done):
            return
        for each in done:
            if each["event"] == "started":
                self._wait_for_the_end_of(each["pid"], each["created"])
        injected = [each["fault"] for each in done if each["event"] == "fault"]
        todo = [fault for fault in self._faults if asdict(fault) not in injected]
        traces = Traces()
        supervisor = self._start(traces, bool(done))
        try:
            self._watch(supervisor, todo, traces)
            code = supervisor.wait()
        finally:
            supervisor.terminate()
            supervisor.wait()
        left = traces.left()
        print(
            f"{self._dir.name}: ended with code {code}{', LEFT ' if left else ''}{' '.join(left)}",
            flush=True,
        )
        self._note("ended", code=code, left=left)

    def _start(self, traces: Traces, again: bool) -> subprocess.Popen[bytes]:
        resume = ["--resume"] if again and (self._dir / "config.yaml").exists() else []
        config = str(ROOT / "configs/quickstart.yaml")
        command = [
            sys.executable,
            "-m",
            "megatron_stare.cli",
            "train",
            config,
            f"run.dir={self._dir}",
            *self._settings,
        ]
        command += [*resume, "--supervise"]
        own = ["unshare", "--mount", "--", "sh", "-c", OWN_SHM, "sh"]
        has_own = subprocess.run([*own, "true"], capture_output=True).returncode == 0
        with self._said.open("ab") as said:
            supervisor = subprocess.Popen(
                [*own, *command] if has_own else command,
                cwd=ROOT,
                env=traces.environment({**os.environ, **ENVIRONMENT}),
                stdout=said,
                stderr=said,
                preexec_fn=_die_with_parent,
            )
        created = psutil.Process(supervisor.pid).create_time()
        self._note(
            "started",
            pid=supervisor.pid,
            created=created,
            own_shm=has_own,
            package=code_digest(),
            settings=self._settings,
        )
        return supervisor

    def _wait_for_the_end_of(self, pid: int, created: float) -> None:
        """Waits for a supervisor whose starter was killed: such a supervisor ends its run in
        order."""
        with contextlib.suppress(psutil.NoSuchProcess):
            before = psutil.Process(pid)
            if before.create_time() == created:
                before.wait()

    def _watch(
        self, supervisor: subprocess.Popen[bytes], todo: list[Fault], traces: Traces
    ) -> None:
        """Does what is to be done to the run, and looks at it, until it ends."""
        # the step last looked at; the furthest before the last fault
        seen, beyond = 0, self._newest()[0]
        while supervisor.poll() is None:
            step, seconds = self._newest()
            if todo and step >= max(todo[0].step, beyond + 1):
                time.sleep(todo[0].share * seconds)
                if self._inject(todo[0], supervisor):
                    beyond = max(step, self._newest()[0])
                    todo.pop(0)
            elif step % SAMPLES_EVERY == SAMPLE_AT and step != seen:
                seen = step
                self._note("sample", step=step, **self._sample(supervisor))
            time.sleep(LOOK_S)
        traces.look()

    def _newest(self) -> tuple[int, float]:
        """The last step of the record, and its seconds."""
        with (
            contextlib.suppress(OSError, ValueError, KeyError, IndexError),
            (self._dir / "metrics.jsonl").open("rb") as file,
        ):
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            row = json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])
            return int(row["step"]), float(row["time/step_s"])
        return 0, 0.0

    def _inject(self, fault: Fault, supervisor: subprocess.Popen[bytes]) -> bool:
        """Sends a fault's signal to a process of the fault's kind; False where there is none."""
        kind = "rank" if fault.kind == STOPPED else fault.kind
        those = [each for each in _tree(supervisor.pid) if self._kind(each, supervisor.pid) == kind]
        those.sort(key=lambda each: each.pid)
        if not those:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            those[int(fault.which * len(those))].send_signal(
                signal.SIGSTOP if fault.kind == STOPPED else signal.SIGKILL
            )
            step = self._newest()[0]
            print(f"{self._dir.name}: {fault.kind} after step {step}", flush=True)
            self._note("fault", fault=asdict(fault), step=step)
            return True
        return False

    def _sample(self, supervisor: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Counts what each kind of process holds: number, Pss in bytes, descriptors, threads. The
        sizes of /dev/shm, as the run sees it, are added."""
        kinds: dict[str, dict[str, int]] = {}
        for process in _tree(supervisor.pid):
            with contextlib.suppress(psutil.Error, OSError):
                held = {
                    "number": 1,
                    "pss": process.memory_full_info().pss,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
                of_kind = kinds.setdefault(
                    self._kind(process, supervisor.pid), dict.fromkeys(held, 0)
                )
                for what, much in held.items():
                    of_kind[what] += much
        shm = Path(f"/proc/{supervisor.pid}/root/dev/shm")
        sizes = []
        with contextlib.suppress(OSError):
            for entry in shm.iterdir():
                with contextlib.suppress(OSError):
                    sizes.append(entry.stat().st_size)
        return {"kinds": kinds, "shm": {"entries": len(sizes), "bytes": sum(sizes)}}

    def _kind(self, process: psutil.Process, supervisor: int) -> str:
        """Kind of a process, by its command: one of kill_anywhere.PROCESSES or another. A kind that
        is known is not looked up again."""
        if process not in self._kinds:
            found = _named(process, supervisor)
            if found == STARTING:
                return found
            self._kinds[process] = found
        return self._kinds[process]

    def _note(self, event: str, **more: Any) -> None:
        with self._events.open("a") as file:
            file.write(to_line({"event": event, "at": time.time(), **more}))


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _named(process: psutil.Process, supervisor: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        if process.pid == supervisor:
            return "supervisor"
        command = process.cmdline()
        if command[:1] and command[0].startswith("ray::Actor"):
            parent = process.parent()
            if parent is not None and parent.cmdline()[:1] == command[:1]:
                return "writer"  # of a checkpoint: a fork of a rank
            return _role(process.pid, supervisor)
        if found := kind_of(process, supervisor):
            return found
        if any(word.startswith("megatron_stare.hangs.") for word in command):
            return "watcher"
        if any("ray" in word for word in command):
            return "ray"
    return "other"


def _role(pid: int, supervisor: int) -> str:
    """Role of a worker as its beats name it: ranks and engines have one thread each. Without beats
    it is STARTING."""
    for beat in Path(f"/proc/{supervisor}/root/dev/shm").glob(f"{PREFIX}*/beat_*.json"):
        with contextlib.suppress(OSError, ValueError):  # it is replaced
            found = json.loads(beat.read_text())
            if found["pid"] == pid:
                return "rank" if "rank" in found["role"] else "engine"
    return STARTING


def _die_with_parent() -> None:
    """The supervisor ends in order, and its run, where this is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
