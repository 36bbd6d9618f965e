"""Looks at a run's processes on this node: how they stand, where they are, what they wait for.

Bounded in time: what a process does not let us see is left out and said.

Stacks of Python processes are taken from outside by py-spy (github.com/benfred/py-spy), which reads
their memory: a process that is stopped, or whose interpreter is held, cannot say where it is.

NCCL's flight recorder knows which collectives each rank has begun and ended. torch's
ProcessGroupNCCL keeps the newest TORCH_FR_BUFFER_SIZE of them, and dumps them to the file
TORCH_FR_DUMP_TEMP_FILE + rank when something is written to the pipe TORCH_NCCL_DEBUG_INFO_PIPE_FILE
+ rank + ".pipe", which a thread of its own reads (docs.pytorch.org:
torch_nccl_environment_variables). Of gloo there is no such record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stare.hangs import proc_files
from megatron_stare.hangs.hang_facts import (
    NODE_PARTS,
    SERVER,
    VERIFIER,
    WRITER,
    Frame,
    ProcessFacts,
    Thread,
)
from megatron_stare.run_dir.heartbeat import DRIVER, Beat, beats_of

PAUSING_S, READING_S = 8.0, 6.0  # until a look by py-spy is given up
# parts of the path of other people's code
OTHERS = ("/lib/python", "/site-packages/", "/dist-packages/", "<")
OURS = "/megatron_stare/"
PAUSED = ("T", "t", "D")  # asked to pause, one of these would never say that it has
RECORDED = "2000"  # collectives that NCCL's flight recorder keeps
PIPES, DUMPS = "nccl_pipe_", "nccl_trace_rank_"
# seconds that ranks get to write NCCL's records; they look at the pipe once a second
DUMP_S, LOOK_S = 10.0, 0.25
BETWEEN_LOOKS_S = 1.5  # of `look`; what waits in the same call twice, waits
LIMIT_S = 30.0  # of all of `look`
AT_ONCE = 4  # stacks that are taken, each some tenths of a second of a CPU
WORD = 60  # characters of a word of a command line that are kept


def program() -> str | None:
    """py-spy's path: of this environment, or else of the shell."""
    here = Path(sys.executable).with_name("py-spy")
    return str(here) if here.exists() else shutil.which("py-spy")


