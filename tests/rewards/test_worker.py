"""A worker process that is started by hand, and spoken to over its socket."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any

from megatron_stare.rewards.process import Unpacker, pack


def test_a_worker_says_that_it_is_ready_judges_in_order_and_ends_with_the_stream() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron_stare.rewards.worker",
                "arithmetic",
                str(theirs.fileno()),
            ],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    unpacker, said = Unpacker(), list[Any]()
    with process, ours:
        ours.sendall(pack([["1+2=3;3+4=7", "7", None], ["1+2=3;", "7", None]]))
        while len(said) < 3 and (data := ours.recv(1 << 16)):
            said += unpacker.feed(data)
    assert said == [
        {"ready": {"groups": False, "needs_columns": False}},
        {"reward": 1.0, "answer_at": 9, "answer": "7"},
        {"reward": 0.0, "answer_at": -1, "answer": ""},
    ]
    assert process.returncode == -signal.SIGKILL  # its group, with whatever the verifier started
