"""Writes what was found of a run that does not get on: one folder, in the run directory if that can be written."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from pathlib import Path

from megatron_stare.hangs.hang_facts import Facts, ProcessFacts
from megatron_stare.run_dir.heartbeat import Beat

FOLDER = "blackbox"
WRITE_S = 10.0  # that the run directory is given to take it; its file system may be what does not answer


def place(run_dir: Path, beat: Beat) -> Path:
    """Where the bundle of a phase goes."""
    return run_dir / FOLDER / f"step_{beat.step:06d}_{beat.phase.replace(' ', '_')}"


def write(facts: Facts, shown: str, flights: Path | None, wanted: Path) -> Path:
    """Writes it, and gives where it is: `wanted`, or where that cannot be written a temporary folder of this node.

    Args:
        shown: the screen.
        flights: folder of NCCL's dumps.
    """
    here = Path(tempfile.mkdtemp(prefix="megatron-stare-blackbox-"))
    fill(here, facts, shown.replace(str(wanted), "this folder"), flights)
    done: list[Path] = []

    def move() -> None:
        final = wanted
        for number in range(2, 100):  # a step that was made again after a resume
            if not final.exists():
                break
            final = wanted.with_name(f"{wanted.name}_{number}")
        final.parent.mkdir(exist_ok=True)
        shutil.copytree(here, final)
        done.append(final)

    mover = threading.Thread(target=_quietly, args=(move,), daemon=True)
    mover.start()
    mover.join(WRITE_S)
    if not done:
        return here
    shutil.rmtree(here, ignore_errors=True)
    return done[0]


def _quietly(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except OSError:
        return


def fill(folder: Path, facts: Facts, shown: str, flights: Path | None) -> None:
    """screen.txt, facts.json, a file of stacks for each process, and what NCCL has recorded."""
    (folder / "screen.txt").write_text(shown + "\n")
    (folder / "facts.json").write_text(json.dumps(facts.to_json(), indent=1))
    (folder / "stacks").mkdir()
    for process in facts.processes:
        name = f"{process.node}_{process.pid}_{process.role}".replace(" ", "_").replace("/", "_")
        (folder / "stacks" / f"{name}.txt").write_text(stacks_of(process))
    if flights is not None and flights.exists() and any(flights.iterdir()):
        shutil.copytree(flights, folder / "nccl")


def stacks_of(process: ProcessFacts) -> str:
    """All threads of a process, for people."""
    lines = [f"{process.role}, process {process.pid} on {process.node}, state {process.state}: {process.command}"]
    if process.stuck:
        lines.append(f"waits in {process.stuck} of {process.path} ({process.file_system})")
    lines += [f"kernel: {process.waits_in}"] if process.waits_in else []
    lines += [process.said] if process.said else []
    for thread in process.threads:
        lines += ["", f"thread {thread.name}" + (", which has the interpreter" if thread.holds_interpreter else "")]
        lines += [f"    {frame}" for frame in thread.frames]
    return "\n".join(lines) + "\n"
