"""The verifiers beside that of mathematics, and how a configuration names them."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from megatron_stare.config.schema import Config
from megatron_stare.data import reasoning_gym
from megatron_stare.errors import ConfigError
from megatron_stare.rewards import dapo_verifier
from megatron_stare.rewards.http_verifier import ATTEMPTS, HttpVerifier
from megatron_stare.rewards.known_answers import open_pool
from megatron_stare.rewards.verifier import VERIFIERS, answer_start_of, make_verifier

# in tests of their own; that of reasoning_gym needs its package
ELSEWHERE = {"math", "math_verify", "reasoning_gym", "environment"}


@pytest.mark.parametrize("name", sorted(set(VERIFIERS) - ELSEWHERE))
def test_each_brings_answers_that_it_must_judge_right_and_wrong(name):
    verify = make_verifier(name)
    module = __import__(verify.__module__, fromlist=["KNOWN_ANSWERS"])
    known = getattr(module, "KNOWN_ANSWERS", ())
    assert name == "arithmetic" or {reward for _, _, reward in known} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (r"x = \frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ("1,234", "1234"),
        ("1,2", "12"),
        ("(1,2)", "(1,2)"),
        ("so $5$ it is, or $6$", "5"),
        (r"5\text{ and }6", "56"),
        (r"5,\text{and}6", "56"),
        (r"90^\circ", "90"),
        (r"\text{}^2 12 square feet", "12"),
        (r"\boxed{7}", "7"),
        (r"\textbf{(B)}", "(B)"),
    ],
)
def test_dapos_normalisation(text, left):
    assert dapo_verifier.normalised(text) == left


def test_dapo_looks_at_the_last_300_characters():
    assert dapo_verifier.verify("Answer: 5\n" + "x" * 290, "5") == 1.0
    assert dapo_verifier.verify("Answer: 5\n" + "x" * 291, "5") == 0.0
    assert dapo_verifier.answer_start("x" * 1_000 + "\nAnswer: 5") == 1_001
    assert dapo_verifier.answer_start("Answer: 5\n" + "x" * 290) == 0
    assert dapo_verifier.answer_start("Answer: 5\n" + "x" * 291) == -1


@pytest.mark.parametrize(
    ("name", "response", "answer", "reward"),
    [
        ("numeric", r"\boxed{1.0000005}", "1", 1.0),
        ("numeric", r"\boxed{1.00001}", "1", 0.0),
        ("numeric", r"\boxed{1} <answer>2</answer>", "2", 1.0),
        ("numeric", r"<answer>2</answer> \boxed{1}", "2", 0.0),
        ("numeric", r"<answer>2", "2", 0.0),
        ("exact", r"\boxed{1} <answer>2", "1", 0.0),
        ("choice", r"\boxed{\text{A and C}}", "C, A", 1.0),
        ("choice", r"\boxed{A, A}", "A, C", 0.0),
        ("format", r"</think><think>\boxed{1}", "1", 0.0),
    ],
)
def test_where_the_answer_stands_and_what_it_is(name, response, answer, reward):
    assert make_verifier(name)(response, answer) == reward


@pytest.mark.parametrize(
    ("response", "start"),
    [
        (r"So \boxed{1} or \boxed{2}", 16),
        (r"So \boxed{1} or <answer>2</answer>", 16),
        (r"So <answer>2</answer> or \boxed{1}", 25),
        ("So <answer>2", -1),
        ("So <answer> </answer>", -1),
        ("So 2", -1),
    ],
)
def test_where_a_box_or_a_tag_begins(response, start):
    assert answer_start_of(make_verifier("exact"))(response) == start


@pytest.mark.parametrize("name", ["numeric", "choice"])
def test_a_reference_that_cannot_be_is_an_error_and_not_a_wrong_answer(name):
    with pytest.raises(ValueError, match="reference"):
        make_verifier(name)(r"\boxed{A}", "Paris")


def test_a_sum_of_verifiers():
    verify = make_verifier("exact + 0.25 * format + -1 * choice")
    assert verify(r"\boxed{Rome}", "B") == 0.25
    assert verify(r"\boxed{B}", "B") == 1 + 0.25 - 1
    assert answer_start_of(verify)(r"ab\boxed{B}") == 2
    for name in ("exact + ", "exact * 2", "0.5 exact"):
        with pytest.raises(ConfigError, match=r"neither a verifier|unknown name"):
            make_verifier(name)


def test_a_function_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text(
        "def verify(response, answer):\n    return len(response)\n\n\nKNOWN_ANSWERS = [('abc', '',"
        " 3.0)]\n"
    )
    (tmp_path / "worse.py").write_text(
        "def verify(response, answer):\n    return 1\n\n\nKNOWN_ANSWERS = [('a', '', 0)]\n"
    )
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert make_verifier("judge.py:verify")("four", "") == 4
    assert make_verifier(f"0.5 * {tmp_path}/judge.py:verify")("four", "") == 2
    with pytest.raises(ConfigError, match=r"'a' against '' earns 1.0, expected 0"):
        make_verifier("worse.py:verify")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError.*broken.py:2"):
        make_verifier("broken.py:verify")
    with pytest.raises(ConfigError, match="there is no file"):
        make_verifier("missing.py:verify")
    with pytest.raises(ConfigError, match="did you mean 'verify'"):
        make_verifier("judge.py:verfy")


@pytest.fixture
def server():
    """A judge over HTTP that answers as its list `plan` says, then with whether the answer is in
    the response."""

    class Judge(BaseHTTPRequestHandler):
        plan: ClassVar[list[int]] = []
        seen: ClassVar[list[dict[str, str]]] = []

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.seen.append(asked)
            status = self.plan.pop(0) if self.plan else 200
            if status == 0:  # hangs up
                self.close_connection = True
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(
                json.dumps({"reward": float(asked["answer"] in asked["response"])}).encode()
            )

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/judge", Judge
        httpd.shutdown()
        thread.join()


def test_a_server_is_asked_again_where_that_may_help(server):
    url, judge = server
    verify = HttpVerifier(url, first_pause_s=0)
    judge.plan[:] = [503, 0, 429]
    assert verify("it is 5 \ud800", "5") == 1.0
    assert judge.seen == [{"response": "it is 5 \ud800", "answer": "5"}] * 4
    judge.plan[:] = [404]
    with pytest.raises(ValueError, match="404"):
        verify("a", "b")
    assert len(judge.seen) == 5
    judge.plan[:] = [500] * ATTEMPTS
    with pytest.raises(ConnectionError, match=f"{ATTEMPTS} attempts"):
        verify("a", "b")
    assert judge.plan == [] and len(judge.seen) == 5 + ATTEMPTS


def test_the_users_known_answers_are_judged_through_the_pool(server, tmp_path):
    url, _ = server
    file = tmp_path / "known.jsonl"
    right = {"response": "it is 5", "answer": "5", "reward": 1}
    file.write_text(json.dumps(right) + "\n\n")
    config = Config.model_validate(
        {"model": {"path": "m"}, "reward": {"verifier": url, "known_answers": str(file)}}
    )
    open_pool(url, config, workers=1).close()
    file.write_text(json.dumps(right) + "\n" + json.dumps({**right, "answer": "6"}))
    with pytest.raises(
        ConfigError,
        match=r"1 of 2 known answers wrong: 'it is 5' against '6' earns 0.0, expected 1.0",
    ):
        open_pool(url, config, workers=1)
    open_pool("exact", config, workers=1).close()  # another task's verifier: they are not about it
    for text, what in (("", "no answers"), ("{}", r"known.jsonl:1: expected"), ("[1]", "expected")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=what):
            open_pool(url, config, workers=1)


def test_a_task_of_a_package_that_is_missing_is_refused(monkeypatch):
    """tests/peers/test_reasoning_gym.py has what it does where it is installed."""
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    reasoning_gym._make_task.cache_clear()
    reasoning_gym.make_entry.cache_clear()
    with pytest.raises(ConfigError, match=r"reasoning-gym is not installed(.|\n)*\[tools\]"):
        make_verifier("reasoning_gym")
    with pytest.raises(ValueError, match="not of the source"):
        reasoning_gym.verify("<answer>1</answer>", "", columns={})
