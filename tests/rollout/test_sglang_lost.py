"""Two real servers of which one is lost, is slow or fails: what was asked of it is made by the
other, and it comes back with all weights proven before it is asked anything."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support import sglang_servers as servers
from support.fleet import BACK_S, Run, transitions
from support.sglang_listening import listening
from support.sglang_proxy import Proxy

from megatron_stare.config.schema import Config
from megatron_stare.rollout.fleet.health import Health, NoEngineError

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING)),
]
BACK = ["dead", "starting", "dirty", "healthy"]  # how a lost replica comes to serve again
PROBE_S = 8.0  # of a machine that runs other tests as well


def config(sync: str) -> Config:
    plain = servers.config(engines=2, python=servers.PYTHON, sync=sync).model_dump()
    restarts = {"probe_s": PROBE_S, "back_off_s": 0.0, "most": 99}
    return Config.model_validate(
        {**plain, "faults": {"engines": restarts}, "runtime": {"timeout_s": 120}}
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Run]:
    run = Run(config("distributed"), 2)
    try:
        run.publish()
        yield run
    finally:
        run.close()


@pytest.fixture
def run(shared: Run) -> Run:
    """With both replicas serving, and nothing told yet."""
    assert shared.health == [Health.HEALTHY] * 2
    shared.pool.news()
    return shared


def group(run: Run, number: int) -> int:
    return run.engine(number).process.process_group


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_hung_while_it_generates(run: Run, how: signal.Signals) -> None:
    """Once it has given its first response, with others of it under way. One that hangs is found
    out long before the limit of a request, 40 s here; the other one's process is never touched."""
    lost, left = group(run, 0), group(run, 1)
    signalled: list[int] = []

    def progress(made: int, wanted: int) -> None:
        if made and not signalled:
            assert run.engine(0)._under_way  # it is in the middle of some
            os.killpg(lost, how)
            signalled.append(made)

    run.roll_out(progress)
    assert signalled and run.health[1] is Health.HEALTHY
    retried = run.pool._requests
    assert retried["rollout/retried"] > 0
    assert (retried["rollout/retried_late"] > 0) == (how is signal.SIGSTOP)
    run.publish()  # by the one that is left; the other is still on its way up
    assert run.pool.metrics["engine/serving"] == 1.0 and run.pool.metrics["engine/dead"] == 1.0
    run.roll_out()
    run.bring_back(0)
    assert transitions(run.pool.news(), 0) == BACK
    before = run.asked(0)
    run.roll_out()
    assert run.asked(0) > before
    assert not os.path.exists(f"/proc/{lost}") and group(run, 1) == left


@pytest.mark.parametrize("moment", ["middle", "proof"])
def test_killed_during_a_weight_sync(run: Run, moment: str) -> None:
    """Between two buckets, and when all are sent and it is to prove them: the other one holds all
    weights, proved, and the same call of `update_weights` has seen to it."""
    killed: list[int] = []

    def kill(number: int) -> None:
        if not killed:
            killed.append(group(run, 0))
            os.killpg(killed[0], signal.SIGKILL)

    if moment == "proof":
        send = run.rank.send_weights
        run.rank.send_weights = lambda *args: (send(*args), kill(0))[0]  # type: ignore[method-assign]
    else:
        run.rank.sending = lambda number: kill(number) if number == 2 else None
    try:
        run.publish()
    finally:
        run.rank.sending = lambda number: None
        if moment == "proof":
            del run.rank.send_weights
    assert killed and run.health[1] is Health.HEALTHY
    assert [info.weight_version for info in run.pool.infos()] == [run.version]
    run.roll_out()
    run.bring_back(0)
    assert transitions(run.pool.news(), 0) == BACK
    run.roll_out()


