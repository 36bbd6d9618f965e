"""Looks at a run's processes on this node: how they stand, where they are, what they wait for. Bounded in time: what a
process does not let us see is left out and said."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stare.hangs import proc_files, stacks
from megatron_stare.hangs.hang_facts import NODE_PARTS, SERVER, VERIFIER, WRITER, ProcessFacts
from megatron_stare.run_dir.heartbeat import DRIVER, Beat, beats_of

BETWEEN_LOOKS_S = 1.5  # what waits in the same call twice, waits
LIMIT_S = 30.0  # of all
AT_ONCE = 4  # stacks that are taken, each some tenths of a second of a CPU
WORD = 60  # characters of a word of a command line that are kept


def look(folder: Path, driver: int | None, leave_out: Sequence[int] = (), node: str = "") -> list[dict[str, Any]]:
    """The run's processes here, as ProcessFacts in JSON. Takes LIMIT_S at most.

    Args:
        folder: of this node's beats.
        driver: its process, where it is on this node.
        leave_out: trees of processes that are not the run's own: whoever looks.
    """
    deadline = time.monotonic() + LIMIT_S
    beats = {beat.pid: beat for beat in beats_of(folder) if beat.role != DRIVER or driver is not None}
    every = proc_files.everything()
    roots = {pid for pid in (driver, *beats) if pid is not None}
    mine = proc_files.below(roots, every) - proc_files.below(leave_out, every)
    # Ray's part of the node, which objects go through; of a joined cluster it has started other runs' workers too
    mine |= {every[pid].parent for pid in beats if pid in every and _is_ray(every.get(every[pid].parent))}
    calls = {pid: proc_files.system_call(pid) for pid in mine}
    time.sleep(BETWEEN_LOOKS_S)
    looks = [_Look(every[pid], calls[pid], beats, every, node or here()) for pid in sorted(mine)]
    gate = threading.Semaphore(AT_ONCE)
    threads = [threading.Thread(target=each.run, args=(gate, deadline), daemon=True) for each in looks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found = [dict(each.found) for each in looks if each.found["role"]]
    found += [_ended(beat, node or here()) for pid, beat in beats.items() if pid not in every]
    return [dataclasses.asdict(ProcessFacts.of({**each, "threads": each.get("threads", ())})) for each in found]


def here() -> str:
    """What this node is called, where it is that of the driver."""
    return socket.gethostname()


def _is_ray(process: proc_files.Status | None) -> bool:
    return process is not None and process.name in NODE_PARTS


def _ended(beat: Beat, node: str) -> dict[str, Any]:
    since = time.time() - beat.since
    return {"node": node, "pid": beat.pid, "role": beat.role, "state": "X", "phase": beat.phase, "since": since}


class _Look:
    """At one process. `found` fills as it goes on: where a call does not come back, what came before it is kept."""

    def __init__(
        self,
        before: proc_files.Status,
        call: str,
        beats: dict[int, Beat],
        every: dict[int, proc_files.Status],
        node: str,
    ) -> None:
        self._before, self._call, self._at = before, call, time.monotonic() - BETWEEN_LOOKS_S
        pid, beat = before.pid, beats.get(before.pid)
        self.found: dict[str, Any] = {
            **{"node": node, "pid": pid, "name": before.name, "parent": before.parent, "state": before.state},
            **{"rss_bytes": before.rss_bytes, "role": _role(before, beats, every)},
        }
        if beat is not None:
            self.found |= {"phase": beat.phase, "since": time.time() - beat.since}
        self.found["said"] = "it did not let itself be looked at in time"

    def run(self, gate: threading.Semaphore, deadline: float) -> None:
        pid, found = self._before.pid, self.found
        now = proc_files.status(pid)
        if now is None or now.started != self._before.started:
            found.update(state="X", said="it ended while it was looked at")
            if "phase" not in found:
                found["role"] = ""  # a child that came and went
            return
        call = proc_files.system_call(pid)
        asleep = self._before.state == now.state == "D"
        found.update(state=now.state, asleep=asleep, waits_in=proc_files.waits_in(pid))
        found["busy"] = round((now.cpu_s - self._before.cpu_s) / (time.monotonic() - self._at), 2)
        stuck = None
        if call and call == self._call:  # arguments and stack pointer too
            stuck = proc_files.stuck_at(pid, call)
            if stuck is not None:
                found.update(stuck=stuck[0], path=stuck[1], file_system=proc_files.mounted(stuck[1]))
        sleeping = proc_files.sleeping_threads(pid)
        found["said"] = ", ".join(["asleep in the kernel: " + each for each in sleeping])
        words = proc_files.command(pid)
        found["command"] = " ".join(word[:WORD] for word in words[:4])
        if found["role"].startswith(WRITER) and "megatron_stare.rewards.worker" in words:
            found["role"] = VERIFIER
        if found["role"] and proc_files.runs_python(pid) and not _of_ray_itself(words, found):
            with gate:
                if time.monotonic() < deadline:
                    threads, said = stacks.take(pid, now.state, stuck is not None)
                    found["threads"] = [dataclasses.asdict(thread) for thread in threads]
                    found["said"] = ", ".join(filter(None, [found["said"], said]))
        found["pss_bytes"] = proc_files.pss_bytes(pid)


def _of_ray_itself(words: Sequence[str], found: dict[str, Any]) -> bool:
    """Its log monitor, its agents, and workers that nothing was asked of."""
    return "phase" not in found and any("/ray/" in word or word.startswith("ray::IDLE") for word in words)


def _role(process: proc_files.Status, beats: dict[int, Beat], every: dict[int, proc_files.Status]) -> str:
    """What it is to the run, by itself or by whoever started it."""
    if process.pid in beats:
        return beats[process.pid].role
    if process.name in NODE_PARTS:
        return process.name
    parent = every.get(process.parent)
    while parent is not None and parent.pid not in beats and parent.name not in NODE_PARTS:
        parent = every.get(parent.parent)
    if parent is None or parent.name in NODE_PARTS:
        return "Ray's"
    role = beats[parent.pid].role
    return f"{SERVER if 'engine' in role else WRITER}{role}"
