"""What a person is shown of a run that does not get on: one screen."""

from __future__ import annotations

import textwrap

from megatron_stare.hangs.hang_facts import Facts, ProcessFacts
from megatron_stare.hangs.verdict import Verdict, main_frames
from megatron_stare.run_dir.heartbeat import DRIVER, IDLE

ROWS, WIDTH = 13, 118
SENTENCE = 4  # lines of it
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


def screen(facts: Facts, found: Verdict, folder: str) -> str:
    """At most 25 lines.

    Args:
        folder: of the bundle.
    """
    said = textwrap.wrap(found.sentence, WIDTH - 2, max_lines=SENTENCE, placeholder=" …", break_on_hyphens=False)
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
        lines.append(_cut("  nothing came from " + ", ".join(f"{n} ({why})" for n, why in facts.missing.items())))
    if facts.flight:
        lines.append(_cut(f"  {facts.flight}"))
    return "\n".join([*lines, f"  the black box: {folder}"])


def headline(facts: Facts) -> str:
    """`step 12, update: 94 s of at most 31 s`."""
    beat = facts.beat
    done = f", {beat.done} of {beat.total} responses" if beat.total else ""
    return f"step {beat.step}, {beat.phase}{done}: {facts.without_s:.0f} s of at most {beat.limit_s or 0:.0f} s"


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
