"""Main program of a verifier process, called a worker. `rewards/process.py` starts a worker with
the command `python -m megatron_stare.rewards.worker <verifier> <fd>`.

The worker reads lists of items [response, answer, columns] from the socket `fd`. The worker
verifies one item after another, and writes one message as soon as an item is verified. An item is
called a group if the item contains a list of responses instead of a single response. The worker's
first message is {"ready": {...}} with the inputs that the verifier needs, or {"failed": {...}} if
the verifier cannot be loaded. For a single response, every later message is {"reward": x,
"answer_at": n, "answer": text} or {"error": text}. For a group, every later message is a list that
contains one reward object or error object per response.

The verifier runs in the main thread, because Python runs signal handlers only in the main thread. A
second thread reads the messages from the parent. When the parent closes the socket, or when the
parent process ends, the second thread kills the worker's process group. The second thread can kill
the process group even if the verifier hangs.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any, SupportsFloat

from megatron_stare.errors import UserError, exits_refused, users_line
from megatron_stare.registry import Extension
from megatron_stare.rewards.process import Unpacker, pack
from megatron_stare.rewards.verifier import (
    AnswerStart,
    NormalAnswer,
    Verifier,
    answer_start_of,
    asked_by,
    make_verifier,
    normal_answer_of,
    rewards_of,
)

_RECEIVE_BYTES = 1 << 16
LONGEST_ANSWER = 1_000  # characters of an answer that are sent
# limit on an exception's text, because a sympy error can print a whole expression tree
_DETAIL_CHARACTERS = 500


def main(verifier: str, fd: int) -> None:
    """Verifies answers until the parent closes its end of the socket `fd`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # A send fails once the parent is gone, shortly before the reading thread ends the process.
    with (
        socket.socket(fileno=fd) as channel,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        # programs started by a verifier must not keep the stream open
        channel.set_inheritable(False)
        inbox: SimpleQueue[list[Any]] = SimpleQueue()
        threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
        try:
            with exits_refused("reward.verifier"):
                verify = make_verifier(Extension.parse(verifier))
        except UserError as error:
            channel.sendall(
                pack({"failed": {"what": error.what, "where": error.where, "fix": error.fix}})
            )
            return
        asked = asked_by(verify)
        channel.sendall(
            pack({"ready": {"groups": asked.groups, "needs_columns": asked.needs_columns}})
        )
        readers = answer_start_of(verify), normal_answer_of(verify)
        while True:
            response, answer, columns = inbox.get()
            several = isinstance(response, list)
            responses = response if several else [response]
            messages = judge(verify, *readers, responses, answer, columns)
            channel.sendall(pack(messages if several else messages[0]))


def judge(
    verify: Verifier,
    answer_start: AnswerStart | None,
    normal_answer: NormalAnswer | None,
    responses: Sequence[str],
    answer: str,
    columns: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Judges responses to one prompt.

    Returns:
        One dict for each response. The dict has either the keys "reward", "answer_at" and "answer",
        or the key "error". The reward is a finite float. `verifier_pool.Verdict` explains
        "answer_at" and "answer". The error is a text that states why there is no reward.
    """
    try:
        at = [None if answer_start is None else int(answer_start(each)) for each in responses]
        rewards = rewards_of(verify, responses, answer, columns)
        given = [
            None if normal_answer is None else str(normal_answer(each))[:LONGEST_ANSWER]
            for each in responses
        ]
        return [_message(*each) for each in zip(rewards, at, given, strict=True)]
    # includes SystemExit, because one answer must not end the process
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()[:_DETAIL_CHARACTERS]
        return [{"error": f"{text} {users_line(error)}".rstrip()}] * len(responses)


def _message(reward: Any, answer_at: int | None, answer: str | None) -> dict[str, Any]:
    if not isinstance(reward, SupportsFloat):
        return {"error": f"the verifier returned {type(reward).__name__}, not a number"}
    value = float(reward)
    if not math.isfinite(value):
        return {"error": f"the verifier returned {value}"}
    return {"reward": value, "answer_at": answer_at, "answer": answer}


def _read(channel: socket.socket, inbox: SimpleQueue[list[Any]]) -> None:
    """Puts the items of the parent's messages into `inbox`. Kills the worker's process group when
    the parent has closed the socket."""
    unpacker = Unpacker()
    try:
        while data := channel.recv(_RECEIVE_BYTES):
            for chunk in unpacker.feed(data):
                for item in chunk:
                    inbox.put(item)
    finally:
        with contextlib.suppress(ProcessLookupError):  # not a group leader if started by hand
            os.killpg(os.getpid(), signal.SIGKILL)  # includes processes that the verifier started
        os._exit(0)  # sys.exit would end only this thread


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
