"""A run's way of asking sglang-router itself, in front of two real servers that are attached to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import sglang_servers as servers
from support.replicas import TOKENIZER, Replicas, judged

from megatron_stare.config.schema import Config
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import WeightVersionError
from megatron_stare.process.network import LOOPBACK, free_port
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.rollout.engines.sglang import server
from megatron_stare.rollout.engines.sglang.client import SGLangClient, UnansweredError
from megatron_stare.rollout.engines.sglang.replica import SGLangReplica
from megatron_stare.rollout.engines.sglang.server_checks import API_KEY_VARIABLE
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.server_options import PORTS
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.fleet.retries import RequestRule
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.turns import check_versions

ROUTER = os.environ.get("MEGATRON_STARE_ROUTER_PYTHON", "")
MISSING = servers.MISSING or (
    None
    if ROUTER
    else (
        "no sglang-router: pip install sglang-router==0.3.2 in an environment of its own, and name "
        "its python in MEGATRON_STARE_ROUTER_PYTHON"
    )
)
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]
KEY, VERSION, TOKENS = "k" * 32, 3, 20
WORDS = (5, 9)  # all that each of the servers says
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=TOKENS, seed=1, step=1, stop_token_ids=(1,))
CONFIG = Config.model_validate(
    {"model": {"path": str(servers.MODEL)}, "rollout": {"max_new_tokens": TOKENS}}
)
PROMPTS = [Prompt(n, str(n), "", "", (2, 3 + n)) for n in range(8)]
SAMPLES, UP_S = 4, 60.0


@pytest.fixture(scope="module")
def started() -> Iterator[list[SGLangEngine]]:
    """Two servers of one key, as those of a cluster would be."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server.secrets, "token_hex", lambda count=0: KEY)
        with servers.several(2) as engines:
            patched.undo()
            yield engines


@contextlib.contextmanager
def routed(urls: Sequence[str], log: Path, *flags: str) -> Iterator[str]:
    """The URL of a router in front of them, that answers once it has found all of them."""
    port, metrics = (
        free_port(LOOPBACK, PORTS),
        free_port(LOOPBACK, PORTS),
    )
    asked = [
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        "--prometheus-port",
        str(metrics),
        "--api-key",
        KEY,
    ]
    asked += ["--policy", "round_robin", "--worker-urls", *urls, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [ROUTER, "-m", "sglang_router.launch_router", *asked],
            stdout=output,
            stderr=output,
            cwd=log.parent,
        )
    url = f"http://{LOOPBACK}:{port}"
    try:
        asyncio.run(asyncio.wait_for(healthy(url, len(urls), process, log), UP_S))
        yield url
    finally:
        process.kill()
        process.wait()


async def healthy(url: str, count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when so many servers are reachable behind the router."""
    client = SGLangClient(url, KEY, UP_S)
    try:
        while True:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(UnansweredError):
                workers = (await client.get("/workers"))["workers"]
                if sum(worker["is_healthy"] for worker in workers) == count:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(server.PROBE_EVERY_S)
    finally:
        await client.close()


@contextlib.contextmanager
def engines(
    monkeypatch: pytest.MonkeyPatch, started: Sequence[SGLangEngine], router: str, **limits: Any
) -> Iterator[list[SGLangEngine]]:
    """Engines of a run that is told of the servers and the router by its settings alone."""
    urls = [engine.process.url for engine in started if engine.process is not None]
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    config = servers.config(engines=len(urls), urls=urls, router=router, **limits)
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(len(urls)):
            replica = SGLangReplica(config, number)
            made.append(replica.engine())
            stack.callback(made[-1].close)
        yield made


def rolled_out(
    made: Sequence[SGLangEngine], rule: RequestRule, *progress: Any
) -> tuple[list[Any], Counter[str]]:
    pool = EnginePool(Replicas(made), rule=rule)
    found = Rollouts(pool, SingleTurn(CONFIG, TOKENIZER), judged).make(
        PROMPTS, SAMPLES, PARAMS, *progress
    )
    return found, pool._requests


def said(found: Sequence[Any]) -> Counter[int]:
    """How many responses say nothing but a word, by that word; every sample of every prompt is
    there once."""
    assert [(t.prompt.cursor, t.sample_index) for t in found] == [
        (p.cursor, i) for p in PROMPTS for i in range(SAMPLES)
    ]
    assert all(t.tokens.tolist() == [t.tokens[0]] * TOKENS for t in found)
    return Counter(int(t.tokens[0]) for t in found)


def test_a_routers_answers_are_those_of_the_servers_behind_it(
    monkeypatch, started, tmp_path
) -> None:
    """One engine asks, and both servers respond, with log-probs and versions; the weights went to
    each server itself. One that is not synced along is found by its tokens."""
    urls = [engine.process.url for engine in started]
    with (
        routed(urls, tmp_path / "router.log") as router,
        engines(monkeypatch, started, router) as made,
    ):
        for engine, word in zip(made, WORDS, strict=True):
            servers.sync(engine, VERSION, servers.says_only(word))
        found, requests = rolled_out(made[:1], RequestRule())
        assert said(found).keys() == set(WORDS) and not requests["rollout/retried"]
        assert all(abs(float(log_prob)) < 1e-3 for t in found for log_prob in t.log_probs)
        check_versions(found, VERSION)
        servers.sync(made[0], VERSION + 1, servers.says_only(WORDS[0]))
        found, _ = rolled_out(made[:1], RequestRule())
        with pytest.raises(
            WeightVersionError, match=rf"version {VERSION}: .*version {VERSION + 1}: "
        ):
            check_versions(found, VERSION + 1)


def test_a_server_that_is_lost_behind_a_router_loses_no_rollout(
    monkeypatch, started, tmp_path
) -> None:
    """Killed in the middle of its responses, with no engine but its own: they come from the other
    server."""
    urls = [engine.process.url for engine in started]
    with (
        routed(urls, tmp_path / "router.log") as router,
        engines(monkeypatch, started, router) as made,
    ):
        for engine in made:
            servers.sync(engine, VERSION + 2, servers.says_only(WORDS[0]))
        killed: list[int] = []

        def progress(done: int, wanted: int) -> None:
            if done and not killed:
                killed.append(started[1].process.process_group)
                os.killpg(killed[0], signal.SIGKILL)

        found, _ = rolled_out(made[1:], RequestRule(attempts=6, back_off_s=0.1), progress)
        assert killed and said(found) == {WORDS[0]: len(PROMPTS) * SAMPLES}
        check_versions(found, VERSION + 2)
