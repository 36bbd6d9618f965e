"""Implements the engine interface on one SGLang server.

The engine pool sends requests to the engine through an engine worker. The trainer's weight stream
provides the engine with buckets of weights. The run starts the server or attaches to a running
server by URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_stare.errors import ConfigError
from megatron_stare.models import family_named
from megatron_stare.process.interruption import run_on
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import (
    GenerateRequest,
    GenerateResult,
    LostRequest,
    ModelInfo,
    ServedEngine,
    check_params,
    check_requests,
)
from megatron_stare.rollout.engines.model_folder import model_stop_token_ids, read_model_config
from megatron_stare.rollout.engines.sglang.client import (
    ABORT_S,
    PauseMode,
    SGLangClient,
    UnansweredError,
    everywhere,
)
from megatron_stare.rollout.engines.sglang.place import Place
from megatron_stare.rollout.engines.sglang.protocol import (
    SGLangError,
    check_flags,
    check_hashes,
    check_precision,
    check_speculation,
    check_stop,
    check_version,
    generate_body,
    prompt_body,
    read_prompt_log_probs,
    result_of,
)
from megatron_stare.rollout.engines.sglang.server import ServerProcess
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import DTYPES, Sent, WeightSync
from megatron_stare.rollout.engines.sglang.target import ServersTarget, TargetServer
from megatron_stare.rollout.engines.sglang.transport import on_loopback
from megatron_stare.rollout.engines.sglang.update import WeightUpdate
from megatron_stare.rollout.engines.sglang.watch import ServerGoneError, Watch
from megatron_stare.rollout.engines.state import (
    MEMORY,
    EngineState,
    EngineStateError,
    advance,
    publishes,
    release,
    require,
    resume,
)

T = TypeVar("T")
# A server ends a response this many tokens before its context is full, with the reason "length".
NEVER_FILLED = 2
PROBE_S = 20.0
IDLE_S = 30.0  # time from aborting requests until none is in flight
# weight of the expected length, in observed requests; maximum number of remembered lengths
EXPECTED, REMEMBERED = 64, 1024
FORCING = 1e4  # logit bias under which no other token is sampled


class CacheRoom:
    """Limits the number of concurrent requests at a server. The limit is min(`most`, n), where n is
    the number of average-length requests that the server's cache can hold. When a request at the
    server ends, the next waiting request is sent to the server.

    Without a limit on concurrent requests, a request could wait in the server's queue until the
    server's cache has enough free space. A wait in the server's queue would count towards the
    request's time limit (faults.requests.request_s).

    Args:
        cache_tokens: capacity of the server's cache, in tokens.
        most: maximum of the limit.
        expected: expected number of tokens of a request, prompt and response together. The average
            length counts this number as EXPECTED observed requests.
    """

    def __init__(self, cache_tokens: int, most: int, expected: float) -> None:
        self._cache_tokens, self._most = cache_tokens, most
        self._lengths, self._sum = deque([expected] * EXPECTED), EXPECTED * expected
        self._inside, self._waiting = 0, deque[asyncio.Future[None]]()

    @property
    def size(self) -> int:
        """Limit on the number of requests that may be at the server at the same time. The limit is
        at least 1. The limit can fall if the average length of the requests grows, and can rise if
        the average length shrinks."""
        return max(min(self._most, int(self._cache_tokens * len(self._lengths) / self._sum)), 1)

    def came(self, tokens: int) -> None:
        """Records the length of an answered request: prompt and response together, in tokens."""
        if len(self._lengths) == REMEMBERED:
            self._sum -= self._lengths.popleft()
        self._lengths.append(tokens)
        self._sum += tokens

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._let_in()
            else:  # it had already entered
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        """Admits waiting requests to the server, first come, first served, until the number of
        requests at the server reaches the limit `size`. The limit may have risen since the previous
        call, so one call can admit several requests."""
        while self._waiting and (self._waiting[0].done() or self._inside < self.size):
            if not (turn := self._waiting.popleft()).done():  # otherwise it was cancelled
                turn.set_result(None)
                self._inside += 1


class SGLangEngine(ServedEngine):
    """Engine of one server.

    Args:
        client: client of the server, which already answers.
        sync: sends weights to the server.
        model_path: Hugging Face folder from which the server was started. The engine reads the
            folder's config.
        dtype: compute dtype of the server.
        max_running: maximum number of concurrent requests. A small server cache lowers the maximum.
            Requests beyond the maximum wait in this process.
        loop: event loop of the client. The engine closes the event loop.
        process: process of a server that ends with this engine; None: the run did not start the
            server.
        flags: maps each required flag of the server to the setting that needs the flag; see
            check_flags.
        target: target to which the trainer's ranks send weights. The engine adds the server to the
            target. None: weights come only through this engine.
        place: machine and GPUs of the server, as far as they are known.
        probe_s: time limit for an answer to a health check.
        request_tokens: expected length of prompt and response, used until lengths are observed.

    Raises:
        SGLangError: the server runs an unsupported release, or does not treat stop tokens as
            training requires (see probe_stop).
        ConfigError: the server was started without one of the flags, or accepts requests from other
            machines without a key.
    """

    def __init__(
        self,
        client: SGLangClient,
        sync: WeightSync,
        model_path: str,
        dtype: str,
        max_running: int,
        loop: asyncio.AbstractEventLoop,
        process: ServerProcess | None = None,
        flags: Mapping[str, str] = MappingProxyType({}),
        target: ServersTarget | None = None,
        place: Place | None = None,
        probe_s: float = PROBE_S,
        request_tokens: float = 1.0,
        kv_cache_dtype: str | None = None,
        quantization: str | None = None,
    ) -> None:
        config = read_model_config(model_path)
        self._shape = family_named(config.model_type, model_path).shape(config.to_dict())
        self._vocab_size = int(config.vocab_size)
        self._stop_token_ids = model_stop_token_ids(model_path)
        self._client, self._sync, self.process = client, sync, process
        self._target, self._place = target, place or Place()
        self._dtype, self._loop = DTYPES[dtype], loop
        self._max_running = max_running
        self._state, self._version = EngineState.DIRTY, -1
        self._released: frozenset[str] = frozenset()  # released parts of MEMORY
        self._update: WeightUpdate | None = None  # the open update, or the last one
        # shapes of the tensors in the last verified update
        self._proven: dict[str, torch.Size] = {}
        self._calls = 0
        # servers behind one router receive requests of all engines, so request ids need a unique
        # prefix
        self._name = secrets.token_hex(4)
        # tasks of the requests in flight, with the request ids
        self._under_way: dict[asyncio.Task[GenerateResult | LostRequest], str] = {}
        self._watch = Watch(client, process, self._held, probe_s)
        info = self._at_first(client.server_info)
        check_version(str(info["version"]), client.url)
        check_flags(info, flags, client.url)
        check_precision(info, client.url, kv_cache_dtype, quantization)
        if quantization is not None:
            check_hashes(str(info["version"]), client.url)
        check_speculation(info, str(info["device"]), client.url)
        layout = ServerLayout.of(info, client.url)
        layout.require_family(self._shape, client.url)
        # the server reports the tokens of one data-parallel group
        cache_tokens = int(info["max_total_num_tokens"]) * layout.data
        self._room = CacheRoom(cache_tokens, max_running, request_tokens)
        if not on_loopback(client.url) and not self._at_first(client.asks_for_key):
            raise ConfigError(
                "the server can be reached from other machines and asks nobody for a key: who can"
                " reach it could replace its weights",
                where=client.url,
                fix="start it with --api-key, and set SGLANG_API_KEY to the same",
            )
        bounds = (
            config.max_position_embeddings,
            info["max_total_num_tokens"],
            info.get("context_length"),
        )
        self._context_length = (
            min(int(bound) for bound in bounds if bound is not None) - NEVER_FILLED
        )
        self._at_first(lambda: probe_stop(client, self._stop_token_ids))

    def _at_first(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine during construction. If the run started the server and the server has
        ended, the error says how the server ended."""
        try:
            return self._waited(make)
        except SGLangError:
            if self.process is not None:
                self.process.require_alive()
            raise

    def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine. Raises ServerGoneError if the server is lost during the call."""
        return self._waited(partial(self._watched, make))

    async def _watched(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        call = asyncio.ensure_future(make())
        try:
            await self._watch.first_of([call])
            return call.result()
        except UnansweredError:
            await self._watch.require()
            raise
        except SGLangError:
            self._watch.require_process()
            raise
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def _held(self) -> int | None:
        """Returns the weight version that the server must hold now, or None if no version is
        published."""
        return self._version if publishes(self._state) else None

    def check(self) -> None:
        """See Engine. Waits for the server's answer."""
        self._waited(self._watch.require)

    def _waited(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the engine's event loop. If the caller's thread already runs an event
        loop, for example under the inline runner, the engine's event loop runs in another
        thread."""
        if not _in_event_loop():
            return run_on(self._loop, make)
        # this block waits for the thread to end, so that the loop never runs twice at once
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run_on, self._loop, make).result()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        """See Engine. If the server honours seeds, a response's sampling noise depends only on the
        request and `params` (docs/sglang.md)."""
        self._require_ready("generate")
        check_params(params)
        check_requests(requests, params, self.model_info())
        for request in requests:
            self._calls += 1
            answer = self._answer(
                request, params, f"{self._name}.{self._version}.{self._calls}:{request.rid}"
            )
            self._under_way[self._loop.create_task(answer)] = request.rid

    async def _answer(
        self, request: GenerateRequest, params: SamplingParams, rid: str
    ) -> GenerateResult | LostRequest:
        """Waits until the server has room for the request, then sends the request and waits for the
        response. The response's time limit starts when the request is sent."""
        routed = self._shape if params.return_experts else None
        async with self._room:
            try:
                result = await self._client.generate_as(
                    generate_body(request, params, rid),
                    lambda answer: result_of(
                        answer, request, params.stop_token_ids, self._client.asked, routed
                    ),
                )
            except UnansweredError as error:
                try:
                    await self._watch.require()
                except ServerGoneError as gone:
                    return LostRequest(request.rid, str(gone), error.late or gone.late, gone=True)
                # the server may still be generating the response
                with contextlib.suppress(SGLangError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._client.abort(rid), ABORT_S)
                return LostRequest(request.rid, str(error), error.late)
            else:
                self._room.came(result.prompt_tokens + result.completion_tokens)
        # Requests aborted here never get this far, so the server aborted this one.
        if result.finish_reason == "abort":
            return LostRequest(
                request.rid, f"{self._client.asked}: the server gave the response up"
            )
        return result

    def collect(self, wait_s: float) -> list[GenerateResult | LostRequest]:
        """See Engine. The engine sends requests and receives answers only while one of its methods,
        such as `collect`, runs."""
        if not self._under_way:
            return []
        return self._waited(lambda: self._first(wait_s))

    async def _first(self, wait_s: float) -> list[GenerateResult | LostRequest]:
        """Waits up to `wait_s` seconds for at least one answer. If a request raises an error, this
        method cancels all requests in flight and raises the error. If the server is lost, the
        returned list reports all requests in flight as lost."""
        try:
            done = await self._watch.first_of(list(self._under_way), wait_s)
        except ServerGoneError as gone:
            wanted = list(self._under_way.values())
            await self._cancel()
            return [LostRequest(rid, str(gone), gone.late, gone=True) for rid in wanted]
        for task in done:
            del self._under_way[task]
        try:
            return [task.result() for task in done]
        except BaseException:
            # retrieve the errors, because asyncio logs unretrieved ones
            await asyncio.gather(*done, return_exceptions=True)
            await self._forget()
            raise

    def abort(self) -> None:
        if self._under_way:
            self._waited(self._forget)

    async def _forget(self) -> None:
        """Cancels this process's tasks for all requests in flight. Also aborts the requests on the
        server if the server still answers."""
        # a server that hangs must not delay the caller
        told = asyncio.wait_for(self._client.abort(), ABORT_S)
        await asyncio.gather(self._cancel(), told, return_exceptions=True)

    async def _cancel(self) -> None:
        """Cancels this process's tasks for all requests in flight. Does not abort the requests on
        the server."""
        tasks, self._under_way = self._under_way, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self._require_ready("compute log-probs")

        async def one(tokens: Sequence[int], number: int) -> list[float]:
            answer = await self._client.generate(prompt_body(tokens, f"{self._version}.{number}"))
            return read_prompt_log_probs(answer, tokens, self._client.url)

        first, self._calls = self._calls + 1, self._calls + len(sequences)
        return self._run(
            lambda: everywhere(*(one(tokens, first + i) for i, tokens in enumerate(sequences)))
        )

    def _require_ready(self, action: str) -> None:
        require(self._state, EngineState.HEALTHY, action)
        if self._released:
            raise EngineStateError(f"cannot {action}: the cache is released; resume its memory")

    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        # the server may have restarted, which removes it from the trainer's process group
        if self._held() is not None:
            self.check()
        self._state = advance(self._state, EngineState.UPDATING)
        proven = None if prove or not self._proven else self._proven
        mode: PauseMode = "retract" if self._under_way else "abort"
        self._update = WeightUpdate(
            [self._client], self._sync, version, self._shape, self._dtype, mode, proven=proven
        )
        self._guarded(self._update.begin)

    def update_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._guarded(partial(self._open_update("update weights").send, named_tensors))

    def end_weight_update(self) -> dict[str, str]:
        update = self._open_update("end the weight update")
        checksums = self._guarded(update.end)
        self._published(update)
        return checksums

    def sync_target(self) -> ServersTarget | None:
        """See ServedEngine."""
        update, client = self._open_update("be sent weights"), self._client
        if self._target is None:
            return None
        (layout,) = update.layouts
        server = TargetServer(
            client.url, client.api_key, layout, self._place, self._shape, self._dtype
        )
        return replace(self._target, servers=(server,))

    def end_sent_update(self, sent: Sequence[Sent]) -> None:
        """See ServedEngine."""
        update = self._open_update("end the weight update")
        self._guarded(lambda: self._ended(update, sent, self._client.url))
        self._published(update)

    def drop_weight_update(self) -> None:
        """See ServedEngine."""
        if self._state is EngineState.UPDATING:
            self._state = advance(self._state, EngineState.DIRTY)

    @staticmethod
    async def _ended(update: WeightUpdate, sent: Sequence[Sent], url: str) -> None:
        await update.end_sent(Sent.arrived(sent, url))

    def _published(self, update: WeightUpdate) -> None:
        if update.proves:
            self._proven = dict(update.sizes)
        held = EngineState.HEALTHY if update.proves else EngineState.UNPROVED
        self._state, self._version = advance(self._state, held), update.version

    def _open_update(self, action: str) -> WeightUpdate:
        require(self._state, EngineState.UPDATING, action)
        assert self._update is not None
        return self._update

    def _guarded(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs one operation of a weight update, such as sending one bucket. If the operation
        fails, the engine becomes DIRTY and the engine's server stays paused."""
        try:
            return self._run(make)
        except BaseException:
            self._state = advance(self._state, EngineState.DIRTY)
            raise

    def release_memory(self, parts: Collection[str] = MEMORY) -> None:
        if self._state in (EngineState.UPDATING, EngineState.DEAD):
            raise EngineStateError(f"cannot release memory: the engine is {self._state.name}")
        self._released = release(self._released, parts)
        if "weights" in parts:
            self._state = advance(self._state, EngineState.RELEASED)
        self._run(lambda: self._release(parts))

    async def _release(self, parts: Collection[str]) -> None:
        """Pauses the server, waits until the server is idle, and releases memory. If a request were
        still in flight, releasing the server's memory would crash the server."""
        await self._client.pause("abort")
        await self._client.flush(IDLE_S)
        await self._client.release_memory(parts)

    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        left = resume(self._released, parts)
        self._run(lambda: self._client.resume_memory(parts))
        self._released = left
        if "weights" in parts:
            self._state = advance(self._state, EngineState.DIRTY)
        if not left and publishes(self._state):  # otherwise the end of a weight update resumes it
            self._run(self._client.resume)

    def memory_mb(self) -> float | None:
        """Returns the server's memory use (Pss) in units of 10^6 bytes, or None if the run did not
        start the server."""
        return self.process.memory_mb() if self.process is not None else None

    def model_info(self) -> ModelInfo:
        return ModelInfo(
            weight_version=self._version if publishes(self._state) else None,
            state=self._state,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            stop_token_ids=self._stop_token_ids,
            capacity=self._max_running,
            served=True,
        )

    def close(self) -> None:
        if self._state is EngineState.DEAD:
            return
        self._state = advance(self._state, EngineState.DEAD)
        try:
            with contextlib.suppress(SGLangError):
                run_on(self._loop, self._leave)
        finally:
            if self.process is not None:
                self.process.close()
            self._loop.close()

    async def _leave(self) -> None:
        """Cancels the requests in flight and closes the connections. Also aborts the requests on
        the server if the server is not lost."""
        await self._watch.close()
        if self._watch.gone:
            await self._cancel()  # the server is gone, so there is nothing to abort
        else:
            await self._forget()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._sync.close(), ABORT_S)
        await self._client.close()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def probe_stop(client: SGLangClient, stop_token_ids: Sequence[int]) -> None:
    """Verifies that a server treats stop tokens in the way that training requires. Requests one
    short response for each stop token. A large bias on the stop token's logit makes the server
    sample this token, whatever the model's weights are.

    A response must include its stop token and the stop token's log-prob, because training uses all
    tokens that the policy sampled, including the stop token.

    Raises:
        SGLangError: a stop token does not end the response, is not reported as the reason for the
            stop, or is returned without its id or log-prob.
    """
    for token in stop_token_ids:
        request = GenerateRequest(f"probe-{token}", (token,), prompt_cursor=0, sample_index=0)
        params = SamplingParams(
            1.0, 4, seed=0, step=0, stop_token_ids=tuple(stop_token_ids), greedy=True
        )
        body = generate_body(request, params, request.rid)
        body["sampling_params"]["logit_bias"] = {str(token): FORCING}
        check_stop(await client.generate(body), token, client.url)
