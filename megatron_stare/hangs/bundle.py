"""Reports a run that hangs. A report consists of one screen of text and the bundle, which is a
folder with all facts about the hang.

The bundle is written to the run directory, if this directory is writable.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import textwrap
import threading
from pathlib import Path

from megatron_stare.hangs.hang_facts import Facts, ProcessFacts
from megatron_stare.hangs.verdict import Verdict, main_frames
from megatron_stare.hangs.vigil import MOST
from megatron_stare.run_dir.heartbeat import DRIVER, IDLE, Beat

ROWS, WIDTH = 13, 118
SENTENCE = 4  # lines of the verdict's sentence
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk sleep",
    "T": "stopped",
    "t": "debugged",
    "Z": "ended",
    "X": "gone",
    "I": "idle",
}
FOLDER = "blackbox"
LABEL = "the black box"  # before the bundle's folder in the last line of the screen
# seconds for writing to the run directory, whose file system may be what hangs
WRITE_S = 10.0


def screen(facts: Facts, found: Verdict, folder: str) -> str:
    """Formats a report of at most 25 lines for the terminal.

    Args:
        folder: folder of the bundle.
    """
    said = textwrap.wrap(
        found.sentence, WIDTH - 2, max_lines=SENTENCE, placeholder=" …", break_on_hyphens=False
    )
    lines = [headline(facts), *(f"  {line}" for line in said), ""]
    blamed = {(p.node, p.pid) for p in found.culprits}
    shown = [p for p in facts.processes if p.phase is not None or (p.node, p.pid) in blamed]
    shown.sort(key=lambda p: ((p.node, p.pid) not in blamed, p.role != DRIVER, len(p.role), p.role))
    nodes = len({p.node for p in facts.processes})
    lines.append(_cut(f"  {'who':18} {'pid':>7} {'state':10} {'for':>6}  {'MB':>6}  at"))
    for process in shown[:ROWS]:
        who = process.role + (f" {process.node}" if nodes > 1 else "")
        lines.append(_cut(f"  {who:18} {process.pid:7} {_row(process)}"))
    if len(shown) > ROWS:
        lines.append(f"  and {len(shown) - ROWS} more, in facts.json")
    asked = [replica for replica in facts.replicas if replica.under_way]
    if asked:
        told = ", ".join(f"engine {r.number} ({r.state}): {r.under_way}" for r in asked[:6])
        lines.append(_cut(f"  requests under way: {told}"))
    if facts.missing:
        lines.append(
            _cut(
                "  nothing came from "
                + ", ".join(f"{n} ({why})" for n, why in facts.missing.items())
            )
        )
    if facts.flight:
        lines.append(_cut(f"  {facts.flight}"))
    return "\n".join([*lines, f"  {LABEL}: {folder}"])


def headline(facts: Facts) -> str:
    """Returns a headline that names the step, the phase, the seconds without progress, and the
    phase's time limit. For example, the headline `step 12, update: 94 s of at most 31 s` reports 94
    seconds without progress in a phase whose time limit is 31 seconds."""
    beat = facts.beat
    done = f", {beat.done} of {beat.total} responses" if beat.total else ""
    return (
        f"step {beat.step}, {beat.phase}{done}: {facts.without_s:.0f} s of at most"
        f" {beat.limit_s or 0:.0f} s"
    )


def _row(process: ProcessFacts) -> str:
    state = STATES.get(process.state, process.state)
    since = "" if process.since is None else f"{process.since:.0f} s"
    size = process.rss_bytes if process.pss_bytes is None else process.pss_bytes
    if process.stuck:
        at = f"{process.stuck} of {process.path}"
    elif frames := main_frames(process):
        at = str(frames[0])
    else:
        at = process.said or process.waits_in
    call = {None: "", IDLE: "idle, "}.get(process.phase, f"{process.phase}, ")
    return f"{state:10} {since:>6}  {size / 1e6:6.0f}  {call}{at}"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def place(run_dir: Path, beat: Beat) -> Path:
    """Returns the path of the folder for a hang's bundle. The folder's name contains the step and
    the phase from the heartbeat `beat`."""
    return run_dir / FOLDER / f"step_{beat.step:06d}_{beat.phase.replace(' ', '_')}"


def write(facts: Facts, shown: str, flights: Path | None, wanted: Path) -> Path:
    """Writes the bundle and returns its folder. The folder is `wanted`. If `wanted` already exists,
    a number is appended to the folder's name. If the run directory cannot be written, the bundle
    stays in a temporary folder on this node.

    Args:
        shown: text of the screen.
        flights: folder of NCCL's dumps. The dumps of many ranks are large, so a run that already
            has MOST bundles stores no further dumps.

    Raises:
        OSError: the temporary folder cannot be written. Nothing of the bundle is left.
    """
    here = Path(tempfile.mkdtemp(prefix="megatron-stare-blackbox-"))
    try:
        fill(here, facts, shown.replace(str(wanted), "this folder"), flights)
    except OSError:
        shutil.rmtree(here, ignore_errors=True)
        raise
    done: list[Path] = []

    def move() -> None:  # all that touches the run directory, which may never answer
        if sum(1 for _ in wanted.parent.glob("*")) >= MOST:
            shutil.rmtree(here / "nccl", ignore_errors=True)
        final = wanted
        for number in range(2, 100):  # taken if a resume has repeated the step
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
    """Writes screen.txt, facts.json, one file of call stacks per process, and the dumps of NCCL's
    flight recorder."""
    (folder / "screen.txt").write_text(shown + "\n")
    (folder / "facts.json").write_text(json.dumps(facts.to_json(), indent=1))
    (folder / "stacks").mkdir()
    for process in facts.processes:
        name = f"{process.node}_{process.pid}_{process.role}".replace(" ", "_").replace("/", "_")
        (folder / "stacks" / f"{name}.txt").write_text(stacks_of(process))
    if flights is not None and flights.exists() and any(flights.iterdir()):
        shutil.copytree(flights, folder / "nccl")


def stacks_of(process: ProcessFacts) -> str:
    """Formats the call stacks of all threads of a process as text."""
    lines = [
        f"{process.role}, process {process.pid} on {process.node}, state {process.state}:"
        f" {process.command}"
    ]
    if process.stuck:
        lines.append(f"waits in {process.stuck} of {process.path} ({process.file_system})")
    lines += [f"kernel: {process.waits_in}"] if process.waits_in else []
    lines += [process.said] if process.said else []
    for thread in process.threads:
        lines += [
            "",
            f"thread {thread.name}"
            + (", which has the interpreter" if thread.holds_interpreter else ""),
        ]
        lines += [f"    {frame}" for frame in thread.frames]
    return "\n".join(lines) + "\n"
