"""When a server counts as lost: what it says, how late, and what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from megatron_stare.rollout.engines.sglang import watch as module
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.watch import ServerGoneError, Watch

LIMIT_S = 0.05


class Client:
    """Says one thing after the other, and then the last again. None: nothing."""

    url = "http://one"

    def __init__(self, *said: Any) -> None:
        self._said, self.asked = list(said), 0

    async def model_info(self) -> dict[str, Any]:
        self.asked += 1
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        if said is None:
            await asyncio.Event().wait()
        if isinstance(said, Exception):
            raise said
        return said() if callable(said) else said


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def watched(
    client: Client, story: Callable[[Watch], Awaitable[Any]], held: Sequence[int | None] = (3,)
) -> Any:
    """Runs `story` with a watch of a server that must hold these versions, one after the other."""
    versions = list(held)

    async def main() -> Any:
        watch = Watch(
            client, None, lambda: versions.pop(0) if len(versions) > 1 else versions[0], LIMIT_S
        )  # type: ignore[arg-type]
        try:
            return await story(watch)
        finally:
            await watch.close()

    return asyncio.run(main())


OK = {"weight_version": "3"}
REFUSED = SGLangError("/model_info was refused (503): for now")


@pytest.mark.parametrize("first", [None, REFUSED])
def test_one_answer_of_two_is_enough(first: Any) -> None:
    client = Client(first, OK)
    watched(client, Watch.require)
    assert client.asked == 2


@pytest.mark.parametrize(
    ("said", "words", "late"),
    [(None, r"has not answered for 0\.05 s", True), (REFUSED, "refused", False)],
)
def test_two_that_fail_are_a_loss(said: Any, words: str, late: bool) -> None:
    client = Client(said)
    with pytest.raises(ServerGoneError, match=words) as lost:
        watched(client, Watch.require)
    assert lost.value.late is late and client.asked == 2


def test_other_weights_are_a_loss_at_once() -> None:
    client = Client({"weight_version": "none"}, OK)
    with pytest.raises(ServerGoneError, match="holds weights of version none, not 3"):
        watched(client, Watch.require)
    assert client.asked == 1


@pytest.mark.parametrize("held", [(3, 4), (3, None), (None, None)])
def test_weights_that_change_while_it_is_asked_are_none(held: tuple[int | None, ...]) -> None:
    """An update ends, or begins, between the question and the answer; or nothing is held that could
    be compared."""
    watched(Client({"weight_version": "4"}), Watch.require, held)


def test_all_who_ask_at_the_same_time_ask_once() -> None:
    client = Client(OK)

    async def story(watch: Watch) -> None:
        await asyncio.gather(*(watch.require() for _ in range(9)))
        await watch.require()

    watched(client, story)
    assert client.asked == 2


def test_who_waits_for_a_server_is_told_that_it_is_lost_and_nobody_else_is() -> None:
    """The server is asked again and again meanwhile."""
    client = Client(OK, OK, None)

    async def story(watch: Watch) -> str:
        never = asyncio.create_task(asyncio.Event().wait())
        done = asyncio.create_task(asyncio.sleep(0, "answered"))
        assert (await watch.first_of([never, done])).pop().result() == "answered"
        assert await watch.first_of([never], LIMIT_S / 10) == set() and not watch.gone
        with pytest.raises(ServerGoneError, match="has not answered"):
            await watch.first_of([never])
        never.cancel()
        return "lost" if watch.gone else ""

    assert watched(client, story) == "lost"
    assert client.asked == 4
