"""Examines the processes of a run on this node. The result for each process contains the state and
the stacks of the process, and says in which kernel function or for which file the process waits.

The examination takes bounded time. Information that cannot be read in time is skipped and reported
as missing.

A process cannot report its own stacks while it is stopped or while one of its threads holds the
interpreter lock. Therefore the separate program py-spy (github.com/benfred/py-spy) reads the stacks
from the memory of the process.

NCCL's flight recorder records which collectives each rank has begun and ended. torch's
ProcessGroupNCCL keeps the newest TORCH_FR_BUFFER_SIZE records. In each rank, a separate thread
waits for a message in a named pipe. The name of the pipe is the value of the environment variable
TORCH_NCCL_DEBUG_INFO_PIPE_FILE, followed by the rank's number and ".pipe". When a message arrives,
the thread writes the records of the rank to a file. The name of the file is the value of the
environment variable TORCH_FR_DUMP_TEMP_FILE, followed by the rank's number (docs.pytorch.org:
torch_nccl_environment_variables). The gloo backend has no flight recorder.
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

PAUSING_S, READING_S = 8.0, 6.0  # time limits of a py-spy call
# parts of paths of code that is not the user's or ours
OTHERS = ("/lib/python", "/site-packages/", "/dist-packages/", "<")
OURS = "/megatron_stare/"
PAUSED = ("T", "t", "D")  # a process in one of these states would never confirm a pause
RECORDED = "2000"  # collectives that NCCL's flight recorder keeps
PIPES, DUMPS = "nccl_pipe_", "nccl_trace_rank_"
# time for ranks to write NCCL's records; ranks check the pipe once a second
DUMP_S, LOOK_S = 10.0, 0.25
BETWEEN_LOOKS_S = 1.5  # in `look`; a system call seen at both looks counts as a wait
LIMIT_S = 30.0  # of a whole `look`
AT_ONCE = 4  # stacks taken in parallel, each some tenths of a CPU second
WORD = 60  # characters kept of each word of a command line


def program() -> str | None:
    """Returns the path of py-spy. Searches for py-spy first in this Python environment, and then on
    PATH. Returns None if py-spy is not installed."""
    here = Path(sys.executable).with_name("py-spy")
    return str(here) if here.exists() else shutil.which("py-spy")


def take_stacks(pid: int, state: str, stuck: bool = False) -> tuple[list[Thread], str]:
    """Returns the threads of a process, and a note that says why stacks are missing or unreliable.
    The note is "" if the stacks are complete and reliable.

    py-spy pauses the process for some milliseconds. If py-spy is unable or not permitted to pause
    the process, py-spy reads the stacks while the process runs.

    Args:
        stuck: true if the process waits for a file system, in which case py-spy cannot pause the
            process.
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
    """Parses the output of `py-spy dump --json`.

    Raises:
        ValueError, LookupError, TypeError: the content is not output of `py-spy dump --json`.
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
    """Returns the environment variables that turn on NCCL's flight recorder in a rank. If a rank
    was started without these environment variables, `dump_flights` finds no records of the rank.

    Recording takes some MB of memory and no measurable time.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": RECORDED,
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / DUMPS),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / PIPES),
    }


def dump_flights(folder: Path) -> tuple[dict[str, bytes], str]:
    """Makes the ranks of this node dump the records of NCCL's flight recorder. Returns the contents
    of the dumps by file name, and a text that says how many ranks have written a dump."""
    pipes = sorted(folder.glob(f"{PIPES}*.pipe"))
    if not pipes:
        return {}, "NCCL's flight recorder: no rank here has one (their collectives are gloo's)"
    begun = time.time()
    for pipe in pipes:
        with contextlib.suppress(OSError):  # no reader: the rank is gone
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
    """Examines the run's processes on this node, and returns the ProcessFacts of each process as a
    JSON object. Takes at most LIMIT_S.

    Args:
        folder: folder of this node's beats.
        driver: the driver's process, if it is on this node.
        leave_out: roots of process trees that do not belong to the run, such as the watcher.
    """
    deadline = time.monotonic() + LIMIT_S
    beats = {
        beat.pid: beat for beat in beats_of(folder) if beat.role != DRIVER or driver is not None
    }
    every = proc_files.everything()
    roots = {pid for pid in (driver, *beats) if pid is not None}
    mine = proc_files.below(roots, every) - proc_files.below(leave_out, every)
    # Add Ray's raylet, which objects pass through. In a joined cluster it also started workers of
    # other runs.
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
    """Returns the name of this host. For each process on the driver's node, the field `node` of
    ProcessFacts contains the host name."""
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
    """The examination of one process. Each fact is added to `found` as soon as the fact is known.
    Facts found earlier are therefore kept even if a later call never returns."""

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
                found["role"] = ""  # a short-lived child
            return
        call = proc_files.system_call(pid)
        asleep = self._before.state == now.state == "D"
        found.update(state=now.state, asleep=asleep, waits_in=proc_files.waits_in(pid))
        found["busy"] = round((now.cpu_s - self._before.cpu_s) / (time.monotonic() - self._at), 2)
        stuck = None
        if call and call == self._call:  # same arguments and stack pointer too
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
    """Returns True for a process of Ray itself: the log monitor, an agent or an idle worker."""
    return "phase" not in found and any(
        "/ray/" in word or word.startswith("ray::IDLE") for word in words
    )


def _role(
    process: proc_files.Status, beats: dict[int, Beat], every: dict[int, proc_files.Status]
) -> str:
    """Returns the role of a process in the run. If neither a heartbeat nor the name of a process
    gives the role, the role is derived from an ancestor's role."""
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
