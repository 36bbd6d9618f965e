"""The HTTP client against a server of this process that answers, and ends, as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megatron_stare.rollout.engines.sglang import transport
from megatron_stare.rollout.engines.sglang.client import ServerLostError, SGLangClient
from megatron_stare.rollout.engines.sglang.protocol import SGLangError

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"told": 1}'


class Server:
    """Sends `answers`, one a request, whatever is asked; None: never answers."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = iter(answers)
        self.requests: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        while head := await reader.readuntil(b"\r\n\r\n"):
            _, _, rest = head.lower().partition(b"content-length: ")
            length = int(rest.split(b"\r\n")[0] or 0)
            self.requests.append(head + await reader.readexactly(length))
            if (answer := next(self._answers)) is not None:
                writer.write(answer)
            if answer != OK and b"chunked" not in (answer or b""):
                writer.write_eof()


def told(
    server: Server, story: Callable[[SGLangClient], Awaitable[Any]], timeout_s: float = 30.0
) -> Any:
    """Runs `story` with a client of the server, and returns its result."""

    async def main() -> Any:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        client = SGLangClient(
            f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/", "the-key", timeout_s
        )
        try:
            return await story(client)
        finally:
            await client.close()
            listening.close()
            for writer in server.connections:
                writer.close()

    return asyncio.run(main())


def test_a_connection_is_kept_for_the_next_request() -> None:
    server = Server(OK, OK)

    async def story(client: SGLangClient) -> list[Any]:
        return [await client.post("/a", {"x": [1]}), await client.get("/b")]

    assert told(server, story) == [{"told": 1}] * 2
    assert len(server.connections) == 1
    assert server.requests[0].startswith(b"POST /a HTTP/1.1\r\n") and server.requests[0].endswith(
        b'\r\n\r\n{"x":[1]}'
    )
    assert b"Authorization: Bearer the-key\r\n" in server.requests[0]
    assert server.requests[1].startswith(b"GET /b HTTP/1.1\r\n")


def test_requests_under_way_have_connections_of_their_own() -> None:
    server = Server(OK, OK, OK)

    async def story(client: SGLangClient) -> list[Any]:
        return await asyncio.gather(*(client.get("/") for _ in range(3)))

    assert told(server, story) == [{"told": 1}] * 3
    assert len(server.connections) == 3


def test_a_connection_that_the_server_has_closed_is_not_used() -> None:
    server = Server(OK, OK)

    async def story(client: SGLangClient) -> list[Any]:
        first = await client.get("/")
        server.connections[0].close()
        await server.connections[0].wait_closed()
        return [first, await client.get("/")]

    assert told(server, story) == [{"told": 1}] * 2
    assert len(server.connections) == 2


def test_a_connection_is_given_up_before_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "KEPT_S", 0.0)
    server = Server(OK, OK)

    async def story(client: SGLangClient) -> list[Any]:
        return [await client.get("/"), await client.get("/")]

    assert told(server, story) == [{"told": 1}] * 2
    assert len(server.connections) == 2


def test_chunks_and_answers_without_a_length_are_read() -> None:
    chunked = (
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"to\r\n7;x=y\r\nld":'
        b" 1}\r\n0\r\nA: b\r\n\r\n"
    )
    server = Server(chunked, b'HTTP/1.1 200 OK\r\n\r\n{"told": 1}')

    async def story(client: SGLangClient) -> list[Any]:
        return [await client.get("/"), await client.get("/")]

    assert told(server, story) == [{"told": 1}] * 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        OK[:-1],
        b"SSH-2.0 hello\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        None,
    ],
)
def test_what_is_no_answer_is_a_lost_server(answer: bytes | None) -> None:
    with pytest.raises(ServerLostError, match="does not answer /"):
        told(Server(answer), lambda client: client.get("/"))


def test_a_call_that_may_be_made_twice_is_made_again_where_its_connection_broke() -> None:
    """At once and twice at most; not one of which the server may have taken the first, nor one that
    is refused."""
    server = Server(b"", OK[:-1], OK)
    assert told(server, lambda client: client.post("/pause_generation", {})) == {"told": 1}
    assert len(server.requests) == 3
    for path, answers, asked in (
        ("/pause_generation", (b"",) * 4, 3),
        ("/update_weights_from_distributed", (b"", OK), 1),
        ("/end_weight_update", (b"", OK), 1),
    ):
        server = Server(*answers)
        with pytest.raises(ServerLostError):
            told(server, lambda client, path=path: client.post(path, {}))  # type: ignore[misc]
        assert len(server.requests) == asked
    server = Server(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno", OK)
    with pytest.raises(SGLangError, match="refused"):
        told(server, lambda client: client.post("/pause_generation", {}))
    assert len(server.requests) == 1


def test_a_refusal_keeps_the_servers_words() -> None:
    refused = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 8\r\n\r\nbad seed"
    with pytest.raises(SGLangError, match=r"/generate was refused \(400\): bad seed"):
        told(Server(refused), lambda client: client.generate({}))


@pytest.mark.parametrize(
    "content",
    [b'{"log_prob": NaN}', b'{"log_prob": -Infinity}', b'{"told": 1', b'{"told": "\xff"}', b""],
)
def test_what_is_not_json_is_refused_with_its_words(content: bytes) -> None:
    """Also the numbers that JSON has not and Python's own reader takes: servers write null for
    them."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
    with pytest.raises(SGLangError) as refused:
        told(Server(answer), lambda client: client.generate({}))
    assert f"/generate answered {content!r}, which is not JSON" in str(refused.value)


def test_json_that_is_no_object_is_refused() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]"
    with pytest.raises(SGLangError, match="/generate answered a list, not an object"):
        told(Server(answer), lambda client: client.generate({}))


def test_the_answer_to_a_cancelled_request_is_nobody_elses() -> None:
    server = Server(None, OK)

    async def story(client: SGLangClient) -> Any:
        waiting = asyncio.create_task(client.get("/slow"))
        while not server.requests:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return await client.get("/next")

    assert told(server, story) == {"told": 1}
    assert len(server.connections) == 2


def test_nobody_listening_is_a_lost_server() -> None:
    async def story(client: SGLangClient) -> Any:
        other = SGLangClient("http://127.0.0.1:1", None, 30)
        return await other.get("/")

    with pytest.raises(ServerLostError, match=r"http://127\.0\.0\.1:1"):
        told(Server(), story)
