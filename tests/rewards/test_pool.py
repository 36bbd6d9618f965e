"""The reward pool against verifiers that hang, crash, lie and print. Every process, kill and crash
is real."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_stare.errors import ConfigError
from megatron_stare.rewards.verifier_pool import TooManyFailuresError, Verdict, VerifierPool

OBEY = "support.verifiers.obey"
LINES = Path(__file__).parents[1] / "support" / "verifiers.py"
RIGHT, WRONG = ("yes", "yes"), ("no", "yes")
OK, ZERO = Verdict(1.0, "ok"), Verdict(0.0, "ok")


@pytest.fixture(scope="module")
def pool():
    """A pool that tests may hurt; it has to recover for the next one."""
    with VerifierPool(OBEY, workers=2, timeout_s=1) as pool:
        yield pool


def line_of(text: str) -> int:
    """Line on which a text first stands among the verifiers."""
    return next(n for n, line in enumerate(LINES.read_text().splitlines(), 1) if text in line)


def gone(pid: int, within_s: float) -> bool:
    """Checks that a process ends in time; the process need not be a child of this one."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def test_verdicts_come_back_in_order(pool):
    texts = [RIGHT if i % 3 else WRONG for i in range(500)]
    assert pool.verify(texts) == [OK if i % 3 else ZERO for i in range(500)]
    assert pool.verify([]) == []
    assert pool.verify([RIGHT]) == [OK]


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_hang_costs_itself_alone(pool, how):
    before = pool.pids
    verdicts = pool.verify([RIGHT] * 100 + [(how, "")] + [WRONG] * 100)
    assert verdicts[:100] == [OK] * 100
    assert verdicts[100] == Verdict(0.0, "timeout", "no verdict within 1 s")
    assert verdicts[101:] == [ZERO] * 100
    assert len(set(before) & set(pool.pids)) == 1
    assert all(gone(pid, 0) for pid in set(before) - set(pool.pids))


def test_every_answer_of_a_share_has_the_whole_limit():
    """Together they take longer than one may."""
    with VerifierPool(OBEY, workers=1, timeout_s=2) as pool:  # its first share is half of them
        assert pool.verify([("slow 0.5", "slow 0.5")] * 10) == [OK] * 10


def test_several_hangs_in_one_share(pool):
    verdicts = pool.verify([RIGHT, ("hang", ""), ("hang", ""), RIGHT] * 2)
    assert [verdict.status for verdict in verdicts] == ["ok", "timeout", "timeout", "ok"] * 2


CRASHES = {  # by what the verifier does, what is said of it
    "exit": "the worker exited with code 3",
    "kill": "the worker was killed by SIGKILL",
    "sys.exit": f"SystemExit: leaving ({LINES}:{line_of('sys.exit(')}, in obey)",
    "raise": f"ValueError: no such unit: furlong ({LINES}:{line_of('raise ValueError')}, in obey)",
    "nan": "the verifier returned nan",
    "inf": "the verifier returned inf",
    "text": "the verifier returned str, not a number",
    "none": "the verifier returned NoneType, not a number",
}


@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_costs_itself_alone(pool, how):
    verdicts = pool.verify([RIGHT] * 40 + [(how, "")] + [WRONG] * 40)
    assert verdicts == [OK] * 40 + [Verdict(None, "crash", CRASHES[how])] + [ZERO] * 40


def test_a_crash_inside_a_library_shows_the_users_line(pool):
    (verdict,) = pool.verify([("parse", "")])
    assert verdict.status == "crash"
    assert verdict.detail.startswith("json.decoder.JSONDecodeError: ")
    assert verdict.detail.endswith(f"({LINES}:{line_of('json.loads(')}, in obey)")


@pytest.mark.parametrize(("borne", "tried"), [(0, 1), (2, 3)])
def test_answers_are_not_waited_for_once_too_many_have_failed(tmp_path, borne, tried):
    """One worker, which tries an answer at a time: each that hangs is one try."""
    asked = tmp_path / "asked"
    with VerifierPool(OBEY, workers=1, timeout_s=1) as pool:
        with pytest.raises(TooManyFailuresError) as stopped:
            pool.verify([(f"tried {asked}", "")] * 64, most_failures=borne)
        assert asked.read_text() == "x" * tried
        assert stopped.value.failed == [Verdict(0.0, "timeout", "no verdict within 1 s")] * tried
        assert stopped.value.known == tried
        assert pool.pids == []  # nobody waits for what is under way


def test_failures_up_to_the_limit_are_borne(pool):
    texts = [RIGHT, ("raise", ""), RIGHT, ("hang", ""), WRONG]
    assert [s.status for s in pool.verify(texts, most_failures=2)] == [
        "ok",
        "crash",
        "ok",
        "timeout",
        "ok",
    ]


def test_every_answer_crashing_is_still_an_answer_each(pool):
    assert {verdict.status for verdict in pool.verify([("exit", "")] * 5)} == {"crash"}
    assert pool.verify([RIGHT]) == [OK]


def test_numbers_of_other_kinds_and_interrupts_are_harmless(pool):
    assert [
        verdict.reward
        for verdict in pool.verify([("true", ""), ("int", ""), ("interrupt", "interrupt")])
    ] == [
        1,
        2,
        1,
    ]


def test_prints_go_to_stderr(capfd):
    with VerifierPool(OBEY, workers=1, timeout_s=5) as pool:
        assert pool.verify([("print", "print")]) == [OK]
    assert capfd.readouterr() == ("", "noise\n")


