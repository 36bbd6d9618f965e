"""The sandbox `monty`: the attempts of test_sandboxes.py on an interpreter that knows nothing of
the machine. They fail, not skip, where the package is missing, which is part of `.[dev]`."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from environments.test_sandboxes import ATTEMPTS, ESCAPED, MEMORY_MB, ROOT, canary, program, run

from megatron_stare.environments.sandbox_worker import LEFT_OUT
from megatron_stare.environments.sandboxes import Ran, Sandbox, make_sandbox

pytestmark = pytest.mark.wide
__all__ = ["canary"]
# the release that the project installs
(PIN,) = re.findall(
    r"^pydantic-monty==\S+$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE
)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    if importlib.util.find_spec("pydantic_monty") is None:
        pytest.fail(f"the sandbox monty is untested without its package: pip install '{PIN}'")
    made = make_sandbox("monty", None, 2, MEMORY_MB, 2000)
    yield made
    made.close()


def test_without_its_package_these_tests_fail() -> None:
    """Names it, too, instead of skipping the attempts."""
    hides = (
        "import importlib.util as u, sys, pytest\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'pydantic_monty' else find(name, *a)\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    asked = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "at_once", __file__]
    done = subprocess.run(
        [sys.executable, "-c", hides, *asked], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert f"pip install '{PIN}'" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_fails_and_the_next_code_runs(
    attempt: str, box: Sandbox, canary: dict[str, Any]
) -> None:
    """Fails, often because the interpreter lacks what the attempt uses."""
    file = canary["file"]
    before = time.monotonic()
    found = run(box, program(attempt, canary), seconds=2.0)
    assert ESCAPED not in found.output and "secret" not in found.output
    assert len(found.output) < 2000 + 300
    assert time.monotonic() - before < 60
    assert file.read_text() == "the secret" and canary["came"] == []
    for _ in range(2):  # both workers serve on
        found = run(box, "print(6 * 7)")
        assert found == Ran("42\n", False) and found.seconds > 0


def test_programs_run_as_in_python(box: Sandbox) -> None:
    code = "import math\ndef area(r):\n    return math.pi * r**2\nprint(f'{area(2):.3f}')"
    assert run(box, code) == Ran("12.566\n", False)
    found = run(box, "print('first')\n1 / 0")
    assert found.failed and found.output.startswith("first\nTraceback")
    assert found.output.endswith("ZeroDivisionError: division by zero\n")
    assert run(box, "def f(:").failed and run(box, "print('\ud800')").failed is False
    assert run(box, "print('x' * 3000)") == Ran("x" * 2000 + LEFT_OUT, False)
    assert run(box, "left = 1") == Ran("", False)
    # the value of a last expression is not printed, and does not leave the interpreter
    for value in ("[0] * 10**6", "10**10000", "lambda: 0", "x = {}\nx['a'] = x\nx"):
        assert run(box, value) == Ran("", False)
    assert "NameError" in run(box, "print(left)").output  # nothing is left of another program


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "TimeoutError"),
        ("import time\ntime.sleep(1000)", "TimeoutError"),
        ("x = [0] * 10**9", "MemoryError"),
        ("while True: print('x' * 1000)", "TimeoutError"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_limits_hold(code: str, why: str, box: Sandbox) -> None:
    begun = time.monotonic()
    found = run(box, code, seconds=0.5)
    assert found.failed and (why in found.output or found.output.endswith(LEFT_OUT))
    assert time.monotonic() - begun < 30


def test_programs_run_at_once(box: Sandbox) -> None:
    async def all_of_them() -> list[Ran]:
        return await asyncio.gather(*(box.run(f"print({n} * {n})", 5.0) for n in range(64)))

    assert asyncio.run(all_of_them()) == [Ran(f"{n * n}\n", False) for n in range(64)]
