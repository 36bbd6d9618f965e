"""A real SGLang server behind the engine interface: one engine for one server.

Requests come from the pool through an engine worker; weights come as buckets of the trainer's
stream. The server is started here, or attached to by URL.
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
    check_precision,
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
# A server ends a response this many tokens short of its context, and says nothing but "length".
NEVER_FILLED = 2
PROBE_S = 20.0
IDLE_S = 30.0  # from when requests are ended until none is under way
# weight of an expected length, in requests; most requests whose lengths are remembered
EXPECTED, REMEMBERED = 64, 1024
FORCING = 1e4  # a bias under which no other token is sampled


class CacheRoom:
    """Room for requests at a server: as many as its cache holds of the mean length, and `most` at
    most. One that waits enters where another leaves.

    A request that a server has no cache for waits in the server's queue, and its limit
    (faults.requests.request_s) would pass meanwhile.

    Args:
        cache_tokens: that the server holds.
        expected: tokens of a request, prompt and response; it counts as EXPECTED requests of those
            that came.
    """

    def __init__(self, cache_tokens: int, most: int, expected: float) -> None:
        self._cache_tokens, self._most = cache_tokens, most
        self._lengths, self._sum = deque([expected] * EXPECTED), EXPECTED * expected
        self._inside, self._waiting = 0, deque[asyncio.Future[None]]()

    @property
    def size(self) -> int:
        """Requests that may be at the server, at least one."""
        return max(min(self._most, int(self._cache_tokens * len(self._lengths) / self._sum)), 1)

    def came(self, tokens: int) -> None:
        """Takes down the length of a request that was answered."""
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
            else:  # it had its place already
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        """Gives those that wait their places, first come, first served; lengths that came may have
        made several."""
        while self._waiting and (self._waiting[0].done() or self._inside < self.size):
            if not (turn := self._waiting.popleft()).done():  # else it gave up
                turn.set_result(None)
                self._inside += 1


class SGLangEngine(ServedEngine):
    """One server.

    Args:
        client: of the server, which answers already.
        sync: brings weights to it.
        model_path: Hugging Face folder the server was started from; its config is read.
        dtype: that the server computes in.
        max_running: requests it is given at a time, where its cache holds so many; the rest wait
            here.
        loop: that runs the client; this engine closes it.
        process: of a server that ends with this engine; None: it is someone else's.
        flags: what the server must have been started with, and the settings that ask for it; see
            check_flags.
        target: by which the trainer's ranks send weights, still without its server; None: weights
            come through this engine alone.
        place: where the server runs, as far as it is known.
        probe_s: in which the server must say that it is there.
        request_tokens: prompt and response of a request, as long as none have come.

    Raises:
        SGLangError: the server runs an unsupported release, or does not return stop tokens as it
            must.
        ConfigError: the server was not started with one of the flags, or is open to whoever can
            reach it.
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
        self._released: frozenset[str] = frozenset()  # of MEMORY
        self._update: WeightUpdate | None = None  # the open one, or the last
        # tensors that the last proof compared
        self._proven: dict[str, torch.Size] = {}
        self._calls = 0
        # servers behind one router see requests of all engines, and take no two of one name
        self._name = secrets.token_hex(4)
        # tasks of the requests under way, and the id of each
        self._under_way: dict[asyncio.Task[GenerateResult | LostRequest], str] = {}
        self._watch = Watch(client, process, self._held, probe_s)
        info = self._at_first(client.server_info)
        check_version(str(info["version"]), client.url)
        check_flags(info, flags, client.url)
        check_precision(info, client.url)
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
        """The result of the coroutine that is made; a server that was started here is looked at
        where it fails."""
        try:
            return self._waited(make)
        except SGLangError:
            if self.process is not None:
                self.process.require_alive()
            raise

    def _run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the coroutine that is made. Raises ServerGoneError where the server is lost
        meanwhile."""
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
        """The version that the server must be holding now."""
        return self._version if publishes(self._state) else None

    def check(self) -> None:
        """See Engine. Waits for the server's word."""
        self._waited(self._watch.require)

    def _waited(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs it, on a thread of its own where the caller's runs a loop already, as that of the
        inline runner does."""
        if not _in_event_loop():
            return run_on(self._loop, make)
        # left only when the thread has ended, so that the loop never runs twice at once
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run_on, self._loop, make).result()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        """See Engine. Sampling noise is keyed on the request only where the server honours seeds
        (docs/sglang.md)."""
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
        """Waits until the server has room, then for the response, whose limit counts from here
        on."""
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
                # the server may still be at work on it
                with contextlib.suppress(SGLangError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._client.abort(rid), ABORT_S)
                return LostRequest(request.rid, str(error), error.late)
            else:
                self._room.came(result.prompt_tokens + result.completion_tokens)
        # Requests that are aborted here are forgotten, so the server aborted this one.
        if result.finish_reason == "abort":
            return LostRequest(
                request.rid, f"{self._client.asked}: the server gave the response up"
            )
        return result

    def collect(self, wait_s: float) -> list[GenerateResult | LostRequest]:
        """See Engine. Requests go out, and answers come in, only while this waits."""
        if not self._under_way:
            return []
        return self._waited(lambda: self._first(wait_s))

    async def _first(self, wait_s: float) -> list[GenerateResult | LostRequest]:
        """Unblocked by the first answer or error, the server's loss, or after `wait_s`. An error
        ends the other requests; of a server that is lost they are all lost."""
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
            # retrieve the errors: asyncio logs those that nobody asked for
            await asyncio.gather(*done, return_exceptions=True)
            await self._forget()
            raise

    def abort(self) -> None:
        if self._under_way:
            self._waited(self._forget)

    async def _forget(self) -> None:
        """Ends what is under way, here and on the server, if it still answers."""
        # a server that hangs must not delay the caller
        told = asyncio.wait_for(self._client.abort(), ABORT_S)
        await asyncio.gather(self._cancel(), told, return_exceptions=True)

    async def _cancel(self) -> None:
        """Ends what is under way here."""
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
        # the server may have restarted since, and have left the trainer's group
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
        """Runs a part of a weight update. Where it fails the engine is DIRTY, and its server stays
        paused."""
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
        """A server with a request under way would die of it, so it is paused first and asked
        whether it is idle."""
        await self._client.pause("abort")
        await self._client.flush(IDLE_S)
        await self._client.release_memory(parts)

    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        left = resume(self._released, parts)
        self._run(lambda: self._client.resume_memory(parts))
        self._released = left
        if "weights" in parts:
            self._state = advance(self._state, EngineState.DIRTY)
        if not left and publishes(self._state):  # else the end of a weight update does so
            self._run(self._client.resume)

    def memory_mb(self) -> float | None:
        """Pss of a server started here, 10^6 bytes; None for another's."""
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
        """Ends what is under way on the server, and the connections to it."""
        await self._watch.close()
        if self._watch.gone:
            await self._cancel()  # there is nobody to tell
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
    """Proves that a server treats stop tokens as training needs them: forces each of them once, by
    a bias on its logit, which needs no weights in particular. Waits for one short response each.

    A response must end with the token that stopped it, with its log-prob: it is sampled, so it is
    trained on.

    Raises:
        SGLangError: a token does not stop, is not named as what stopped, or comes without its id or
            log-prob.
    """
    for token in stop_token_ids:
        request = GenerateRequest(f"probe-{token}", (token,), prompt_cursor=0, sample_index=0)
        params = SamplingParams(
            1.0, 4, seed=0, step=0, stop_token_ids=tuple(stop_token_ids), greedy=True
        )
        body = generate_body(request, params, request.rid)
        body["sampling_params"]["logit_bias"] = {str(token): FORCING}
        check_stop(await client.generate(body), token, client.url)