def test_slow(run: Run) -> None:
    """A server that sleeps before every token: what it does not answer in time is asked of the
    other, it is suspected, and believed again by its first answer. It is not begun anew."""
    engine = run.engine(0)
    limit, engine._client._response_s = engine._client._response_s, 4.0
    slow_down(run, 2.0)
    try:
        run.roll_out()
        assert run.pool._requests["rollout/retried_late"] > 0
        assert run.health == [Health.SUSPECT, Health.HEALTHY]
    finally:
        engine._client._response_s = limit
        slow_down(run, None)
    run.publish()
    run.roll_out()
    assert run.health == [Health.HEALTHY] * 2
    assert transitions(run.pool.news(), 0) == ["suspect", "healthy"]
    assert run.engine(0) is engine


def slow_down(run: Run, seconds: float | None) -> None:
    with servers.attached(run.engine(0)) as (loop, (client,)):
        loop.run_until_complete(client._call("POST", "/slow_down", {"forward_sleep_time": seconds}))


@pytest.fixture(scope="module")
def proxies(shared: Run) -> tuple[Proxy, ...]:
    return tuple(Proxy(lambda number=number: shared.engine(number).process) for number in range(2))  # type: ignore[misc]


@pytest.fixture(scope="module")
def attached(shared: Run, proxies: tuple[Proxy, ...]) -> Iterator[Run]:
    """The same servers as somebody else's, behind proxies that fail. What follows takes them from
    the run above."""
    with listening(*proxies) as urls, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_API_KEY", "the proxies know the servers'")
        plain = config("tensor").model_dump()
        plain["sglang"] |= {"urls": urls, "python": None}
        run = Run(Config.model_validate(plain), 2)
        try:
            run.publish()
            yield run
        finally:
            run.close()


def test_one_in_fifty_requests_is_lost(attached: Run, proxies: tuple[Proxy, ...]) -> None:
    """On the way to either server, whatever is asked: for a response, a part of a weight sync, or
    whether it is there. Every response comes once, and nobody is taken for lost."""
    for proxy in proxies:
        proxy.every = 50
    try:
        for _ in range(4):
            attached.publish()
            attached.roll_out()
    finally:
        for proxy in proxies:
            proxy.every = 0
    assert all(proxy.lost for proxy in proxies)
    assert "dead" not in " ".join(attached.pool.news())
    attached.roll_out()  # what is suspected answers
    assert attached.health == [Health.HEALTHY] * 2


def test_refused_with_500_again_and_again(attached: Run, proxies: tuple[Proxy, ...]) -> None:
    """The server says that it is there, and answers no request. It is lost after five in a row; it
    comes back when it answers again, with all weights proved."""
    attached.pool.news()
    proxies[0].refuses = True
    try:
        for _ in range(5):  # each loses one at least
            attached.roll_out()
        assert attached.health == [Health.STARTING, Health.HEALTHY]
        attached.publish()
        attached.roll_out()
    finally:
        proxies[0].refuses = False
    attached.bring_back(0)
    assert transitions(attached.pool.news(), 0) == ["suspect", *BACK]
    attached.roll_out()


def test_a_server_of_somebody_else_is_taken_back_when_it_answers_again(
    attached: Run, proxies: tuple[Proxy, ...]
) -> None:
    """Not to be reached from the middle of a rollout on, over a weight update; what it holds is
    older then, and it is asked nothing before it has the newest weights."""
    attached.pool.news()

    def progress(made: int, wanted: int) -> None:
        proxies[0].down |= made == 1

    attached.roll_out(progress)
    assert attached.health == [Health.STARTING, Health.HEALTHY]
    attached.publish()
    proxies[0].down = False
    attached.pool._fleet._coming[0].result(BACK_S)
    asked = len(proxies[0].asked_for)
    attached.roll_out()
    assert len(proxies[0].asked_for) == asked
    attached.bring_back(0)
    assert transitions(attached.pool.news(), 0) == BACK
    attached.roll_out()
    assert len(proxies[0].asked_for) > asked


def test_none_left_ends_the_run_by_name(attached: Run, proxies: tuple[Proxy, ...]) -> None:
    def progress(made: int, wanted: int) -> None:
        for proxy in proxies:
            proxy.down |= made == 1

    with pytest.raises(
        NoEngineError, match=r"no engine is left: engine 0 is .*does not answer(?s:.*)engine 1 is"
    ):
        attached.roll_out(progress)
