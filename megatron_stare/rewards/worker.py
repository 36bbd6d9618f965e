"""The verifier process: `python -m megatron_stare.rewards.worker <verifier> <fd>`, started by
`rewards/process.py`.

It reads lists of [response, answer, columns] from the socket `fd` and writes one message an answer,
in order, as soon as it has it. A list in place of the response is a group, whose message is a list
of messages. Three kinds of message go out: {"ready": {...}} with what the verifier asks for, or
{"failed": {...}}, once, then {"reward": x, "answer_at": n, "answer": text} or {"error": text}.

The verifier runs in the main thread, where signal handlers work. A second thread does nothing but
read: it waits for the parent to send, and the end of the stream, which comes when the parent is
gone, ends this process group even while a verifier hangs.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, SupportsFloat

from megatron_stare.errors import ConfigError
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
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
LONGEST_ANSWER = 1_000  # characters of an answer that are told
_DETAIL_CHARACTERS = 500  # of an exception's text; a sympy error can print a whole expression tree


def main(verifier: str, fd: int) -> None:
    """Serves until the parent closes its end of the socket `fd`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # A send fails once the parent is gone, just before the reading thread would end the process.
    with (
        socket.socket(fileno=fd) as channel,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        # a program that a verifier starts must not keep the stream open
        channel.set_inheritable(False)
        inbox: SimpleQueue[list[Any]] = SimpleQueue()
        threading.Thread(target=_read, args=(channel, inbox), daemon=True).start()
        try:
            verify = make_verifier(Extension.parse(verifier))
        except ConfigError as error:
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
        Of each, {"reward": a finite float, "answer_at" and "answer": see `verifier_pool.Verdict`},
        or {"error": why there is none}.
    """
    try:
        at = [None if answer_start is None else int(answer_start(each)) for each in responses]
        rewards = rewards_of(verify, responses, answer, columns)
        given = [
            None if normal_answer is None else str(normal_answer(each))[:LONGEST_ANSWER]
            for each in responses
        ]
        return [_message(*each) for each in zip(rewards, at, given, strict=True)]
    except BaseException as error:  # SystemExit too: one answer must not take the process with it
        text = "".join(traceback.format_exception_only(error)).strip()[:_DETAIL_CHARACTERS]
        return [{"error": f"{text} {users_line(error)}".rstrip()}] * len(responses)


def _message(reward: Any, answer_at: int | None, answer: str | None) -> dict[str, Any]:
    if not isinstance(reward, SupportsFloat):
        return {"error": f"the verifier returned {type(reward).__name__}, not a number"}
    value = float(reward)
    if not math.isfinite(value):
        return {"error": f"the verifier returned {value}"}
    return {"reward": value, "answer_at": answer_at, "answer": answer}


def users_line(error: BaseException) -> str:
    """'(file:line, in function)' where the user's code raised; '' where none of it ran.

    That is the innermost frame that is neither ours nor an installed library's: a user looks for
    the line that handed json nonsense, not for the one in json. Of a verifier that is itself
    installed it is the outermost that is not ours.
    """
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)
    ]
    if not frames:
        return ""
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen"))]
    frame = own[-1] if own else frames[0]
    return f"({frame.filename}:{frame.lineno}, in {frame.name})"


def _read(channel: socket.socket, inbox: SimpleQueue[list[Any]]) -> None:
    """Moves what the parent sends into `inbox`; ends the process at the end of the stream."""
    unpacker = Unpacker()
    try:
        while data := channel.recv(_RECEIVE_BYTES):
            for chunk in unpacker.feed(data):
                for item in chunk:
                    inbox.put(item)
    finally:
        with contextlib.suppress(ProcessLookupError):  # not a group leader when started by hand
            os.killpg(os.getpid(), signal.SIGKILL)  # with whatever the verifier has started
        os._exit(0)  # not sys.exit: that would end this thread only


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