def test_a_worker_that_died_between_calls_costs_nothing():
    with VerifierPool(
        OBEY, workers=2, timeout_s=5
    ) as pool:  # its own: a successor may still be starting in a shared one
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert pool.verify([RIGHT] * 10) == [OK] * 10


def test_a_worker_that_is_killed_costs_no_answer(pool, tmp_path):
    """From outside, in the middle of an answer: that one is judged by another worker, and those
    behind it once."""
    (tmp_path / "order").touch()
    killing = f"kill once {tmp_path / 'order'}"
    verdicts = pool.verify([RIGHT] * 10 + [(killing, killing)] + [WRONG] * 10, most_failures=0)
    assert verdicts == [OK] * 11 + [ZERO] * 10
    assert not (tmp_path / "order").exists()


@pytest.mark.parametrize("times", [2, 3])
def test_a_worker_that_is_killed_as_it_starts_is_started_again_and_not_for_ever(
    tmp_path, monkeypatch, times
):
    orders = tmp_path / "orders"
    orders.write_text("x" * times)
    monkeypatch.setenv("KILL_AT_START", str(orders))
    verifier = "support.verifier_that_is_killed.verify"
    if times == 2:
        with VerifierPool(verifier, workers=1, timeout_s=5) as pool:
            assert pool.verify([RIGHT]) == [OK]
    else:
        with pytest.raises(ConfigError, match="was killed by SIGKILL as it started"):
            VerifierPool(verifier, workers=1, timeout_s=5)
    assert orders.read_text() == ""


def test_long_and_broken_texts_arrive(pool):
    long = "9" * 300_000  # a share of these is more than a socket holds
    assert pool.verify([(long, long), ("\ud800é\n\0", "\ud800é\n\0")] * 20) == [OK] * 40


def test_what_a_verifier_started_dies_with_it(tmp_path):
    with VerifierPool(OBEY, workers=1, timeout_s=2) as pool:
        (verdict,) = pool.verify([(f"child {tmp_path / 'pid'}", "")])
    assert verdict.status == "timeout"
    assert gone(int((tmp_path / "pid").read_text()), within_s=5)


def test_256_short_answers_are_quick():
    with VerifierPool("arithmetic", workers=2, timeout_s=5) as pool:
        texts = [("27+58=85;85+14=99", "99")] * 256
        pool.verify(texts)

        def seconds():
            start = time.perf_counter()
            assert [verdict.reward for verdict in pool.verify(texts)] == [1.0] * 256
            return time.perf_counter() - start

        # the best: the machine may be busy with something else
        assert min(seconds() for _ in range(5)) < 0.05


@pytest.mark.parametrize(
    ("verifier", "complaint"),
    [
        ("arithmetics", "did you mean 'arithmetic'"),
        ("no_such_module.verify", "cannot import 'no_such_module'"),
        ("support.verifiers.no_such_function", "unknown name 'no_such_function'"),
        ("support.verifiers.not_a_function", "is not a function"),
        ("support.verifier_that_raises.verify", "RuntimeError: licence file not found"),
        ("support.verifier_that_exits.verify", "exited with code 7 as it started"),
        (
            "support.verifier_that_leaves.verify",
            r"sys\.exit\(3\) was called \(.*verifier_that_leaves\.py:11, in self_test\)",
        ),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_refused_at_once(verifier, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        VerifierPool(verifier, workers=2, timeout_s=1)
    assert error.value.where == "reward.verifier"


def test_close_leaves_no_process():
    pool = VerifierPool(OBEY, workers=3, timeout_s=1)
    pids = pool.pids
    pool.close()
    pool.close()
    assert len(pids) == 3
    assert all(gone(pid, 0) for pid in pids)
    with pytest.raises(ValueError, match="closed"):
        pool.verify([RIGHT])


@pytest.fixture
def interruptible():
    """Whatever this process inherited: SIGINT raises KeyboardInterrupt, until the test has
    ended."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_closes_the_pool():
    pool = VerifierPool(OBEY, workers=2, timeout_s=60)
    pids = pool.pids
    main = threading.get_ident()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.verify([("hang", "")] * 4)
    timer.join()
    assert all(gone(pid, 0) for pid in pids)


def test_workers_leave_when_the_parent_is_killed(tmp_path):
    # One worker is idle, the other hangs in its verifier after starting a process: all three have
    # to go.
    os.mkfifo(tmp_path / "pid")
    script = f"""
from megatron_stare.rewards.verifier_pool import VerifierPool
pool = VerifierPool({OBEY!r}, workers=2, timeout_s=600)
print(*pool.pids, flush=True)
pool.verify([("child {tmp_path / "pid"}", "")])
"""
    path = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        # waits for the verifier to have written it
        pids.append(int((tmp_path / "pid").read_text()))
        parent.kill()
    assert len(pids) == 3
    assert all(gone(pid, within_s=5) for pid in pids)


def test_the_pool_and_its_workers_do_without_torch():
    script = """
import sys
import megatron_stare.rewards.verifier_pool, megatron_stare.rewards.worker
import megatron_stare.rewards.math_verifier, megatron_stare.rewards.arithmetic_verifier
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_verifier_may_say_where_the_answer_stands_and_what_it_is():
    with VerifierPool("arithmetic", workers=1, timeout_s=5) as pool:
        verdicts = pool.verify([("1+2=3;3+4=7", "7"), ("1+2=3;", "7")])
    said = [(verdict.reward, verdict.answer_at, verdict.answer) for verdict in verdicts]
    assert said == [(1.0, 9, "7"), (0.0, -1, "")]
