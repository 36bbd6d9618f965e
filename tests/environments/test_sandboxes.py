"""Sandboxes of a policy's code: what it can do there, and 60 attempts to get out or to exhaust the
machine. They fail, not skip, where bubblewrap is missing: `apt-get install bubblewrap`."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml

from megatron_stare.environments import sandboxes
from megatron_stare.environments.sandbox_worker import LEFT_OUT
from megatron_stare.environments.sandboxes import Bubblewrap, Ran, Sandbox, make_sandbox
from megatron_stare.errors import ConfigError, UserError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.wide
MEMORY_MB = 256
COVERED = "MEGATRON_STARE_TEST_PROC_IS_COVERED"


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    made = make_sandbox("bubblewrap", None, 2, MEMORY_MB, 2000)
    yield made
    made.close()


def run(box: Sandbox, code: str, seconds: float = 20.0) -> Ran:
    return asyncio.run(box.run(code, seconds))


def test_programs_as_a_policy_writes_them_run(box: Sandbox) -> None:
    """Every program of benchmarks/snippets.txt runs, as recorded."""
    told = json.loads((ROOT / "benchmarks/results/snippets.json").read_text())
    parts = (ROOT / "benchmarks/snippets.txt").read_text().split("### ")[1:]
    every = dict(part.split("\n", 1) for part in parts)
    assert len(every) == told["programs"] == 100 and told["bubblewrap"]["ran"] == 100
    assert told["monty"]["failed"].keys() <= every.keys()
    failed = {title: ran for title, code in every.items() if (ran := run(box, code)).failed}
    assert not failed


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A file that can be read by all and written by its owner, and sockets that listen, of the
    network and of the file system; both see whoever comes."""
    folder = tmp_path_factory.mktemp("canary")
    folder.chmod(0o777)
    file = folder / "file"
    file.write_text("the secret")
    file.chmod(0o666)
    came: list[str] = []
    tcp = socket.create_server(("0.0.0.0", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    local.listen()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{folder.name}-{os.getpid()}")
    abstract.listen()

    def watch(listening: socket.socket, name: str) -> None:
        try:
            while True:
                listening.accept()
                came.append(name)
        except OSError:
            return

    for listening, name in ((tcp, "tcp"), (local, "local"), (abstract, "abstract")):
        threading.Thread(target=watch, args=(listening, name), daemon=True).start()
    yield {
        "file": file,
        "port": tcp.getsockname()[1],
        "abstract": f"\0{folder.name}-{os.getpid()}",
        "came": came,
    }
    for listening in (tcp, local, abstract):
        listening.close()


# Programs by name; see there.
ATTEMPTS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "escapes.yaml").read_text())
ESCAPED = "ESC" + "APED"  # not in the source, which a trace shows


def program(attempt: str, canary: dict[str, Any]) -> str:
    """Returns the attempt's program, aimed at the canary and at this process."""
    return "def escaped(): print('ESC' + 'APED')\n" + ATTEMPTS[attempt].format(
        file=canary["file"],
        folder=canary["file"].parent,
        port=canary["port"],
        abstract=canary["abstract"],
        pid=os.getpid(),
        node=os.uname().nodename,
    )


def test_there_are_sixty_attempts() -> None:
    assert len(ATTEMPTS) >= 60


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_fails_and_the_next_code_runs(
    attempt: str, box: Sandbox, canary: dict[str, Any]
) -> None:
    file = canary["file"]
    before = file.read_text()
    found = run(box, program(attempt, canary), seconds=2.0)
    assert ESCAPED not in found.output
    # an attempt that is no program would prove nothing
    assert "NameError" not in found.output
    assert "SyntaxError" not in found.output
    assert "secret" not in found.output
    assert len(found.output) < 2000 + 300
    assert file.read_text() == before == "the secret"
    assert canary["came"] == []
    for _ in range(2):  # both workers serve on
        assert run(box, "import numpy; print(6 * 7)") == Ran("42\n", False)


