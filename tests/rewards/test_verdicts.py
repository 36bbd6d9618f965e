"""Answers verified as they come: by real worker processes, in an event loop that has other things
to do."""

from __future__ import annotations

import asyncio
import contextlib
import select

import pytest

from megatron_stare.errors import ConfigError
from megatron_stare.rewards.verdicts import EARLY, verdicts
from megatron_stare.rewards.verifier_pool import (
    Answers,
    TooManyFailuresError,
    Verdict,
    VerifierPool,
)

HERE = "support.verifiers"


async def all_of(
    pool: VerifierPool, answers: list[tuple[str, str]], most_failures: int | None = None
):
    async with verdicts(pool, most_failures) as judge:
        return await asyncio.gather(*(judge.of(*answer) for answer in answers))


def test_each_answer_gets_its_own_verdict():
    with VerifierPool("arithmetic", 2, 10) as pool:
        answers = [(f"1+1={i}", str(i if i % 3 else i + 1)) for i in range(200)]
        verdicts = asyncio.run(all_of(pool, answers))
        assert [verdict.reward for verdict in verdicts] == [float(i % 3 != 0) for i in range(200)]
        # and again
        assert [verdict.reward for verdict in asyncio.run(all_of(pool, answers[:2]))] == [0.0, 1.0]


def test_a_verdict_is_given_while_other_answers_are_still_being_made():
    """The second answer is made of the first one's verdict: a pool that waited for both would never
    begin."""

    async def story(pool: VerifierPool) -> list[float | None]:
        async with verdicts(pool) as judge:
            first = await judge.of("1+1=2", "2")
            second = await judge.of(f"1+1={2 + int(first.reward or 0)}", "3")
            return [first.reward, second.reward]

    with VerifierPool("arithmetic", 1, 10) as pool:
        assert asyncio.run(story(pool)) == [1.0, 1.0]


def test_a_rollout_that_fails_leaves_the_pool_to_another_one():
    """And the last rollout to leave closes a pool whose workers judge for nobody."""

    async def story(pool: VerifierPool) -> float | None:
        async with verdicts(pool) as older:
            with contextlib.suppress(RuntimeError):
                async with verdicts(pool) as younger:
                    asking = asyncio.ensure_future(younger.of("hang", "1"))
                    await asyncio.sleep(0)
                    asking.cancel()
                    raise RuntimeError("the environment failed")
            return (await older.of("1", "1")).reward

    with VerifierPool(f"{HERE}.obey", 2, 600) as pool:
        assert asyncio.run(story(pool)) == 1.0
        with pytest.raises(ValueError, match="closed"):
            asyncio.run(all_of(pool, [("1", "1")]))


def test_workers_begin_before_the_loop_comes_to_them():
    """Whoever makes answers may have a whole batch of them to make before anybody else has a
    turn."""

    async def story(pool: VerifierPool) -> None:
        async with verdicts(pool) as judge:
            answers = [judge.of("1+1=2", "2") for _ in range(EARLY)]
            for answer in answers:
                # up to where it waits for its verdict; nothing else runs meanwhile
                answer.send(None)
            assert select.select([pool.fileno()], [], [], 30)[0], "no worker has spoken"
            waiting = [asyncio.ensure_future(judge.of("1+1=3", "2")) for _ in range(2)]
            assert [verdict.reward for verdict in await asyncio.gather(*waiting)] == [0.0, 0.0]
            for answer in answers:
                with pytest.raises(StopIteration) as ended:
                    answer.send(None)
                assert ended.value.value.reward == 1.0

    with VerifierPool("arithmetic", 1, 30) as pool:
        asyncio.run(story(pool))


def test_an_answer_that_hangs_costs_itself_alone():
    with VerifierPool(f"{HERE}.obey", 2, 5) as pool:
        verdicts = asyncio.run(all_of(pool, [("hang", ""), *[("one", "one")] * 20, ("exit", "")]))
    assert verdicts[0].status == "timeout"
    assert [verdict.reward for verdict in verdicts[1:-1]] == [1.0] * 20
    assert verdicts[-1].status == "crash"


def test_too_many_failures_end_the_wait_for_the_others():
    with VerifierPool(f"{HERE}.obey", 1, 30) as pool:
        with pytest.raises(TooManyFailuresError) as error:
            asyncio.run(all_of(pool, [*[("raise", "")] * 3, ("hang", "")], most_failures=2))
        assert len(error.value.failed) == 3  # the last one would have taken thirty seconds
        assert pool.pids == []


def test_nobody_gets_the_verdict_of_an_answer_that_was_given_up():
    async def interrupted(pool: VerifierPool) -> None:
        async with verdicts(pool) as judge:
            await asyncio.wait_for(judge.of("hang", ""), 0.2)

    with VerifierPool(f"{HERE}.obey", 1, 30) as pool:
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(interrupted(pool))
        with pytest.raises(ValueError, match="closed"):
            asyncio.run(all_of(pool, [("one", "one")]))


@pytest.mark.parametrize("answers", [2, EARLY])
def test_a_worker_that_cannot_be_started_again_is_an_error_of_whoever_waits(
    tmp_path, monkeypatch, answers
):
    module = tmp_path / "verifier_that_goes.py"
    module.write_text("import os\ndef verify(response, answer):\n    os._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with VerifierPool("verifier_that_goes.verify", 1, 10) as pool:
        module.write_text("raise RuntimeError('gone')\n")
        with pytest.raises(ConfigError, match="gone"):
            asyncio.run(all_of(pool, [("a", "")] * answers))


def test_of_an_answer_that_was_taken_nothing_is_kept():
    answers = Answers()
    right, wrong = answers.add("a", ""), answers.add("b", "")
    answers.know(right, Verdict(1.0, "ok"))
    answers.know(wrong, Verdict(None, "crash", "why"))
    assert answers.failed == [Verdict(None, "crash", "why")]
    assert answers.take(wrong).status == "crash" and answers.take(right).reward == 1.0
    assert (answers.texts, answers.verdicts, answers.failed, answers.killed) == ({}, {}, [], set())