def take_stacks(pid: int, state: str, stuck: bool = False) -> tuple[list[Thread], str]:
    """The threads of a process, and in words what could not be had of them, "" where nothing is
    missing.

    The process is paused for the look, some milliseconds; one that cannot be paused, or not by us,
    is read as it runs.

    Args:
        stuck: it waits for a file system, and would not pause.
    """
    spy = program()
    if spy is None:
        return [], "py-spy is not installed"
    said = ""
    for flags, limit in (
        ((), PAUSING_S),
        (("--nonblocking",), READING_S),
        (("--nonblocking",), READING_S),
    ):
        if not flags and (stuck or state in PAUSED):
            continue
        try:
            done = subprocess.run(
                [spy, "dump", "--json", "--pid", str(pid), *flags],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = f"py-spy: {type(error).__name__} after {limit:g} s"
            continue
        try:
            threads = parsed_stacks(done.stdout)
        except (ValueError, LookupError, TypeError):
            threads = []
        if threads:
            return (
                threads,
                (
                    "read while it ran, and may be of two moments"
                    if flags and not stuck and said
                    else ""
                ),
            )
        said = (
            done.stderr.decode(errors="replace").strip().partition("\n")[0]
            or "py-spy found no thread"
        )
    return [], f"no stack: {said}"


def parsed_stacks(content: bytes) -> list[Thread]:
    """Reads what `py-spy dump --json` writes.

    Raises:
        ValueError, LookupError, TypeError: it is something else.
    """
    return [
        Thread(
            str(each["thread_name"] or each["thread_id"]),
            tuple(
                Frame(
                    f["name"],
                    f["short_filename"] or f["filename"],
                    int(f["line"]),
                    _own(f["filename"]),
                )
                for f in each["frames"]
            ),
            bool(each["owns_gil"]),
        )
        for each in json.loads(content)
    ]


def _own(file: str) -> bool:
    return OURS in file or not any(part in file for part in OTHERS)


def flight_environment(folder: Path) -> dict[str, str]:
    """Gives the environment variables of ranks with NCCL's collectives, without which
    `dump_flights` finds nothing.

    Recording costs some MB, and no measurable time.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": RECORDED,
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / DUMPS),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / PIPES),
    }


def dump_flights(folder: Path) -> tuple[dict[str, bytes], str]:
    """Has the ranks of this node dump what NCCL recorded: by file name, and in words what there
    is."""
    pipes = sorted(folder.glob(f"{PIPES}*.pipe"))
    if not pipes:
        return {}, "NCCL's flight recorder: no rank here has one (their collectives are gloo's)"
    begun = time.time()
    for pipe in pipes:
        with contextlib.suppress(OSError):  # nobody reads it: the rank is gone
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, b"1")
            os.close(descriptor)
    deadline = time.monotonic() + DUMP_S
    dumps: list[Path] = []
    while time.monotonic() < deadline and len(dumps) < len(pipes):
        time.sleep(LOOK_S)
        dumps = [file for file in folder.glob(f"{DUMPS}*") if file.stat().st_mtime >= begun]
    return (
        {file.name: file.read_bytes() for file in dumps},
        (
            f"NCCL's flight recorder: {len(dumps)} of {len(pipes)} ranks have written theirs"
            " (folder nccl)"
        ),
    )


def look(
    folder: Path, driver: int | None, leave_out: Sequence[int] = (), node: str = ""
) -> list[dict[str, Any]]:
    """The run's processes here, as ProcessFacts in JSON. Takes LIMIT_S at most.

    Args:
        folder: of this node's beats.
        driver: its process, where it is on this node.
        leave_out: trees of processes that are not the run's own: whoever looks.
    """
    deadline = time.monotonic() + LIMIT_S
    beats = {
        beat.pid: beat for beat in beats_of(folder) if beat.role != DRIVER or driver is not None
    }
    every = proc_files.everything()
    roots = {pid for pid in (driver, *beats) if pid is not None}
    mine = proc_files.below(roots, every) - proc_files.below(leave_out, every)
    # Ray's raylet, which objects pass through. A joined cluster's has started other runs' workers
    # too.
    mine |= {
        every[pid].parent for pid in beats if pid in every and _is_ray(every.get(every[pid].parent))
    }
    calls = {pid: proc_files.system_call(pid) for pid in mine}
    time.sleep(BETWEEN_LOOKS_S)
    looks = [_Look(every[pid], calls[pid], beats, every, node or here()) for pid in sorted(mine)]
    gate = threading.Semaphore(AT_ONCE)
    threads = [
        threading.Thread(target=each.run, args=(gate, deadline), daemon=True) for each in looks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found = [dict(each.found) for each in looks if each.found["role"]]
    found += [_ended(beat, node or here()) for pid, beat in beats.items() if pid not in every]
    return [
        dataclasses.asdict(ProcessFacts.of({**each, "threads": each.get("threads", ())}))
        for each in found
    ]


def here() -> str:
    """Name of this node, where it is that of the driver."""
    return socket.gethostname()


def _is_ray(process: proc_files.Status | None) -> bool:
    return process is not None and process.name in NODE_PARTS


def _ended(beat: Beat, node: str) -> dict[str, Any]:
    since = time.time() - beat.since
    return {
        "node": node,
        "pid": beat.pid,
        "role": beat.role,
        "state": "X",
        "phase": beat.phase,
        "since": since,
    }


class _Look:
    """At one process. `found` fills as it goes on: where a call does not come back, what came
    before it is kept."""

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
            **{
                "node": node,
                "pid": pid,
                "name": before.name,
                "parent": before.parent,
                "state": before.state,
            },
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
                found.update(
                    stuck=stuck[0], path=stuck[1], file_system=proc_files.mounted(stuck[1])
                )
        sleeping = proc_files.sleeping_threads(pid)
        found["said"] = ", ".join(["asleep in the kernel: " + each for each in sleeping])
        words = proc_files.command(pid)
        found["command"] = " ".join(word[:WORD] for word in words[:4])
        if found["role"].startswith(WRITER) and "megatron_stare.rewards.worker" in words:
            found["role"] = VERIFIER
        if found["role"] and proc_files.runs_python(pid) and not _of_ray_itself(words, found):
            with gate:
                if time.monotonic() < deadline:
                    threads, said = take_stacks(pid, now.state, stuck is not None)
                    found["threads"] = [dataclasses.asdict(thread) for thread in threads]
                    found["said"] = ", ".join(filter(None, [found["said"], said]))
        found["pss_bytes"] = proc_files.pss_bytes(pid)


def _of_ray_itself(words: Sequence[str], found: dict[str, Any]) -> bool:
    """Its log monitor, its agents, and workers that nothing was asked of."""
    return "phase" not in found and any(
        "/ray/" in word or word.startswith("ray::IDLE") for word in words
    )


def _role(
    process: proc_files.Status, beats: dict[int, Beat], every: dict[int, proc_files.Status]
) -> str:
    """Role of a process in the run, by itself or by whoever started it."""
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