def test_the_canary_is_seen_from_outside(canary: dict[str, Any]) -> None:
    """Makes sure that the attempts look for something that is there."""
    came = canary["came"]
    with socket.create_connection(("127.0.0.1", canary["port"])):
        pass
    for name in (str(canary["file"].parent / "socket"), canary["abstract"]):
        with socket.socket(socket.AF_UNIX) as local:
            local.connect(name)
    while len(came) < 3:
        pass
    assert sorted(came) == ["abstract", "local", "tcp"]
    came.clear()


def test_programs_run_as_in_python(box: Sandbox) -> None:
    code = "import sympy\nx = sympy.Symbol('x')\nprint(sympy.integrate(x**2, (x, 0, 3)))"
    assert run(box, code) == Ran("9\n", False)
    assert run(box, "import sys\nsys.exit('enough')") == Ran("enough\n", True)
    assert run(box, "if __name__ == '__main__': print('é\\ud800')").failed
    found = run(box, "def f():\n    return 1 / 0\n\nprint('first')\nf()")
    assert found.failed
    assert found.output.startswith("first\nTraceback (most recent call last):\n")
    assert 'File "<code>", line 2, in f\n    return 1 / 0' in found.output
    assert "sandbox_worker" not in found.output
    assert run(box, "print('x' * 3000)") == Ran("x" * 2000 + LEFT_OUT, False)
    found = run(box, "print(1, flush=True)\nwhile True: pass", seconds=0.5)
    assert found == Ran(
        "1\nTimeoutError: the code ran for more than 0.5 seconds and was stopped\n", True
    )


def test_nothing_of_the_drivers_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "canary")
    made = make_sandbox("bubblewrap", None, 1, MEMORY_MB, 2000)
    try:
        found = run(made, "import os; print(sorted(os.environ))")
    finally:
        made.close()
    assert not found.failed and "SECRET_TOKEN" not in found.output and "HOME" in found.output


def test_time_is_counted_from_the_programs_start() -> None:
    """Two programs that share a worker take, together, no longer than both took."""
    made = make_sandbox("bubblewrap", None, 1, MEMORY_MB, 2000)

    async def both() -> list[Ran]:
        slow = "import time; time.sleep(0.3)"
        return await asyncio.gather(*(made.run(slow, 20.0) for _ in range(2)))

    try:
        begun = time.monotonic()
        first, second = asyncio.run(both())
        took = time.monotonic() - begun
    finally:
        made.close()
    assert first.seconds >= 0.3 and second.seconds >= 0.3
    assert first.seconds + second.seconds <= took


def test_a_driver_with_thousands_of_open_files_runs_programs() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] < 2000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2000, max(2000, limits[1])))
    held = [os.open("/dev/null", os.O_RDONLY)]
    while held[-1] < 1100:
        held.append(os.dup(held[0]))
    made = make_sandbox("bubblewrap", None, 1, MEMORY_MB, 2000)
    try:
        assert run(made, "print(1)") == Ran("1\n", False)
    finally:
        made.close()
        for number in held:
            os.close(number)


@pytest.mark.slow
@pytest.mark.skipif(COVERED in os.environ, reason="this test runs the others so")
def test_attempts_fail_where_a_part_of_proc_is_covered() -> None:
    """Covers what NVIDIA's container hook covers, so that no sandbox gets a /proc of its own."""
    covers = 'mount -t tmpfs covers /proc/driver && exec "$@"'
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
    ]
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    ran = subprocess.run(
        ["unshare", "--mount", *user, "sh", "-c", covers, "sh", *tests, __file__],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, COVERED: "1"},
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


