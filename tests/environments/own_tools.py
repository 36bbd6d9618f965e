"""Tools of a user's, as docs/environments.md has them."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

ALL = threading.Barrier(256)


def add(first: int, second: int = 0) -> str:
    """
    Adds two numbers.

    Args:
        first: a number
        second: another
    """
    return str(first + second)


def fails(text: str) -> str:
    """
    Fails.

    Args:
        text: anything
    """
    raise ValueError(f"no {text}")


def waits(text: str) -> str:
    """
    Waits until 256 calls wait.

    Args:
        text: anything
    """
    ALL.wait(60)
    return text


async def never(text: str) -> str:
    """
    Answers never.

    Args:
        text: anything
    """
    await asyncio.Event().wait()
    return text


def repeats(text: str, call_id: str) -> dict:
    """
    Repeats a text.

    Args:
        text: any text
    """
    return {"text": text, "id": call_id}


def echoes(text: str) -> str:
    """
    Answers with the text.

    Args:
        text: any text
    """
    return text


def code_interpreter(code: str, call_id: str) -> str:
    with Path(os.environ["TOOL_LOG"]).open("a") as log:
        log.write(json.dumps([call_id, code]) + "\n")
    order = Path(os.environ["KILL_AT"])
    if order.exists() and len(Path(os.environ["TOOL_LOG"]).read_text().splitlines()) >= int(
        order.read_text()
    ):
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(os.environ.get("CALL_SECONDS", "0")))  # benchmarks/killed_calls.py
    return str(len(code))


code_interpreter.schema = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Python",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


def no_words(text: str) -> str:
    return text


def no_type(text) -> str:
    """
    Has no type.

    Args:
        text: anything
    """
    return text


def marks(path: str) -> str:
    """
    Makes an empty file.

    Args:
        path: of the file
    """
    Path(path).touch()
    return path


def reads(path: str) -> str:
    """Reads a file, or waits for the other end of a pipe.

    Args:
        path: of the file
    """
    with open(path) as file:
        return file.read()


def looks_up(word: str, *, table: str, call_id: str) -> str:
    """
    Looks a word up.

    Args:
        word: the word
        table: the table, a setting
    """
    return f"{table}:{word}"


def described(word: str, *, table: str) -> str:
    return f"{table}:{word}"


described.schema = {
    "type": "function",
    "function": {"name": "described", "parameters": {"type": "object"}},
}


def evaluates(text: str) -> str:
    """
    Evaluates an expression.

    Args:
        text: the expression
    """
    return str(eval(text))


async def evaluates_later(text: str) -> str:
    """
    Evaluates an expression.

    Args:
        text: the expression
    """
    return str(eval(text))
