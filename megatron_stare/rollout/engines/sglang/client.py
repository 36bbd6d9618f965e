"""Asynchronous client of one SGLang server. The module protocol.py makes the request bodies and
parses the answers.

Answers are JSON. Data from a server is never unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, TypeVar

import orjson

from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.transport import HttpTransport, Transport
from megatron_stare.rollout.engines.state import MEMORY

T = TypeVar("T")
# SGLang's third mode, in_place, can attribute tokens of the old weights to the new version if its
# scheduler overlaps batches.
PauseMode = Literal["abort", "retract"]
# memory that a server can release; captured CUDA graphs need the cache
TAGS = {"weights": ("weights",), "cache": ("kv_cache", "cuda_graph")}


# statuses of temporary failures, besides all from 500: timeout, too early, too many requests
_PASSING = frozenset({408, 425, 429})
# Calls that must not be retried if the server may have received the first: the second answer would
# differ, or never come.
_ONCE = frozenset(
    {"/init_weights_update_group", "/update_weights_from_distributed", "/end_weight_update"}
)
_ONCE |= {"/release_memory_occupation", "/resume_memory_occupation"}
REPEATED = 2  # immediate retries of all other calls after a broken connection
ABORT_S = 10.0  # time limit for aborting requests that nobody waits for any more


class UnansweredError(SGLangError):
    """Raised if a call got no answer, or if the server answered with a temporary error. A retry at
    this server or at another server can succeed.

    `late`: True if the server did not answer the call within the call's time limit.
    """

    late = False


class ServerLostError(UnansweredError):
    """Raised if a server no longer answers."""


class NotJsonError(SGLangError):
    """Raised if an answer is not JSON."""


class SGLangClient:
    """HTTP client of one server.

    Every method of the client sends a request to the server and waits for the server's answer. The
    wait has a time limit: `response_s` seconds for the method `generate_as`, and `timeout_s`
    seconds for all other methods. If the connection to the server breaks during the wait, or if the
    server answers with a temporary error, most methods immediately send the request again. A
    request is sent again at most REPEATED times.

    Args:
        url: URL of the server, without a path.
        api_key: key that is sent as a bearer token; None: the server needs no key.
        timeout_s: limit of one call, seconds.
        transport: object that handles the requests instead of an HTTP connection.
        response_s: time limit of one response, seconds; None: `timeout_s`. A response that takes
            longer than the limit is lost.
        router: URL to which requests for responses are sent, instead of the server's URL. Any
            server behind the router may answer.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout_s: float,
        transport: Transport | None = None,
        *,
        response_s: float | None = None,
        router: str | None = None,
    ) -> None:
        self.url, self.api_key = url.rstrip("/"), api_key
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._response_s = timeout_s if response_s is None else response_s
        self._transport: Transport = HttpTransport(self.url) if transport is None else transport
        self.asked = self.url if router is None else router.rstrip("/")  # URL for responses
        self._router = None if router is None else HttpTransport(self.asked)

    async def get(self, path: str) -> dict[str, Any]:
        return self._json(path, await self._call("GET", path, None))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer. Raises SGLangError with the server's message if the server refuses
        the call or answers `success: false`."""
        return self._successful(path, await self._call("POST", path, body))

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        content = None if body is None else orjson.dumps(body)
        left = 0 if path in _ONCE else REPEATED
        while True:
            try:
                return self._accepted(
                    path, self.url, *await self._request(method, path, self._headers, content)
                )
            except UnansweredError as error:
                if not left or error.late:
                    raise
            left -= 1

    def _accepted(self, path: str, where: str, status: int, answer: bytes) -> bytes:
        if status == 200:
            return answer
        kind = UnansweredError if status >= 500 or status in _PASSING else SGLangError
        raise kind(
            f"{path} was refused ({status}): {answer.decode(errors='replace')[:500]}", where=where
        )

    async def _request(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes | None
    ) -> tuple[int, bytes]:
        return await self._within(self._timeout_s, self._transport, method, path, headers, content)

    async def _within(
        self,
        limit_s: float,
        transport: Transport,
        method: str,
        path: str,
        headers: Mapping[str, str],
        content: bytes | None,
    ) -> tuple[int, bytes]:
        try:
            return await asyncio.wait_for(
                transport.request(method, path, headers, content), limit_s
            )
        except (OSError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            words = f"within {limit_s:g} s" if late else f"{type(error).__name__} {error}".rstrip()
            where = self.url if transport is self._transport else self.asked
            lost = ServerLostError(f"the server does not answer {path}: {words}", where=where)
            lost.late = late
            raise lost from error

    def _json(self, path: str, content: bytes) -> dict[str, Any]:
        try:
            answer = orjson.loads(content)
        except ValueError as error:
            raise NotJsonError(
                f"{path} answered {content[:200]!r}, which is not JSON", where=self.url
            ) from error
        if not isinstance(answer, dict):
            raise SGLangError(
                f"{path} answered a {type(answer).__name__}, not an object", where=self.url
            )
        return answer

    def _successful(self, path: str, content: bytes) -> dict[str, Any]:
        answer = self._json(path, content)
        if answer.get("success") is False:
            raise SGLangError(f"{path} failed: {answer.get('message')}", where=self.url)
        return answer

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Generates one response. If a caller cancels the call, the server still continues to
        generate the response. The caller must therefore also abort the request on the server."""
        return await self.post("/generate", body)

    async def generate_as(self, body: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Asks the server to generate one response, and waits for the answer for up to `response_s`
        seconds. Parses the JSON of the server's answer, passes the parsed answer to the function
        `read`, and returns the result of `read`. `read` must not keep a reference to the answer.

        The request goes to the router if the client has a router.

        Raises:
            UnansweredError: the response is lost. A retry at this server or at another server may
                succeed.
        """
        transport, path = self._router or self._transport, "/generate"
        got = await self._within(
            self._response_s, transport, "POST", path, self._headers, orjson.dumps(body)
        )
        content = self._accepted(path, self.asked, *got)
        with collector_at_rest():
            try:
                answer = self._successful(path, content)
            except NotJsonError as error:  # truncated in transit
                raise UnansweredError(error.what, where=self.asked) from error
            return read(answer)

    async def model_info(self) -> dict[str, Any]:
        """Returns the server's answer to /model_info. Unlike /health, /model_info also works while
        generation is paused."""
        return await self.get("/model_info")

    async def asks_for_key(self) -> bool:
        """Returns True if the server refuses requests without the API key.

        Tests only one endpoint, because SGLang protects all endpoints except /health in the same
        way.
        """
        headers = {name: value for name, value in self._headers.items() if name != "Authorization"}
        status, _ = await self._request("GET", "/model_info", headers, None)
        return status == 401

    async def server_info(self) -> dict[str, Any]:
        """Returns the server's version, arguments and limits."""
        return await self.get("/server_info")

    async def abort(self, rid: str | None = None) -> None:
        """Aborts one request, or all requests if `rid` is None. The server answers an aborted
        request with the tokens that were sampled before the abort."""
        await self._call(
            "POST", "/abort_request", {"rid": rid} if rid is not None else {"abort_all": True}
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling. The mode `abort` ends requests in flight. The mode `retract` interrupts
        requests in flight. When sampling resumes, the server recomputes the cache of the
        interrupted requests and continues these requests."""
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def flush(self, idle_s: float = 0.0) -> None:
        """Drops the prefix cache.

        Args:
            idle_s: seconds for which the server waits until no request is running or queued. An
                aborted request may still be in its batch shortly after the request is answered.

        Raises:
            SGLangError: requests are still in flight.
        """
        await self._call(
            "POST", f"/flush_cache?timeout={idle_s:g}" if idle_s else "/flush_cache", {}
        )

    async def release_memory(self, parts: Collection[str]) -> None:
        """Releases the given parts of the server's memory (the weights, the cache, or both). The
        server must have been started with --enable-memory-saver (CUDA only). A server without
        --enable-memory-saver, such as a CPU server, accepts the HTTP request but releases no
        memory. If `parts` contains the key/value cache, the server loses all cached prefixes.
        Releasing any part crashes the server if a request is in flight."""
        await self._call("POST", "/release_memory_occupation", {"tags": _tags(parts)})

    async def resume_memory(self, parts: Collection[str]) -> None:
        """Allocates memory again that `release_memory` released. The contents of the allocated
        memory are undefined. If one of the given parts is already allocated, the server crashes."""
        await self._call("POST", "/resume_memory_occupation", {"tags": _tags(parts)})

    async def begin_weight_update(self) -> None:
        await self.post("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        await self.post("/end_weight_update", {})

    async def publish_version(self, version: str) -> None:
        """Sets the weight version that the server reports for all tokens sampled from now on."""
        await self.post(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def checksums(self) -> list[dict[str, str]]:
        """Returns one dict of SGLang's parameter checksums for each tensor-parallel rank, including
        the ranks on other nodes. The keys are SGLang's parameter names. With attention data
        parallelism, every data-parallel group of the server reports the checksums of all the
        server's ranks. Raises SGLangError if two reports of one rank's checksums differ."""
        answer = await self.post("/weights_checker", {"action": "checksum"})
        ranks: dict[int, dict[str, str]] = {}
        for each in answer["ranks"]:
            number, found = int(each["parallelism_info"][0]["tp_rank"]), dict(each["checksums"])
            if ranks.setdefault(number, found) != found:
                raise SGLangError(
                    f"rank {number} is said to hold two different sets of weights", where=self.url
                )
        if sorted(ranks) != list(range(len(ranks))):
            raise SGLangError(
                f"{len(answer['ranks'])} checksums came for the ranks {sorted(ranks)}",
                where=self.url,
            )
        return [ranks[number] for number in range(len(ranks))]

    async def close(self) -> None:
        await self._transport.close()
        if self._router is not None:
            await self._router.close()


def _tags(parts: Collection[str]) -> list[str]:
    """Returns the tags by which SGLang names the given parts of its memory (see MEMORY)."""
    return [tag for part in MEMORY if part in parts for tag in TAGS[part]]


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disables Python's garbage collector during a `with` block that parses a server's answer.
    Python's garbage collector frees only objects in reference cycles. Parsed JSON contains no
    reference cycles, so the garbage collector would find nothing to free in a parsed answer. A
    parsed answer contains one list for every token. An enabled garbage collector wastes time in two
    ways. For every answer, the garbage collector traverses the answer's lists. After every few
    answers, the garbage collector traverses all objects of the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def everywhere(*calls: Any) -> list[Any]:
    """Waits until all calls have ended. If one or more calls failed, this function raises the error
    of the failed call that comes first in `calls`."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return list(done)
