"""Verifiers that misbehave on demand. Workers import them by path: pytest puts tests/ on
sys.path."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading


def obey(response: str, answer: str):
    """Does what the response says; anything else is compared with the answer."""
    if response == "hang":
        threading.Event().wait()
    if response == "spin":
        while True:
            pass
    # starts a process that outlives it, writes its id, then hangs
    if response.startswith("child "):
        child = subprocess.Popen(
            [sys.executable, "-c", "import threading; threading.Event().wait()"]
        )
        with open(response.removeprefix("child "), "w") as file:
            file.write(str(child.pid))
        threading.Event().wait()
    if response.startswith("slow "):  # takes so many seconds
        threading.Event().wait(float(response.removeprefix("slow ")))
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit("leaving")
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response.startswith("kill once "):  # as somebody else would, while the file is there
        order = pathlib.Path(response.removeprefix("kill once "))
        if order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    if response == "raise":
        raise ValueError("no such unit: furlong")
    if response == "parse":
        json.loads("{]")
    if response.startswith("tried "):  # notes that it was asked, then hangs
        with open(response.removeprefix("tried "), "a") as file:
            file.write("x")
        threading.Event().wait()
    if response == "print":
        print("noise", flush=True)
    if response == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    special = {
        "nan": float("nan"),
        "inf": float("inf"),
        "text": "1.0",
        "none": None,
        "true": True,
        "int": 2,
    }
    return special.get(response, float(response == answer))


not_a_function = 3