ALL_OF_THEM = """
import asyncio, json, os, sys
from megatron_stare.environments.sandboxes import make_sandbox

async def told(programs):
    return await asyncio.gather(*(box.run(each, 2.0) for each in programs))

box = make_sandbox("bubblewrap", None, 2, 256, 2000)
ran = asyncio.run(told(json.load(sys.stdin)))
box.close()
print(json.dumps([os.geteuid(), *(each.output for each in ran)]))
"""
NOBODY = 65534


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests have run as a plain user")
@pytest.mark.skipif(COVERED in os.environ, reason="once is enough")
def test_attempts_of_a_plain_user_fail_as_roots_do(canary: dict[str, Any]) -> None:
    """All of them, with the system's Python, since this one may lie where only root reads."""
    system = Path("/usr/bin/python3")
    assert system.exists(), "apt-get install python3"
    every = ["print(6 * 7)", *(program(attempt, canary) for attempt in ATTEMPTS), "print(6 * 7)"]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        shutil.copytree(ROOT / "megatron_stare", Path(name, "megatron_stare"))
        done = subprocess.run(
            [system, "-c", ALL_OF_THEM],
            input=json.dumps(every),
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": name},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    user, first, *outputs, last = json.loads(done.stdout)
    assert (user, first, last) == (NOBODY, "42\n", "42\n")
    assert len(outputs) == len(ATTEMPTS)
    for attempt, output in zip(ATTEMPTS, outputs, strict=True):
        assert ESCAPED not in output and "secret" not in output, attempt
    assert canary["file"].read_text() == "the secret" and canary["came"] == []


def test_covered_or_not(box: Sandbox) -> None:
    """Makes sure that the test above covers what it says, and that no program sees /proc."""
    covered = COVERED in os.environ
    assert (sandboxes._proc()[0] == "--bind") == covered
    assert run(box, "import os; print(os.listdir('/proc'))") == Ran("[]\n", False)


def test_nothing_of_a_code_is_left_for_the_next(box: Sandbox) -> None:
    writes = (
        "import sympy, os; sympy.kept = kept = 1\n"
        "open('/tmp/f', 'w').write('x'); os.environ['K'] = '1'"
    )
    looks = (
        "import sympy, os; print(hasattr(sympy, 'kept'), os.listdir('/tmp'),"
        " os.environ.get('K'), 'kept' in globals())"
    )
    for _ in range(2):
        assert run(box, writes) == Ran("", False)
        assert run(box, looks) == Ran("False [] None False\n", False)
    walks = """import sys
frame, seen = sys._getframe(), 0
while frame:
    for value in [*frame.f_locals.values()]:
        seen += isinstance(value, dict) and 'one alone' in str(value.get('output'))
    frame = frame.f_back
print(seen)"""
    for _ in range(2):  # in both workers, which take turns
        assert run(box, "print('told to one alone')").output == "told to one alone\n"
    for _ in range(2):
        assert run(box, walks) == Ran("0\n", False)
    drawn = {run(box, "import numpy; print(numpy.random.rand())").output for _ in range(4)}
    assert len(drawn) == 4


def test_files_beside_the_python_are_not_seen() -> None:
    """A project's folder may be its environment."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # /tmp is the scratch folder there
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (folder / "answers.jsonl").write_text("the key")
        code = f"""
from megatron_stare.environments.sandboxes import Bubblewrap
box = Bubblewrap(1, 256, 1000)
print(box._run("import os; print(6 * 7, sorted(os.listdir({name!r})))", 20))
print(box._run("print(open({name!r} + '/answers.jsonl').read())", 20))
box.close()
"""
        done = subprocess.run(
            [folder / "bin/python", "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert "42 ['bin', 'lib', 'lib64', 'pyvenv.cfg']" in done.stdout, done.stdout + done.stderr
    assert "FileNotFoundError" in done.stdout and "the key" not in done.stdout


def test_a_lost_worker_is_replaced_and_none_is_left(tmp_path: Path) -> None:
    me = psutil.Process()
    before = set(me.children(recursive=True))
    made = make_sandbox("bubblewrap", None, 1, MEMORY_MB, 100)
    assert run(made, "print(1)").output == "1\n"
    started = set(me.children(recursive=True)) - before
    for process in started:
        process.kill()
    assert run(made, "print(2)") == Ran("the sandbox's process was lost and is replaced\n", True)
    assert run(made, "print(3)") == Ran("3\n", False)
    started |= set(me.children(recursive=True)) - before
    made.close()
    assert not [each for each in psutil.wait_procs(started, timeout=10)[1] if each.is_running()]


def test_a_code_cannot_say_that_its_sandbox_is_broken_or_its_time_over(box: Sandbox) -> None:
    for code in (1, 124, 125):
        assert run(box, f"import os; print(7, flush=True); os._exit({code})") == Ran("7\n", True)
    assert run(box, "import os; os.write(3, b'1')").failed
    assert "with 9" in run(box, "import os; os._exit(9)").output


def test_a_code_that_cannot_be_confined_is_not_run() -> None:
    """No limit is as large as this one."""
    made = make_sandbox("bubblewrap", None, 1, 1 << 50, 100)
    for _ in range(2):
        with pytest.raises(UserError, match="cannot isolate code") as told:
            run(made, "print(1)")
    assert "memory_mb" in str(told.value)
    made.close()


def test_without_bubblewrap_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sandboxes.why_not_isolated.cache_clear()
    with pytest.raises(ConfigError, match="bubblewrap is not installed"):
        make_sandbox("bubblewrap", None, 1, MEMORY_MB, 100)
    sandboxes.why_not_isolated.cache_clear()


class Fusion(BaseHTTPRequestHandler):
    """Answers as SandboxFusion does; as often as it is told to, with its error first."""

    asked: ClassVar[list[dict[str, Any]]] = []
    answers: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        read = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, **read})
        body = json.dumps(self.answers.pop(0)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


def test_a_sandbox_that_is_closed_ends_what_runs_in_it() -> None:
    """A program may run for long, and others wait for its worker."""
    others = set(psutil.Process().children(recursive=True))  # of sandboxes of other tests
    made = make_sandbox("bubblewrap", None, 1, MEMORY_MB, 2000)
    assert isinstance(made, Bubblewrap)
    assert run(made, "print(1)") == Ran("1\n", False)

    async def story() -> list[Any]:
        tasks = [asyncio.create_task(made.run("import time; time.sleep(600)", 600.0)) for _ in "ab"]
        while not made._free.empty():  # until the first has the worker: close drops what waits
            await asyncio.sleep(0)
        await asyncio.to_thread(made.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    ended, waited = asyncio.run(story())
    assert ended.failed and isinstance(waited, asyncio.CancelledError)
    children = set(psutil.Process().children(recursive=True)) - others
    assert not [each for each in children if each.name() == "bwrap"]
    made.close()


def test_a_server_that_does_not_answer_does_not_keep_a_finished_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        program = f"""
import asyncio
from megatron_stare.environments.sandboxes import make_sandbox
box = make_sandbox("remote", "http://127.0.0.1:{silent.getsockname()[1]}", 1, {MEMORY_MB}, 5)
async def story():
    task = asyncio.create_task(box.run("x", 600.0))
    await asyncio.sleep(0.1)
    task.cancel()
asyncio.run(story())
box.close()
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_a_sandbox_by_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "FIRST_PAUSE_S", 0.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    made = make_sandbox("remote", url, 2, MEMORY_MB, 5)

    def result(of: str, **values: Any) -> dict[str, Any]:
        return {"status": of, "message": "", "compile_result": None, "run_result": values}

    Fusion.answers[:] = [
        {"status": "SandboxError", "message": "busy"},
        result("Success", status="Finished", return_code=0, stdout="42\n", stderr=""),
        result("Failed", status="Finished", return_code=1, stdout="a", stderr="bad"),
        result("Failed", status="TimeLimitExceeded", stdout="", stderr=""),
        *([{"status": "SandboxError", "message": "busy"}] * 5),
    ]
    found = run(made, "print(42)", 3.0)
    assert found == Ran("42\n", False) and found.seconds > 0
    assert Fusion.asked[1]["path"] == "/run_code"
    assert (Fusion.asked[1]["code"], Fusion.asked[1]["language"]) == ("print(42)", "python")
    assert Fusion.asked[1]["run_timeout"] == 3.0
    assert run(made, "x") == Ran("abad", True)
    assert run(made, "x") == Ran("Timeo" + LEFT_OUT, True)
    with pytest.raises(UserError, match="did not answer in 5 attempts: busy"):
        run(made, "x")
    made.close()
    server.shutdown()
    server.server_close()
