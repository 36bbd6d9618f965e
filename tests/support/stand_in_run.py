"""A driver and two ranks without torch and Ray, beside a real watcher: processes that hang for real
in a second.

python stand_in_run.py BEATS_FOLDER RUN_DIR HANG [end_run]
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

from megatron_stare.hangs.watcher import SETTINGS, Settings
from megatron_stare.run_dir.heartbeat import DRIVER, Beat, CallBeats, beat_file, write_beat

LIMIT_S = 0.5


def rank(folder: str, number: str) -> None:
    with CallBeats(Path(folder), f"trainer rank {number}").call("update"):
        print(flush=True)
        threading.Event().wait()


def driver(folder: str, run_dir: str, hang: str, *end_run: str) -> None:
    settings = Settings(folder, run_dir, os.getpid(), end_run=bool(end_run), tick_s=LIMIT_S / 4)
    (Path(folder) / SETTINGS).write_text(json.dumps(asdict(settings)))
    beat = Beat(DRIVER, os.getpid(), "update", time.time(), time.monotonic(), limit_s=None, step=12)
    write_beat(beat_file(Path(folder), DRIVER), beat)
    watcher = [sys.executable, "-m", "megatron_stare.hangs.watcher", folder]
    watching = subprocess.Popen(watcher, stdin=subprocess.PIPE)
    begin = [sys.executable, __file__, "rank", folder]
    ranks = [subprocess.Popen([*begin, str(number)], stdout=subprocess.PIPE) for number in range(2)]
    for each in ranks:
        each.stdout.readline()
    write_beat(
        beat_file(Path(folder), DRIVER), replace(beat, moved=time.monotonic(), limit_s=LIMIT_S)
    )
    HANGS[hang](run_dir, ranks)
    write_beat(beat_file(Path(folder), DRIVER), replace(beat, moved=time.monotonic(), limit_s=None))
    for each in ranks:
        each.kill()
    watching.stdin.close()
    watching.wait()


def stop_rank(run_dir: str, ranks: list[subprocess.Popen]) -> None:
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[1].wait()


def hold_interpreter(run_dir: str, ranks: list[subprocess.Popen]) -> None:
    ctypes.PyDLL(None).pause()


def write_checkpoint(run_dir: str, ranks: list[subprocess.Popen]) -> None:
    os.mkdir(f"{run_dir}/step_12")


HANGS = {"stopped": stop_rank, "interpreter": hold_interpreter, "disk": write_checkpoint}

if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1] == "rank" else driver(*sys.argv[1:])
