"""Real SGLang servers behind the engine interface: one engine for all servers of a run.

Requests come from the driver through an engine worker and go to the server with the fewest under way; weights come as
buckets of the trainer's stream and go to all servers at once. The servers are started here, or attached to by URL.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from megatron_stare.batch import SamplingParams
from megatron_stare.models import family_named
from megatron_stare.rollout.engine import GenerateRequest, GenerateResult, ModelInfo, ServedEngine
from megatron_stare.rollout.model_config import read_model_config
from megatron_stare.rollout.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.sglang.memory import release, resume
from megatron_stare.rollout.sglang.protocol import (
    SGLangError,
    check_flags,
    check_version,
    generate_body,
    prompt_log_probs,
    result_of,
    score_body,
)
from megatron_stare.rollout.sglang.server import ServerProcess
from megatron_stare.rollout.sglang.stop_probe import probe_stop
from megatron_stare.rollout.sglang.sync import DTYPES, WeightSync
from megatron_stare.rollout.sglang.update import WeightUpdate
from megatron_stare.rollout.state import EngineState, advance, require
from megatron_stare.rollout.stop import model_stop_token_ids
from megatron_stare.rollout.validate import check_params, check_requests

T = TypeVar("T")
# A server ends a response this many tokens short of its context, and says nothing but "length".
NEVER_FILLED = 2


class SGLangEngine(ServedEngine):
    """A fleet of servers that hold the same weights.

    Args:
        clients: one a server, which answers already.
        sync: brings weights to all of them.
        model_path: Hugging Face folder the servers were started from; its config is read.
        dtype: that the servers compute in.
        max_running: requests a server is given at a time; the rest wait here, for whichever has room first.
        loop: that runs the clients; this engine closes it.
        processes: of servers that end with this engine; empty: they are others'.
        flags: what the servers must have been started with, and the settings that ask for it; see check_flags.

    Raises:
        SGLangError: a server runs an unsupported release, or does not return stop tokens as it must.
        ConfigError: a server was not started with one of the flags.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        sync: WeightSync,
        model_path: str,
        dtype: str,
        max_running: int,
        loop: asyncio.AbstractEventLoop,
        processes: Sequence[ServerProcess] = (),
        flags: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        config = read_model_config(model_path)
        self._family = family_named(config.model_type, model_path)
        self._vocab_size = int(config.vocab_size)
        self._stop_token_ids = model_stop_token_ids(model_path)
        self._clients, self._sync, self.processes = list(clients), sync, list(processes)
        self._dtype, self._max_running, self._loop = DTYPES[dtype], max_running, loop
        self._state, self._version = EngineState.DIRTY, -1
        self._update: WeightUpdate | None = None  # the open one, or the last
        self._calls = 0
        infos = self._run(everywhere(*(client.server_info() for client in self._clients)))
        for client, info in zip(self._clients, infos, strict=True):
            check_version(str(info["version"]), client.url)
            check_flags(info, flags, client.url)
        held = (int(config.max_position_embeddings), *(int(info["max_total_num_tokens"]) for info in infos))
        self._context_length = min(held) - NEVER_FILLED
        self._run(everywhere(*(probe_stop(client, self._stop_token_ids) for client in self._clients)))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; the servers that were started here are looked at where it fails."""
        try:
            return self._loop.run_until_complete(coroutine)
        except SGLangError:
            for process in self.processes:
                process.require_alive()
            raise

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[GenerateResult]:
        """See Engine. Sampling noise is keyed on the request only where the servers honour seeds (docs/sglang.md)."""
        require(self._state, EngineState.HEALTHY, "generate")
        check_params(params)
        check_requests(requests, params, self.model_info())
        self._calls += 1
        return self._run(self._generate(requests, params, f"{self._version}.{self._calls}"))

    async def _generate(
        self, requests: Sequence[GenerateRequest], params: SamplingParams, call: str
    ) -> list[GenerateResult]:
        """Consumes the requests in order, each by the first server with room; waits for the last response.

        On an error what is under way is cancelled here and aborted there, and the error raised.
        """
        results: dict[int, GenerateResult] = {}
        waiting = iter(range(len(requests)))

        async def feed(client: SGLangClient) -> None:
            """One of a server's slots: takes the next request when the last one is answered."""
            for i in waiting:
                body = generate_body(requests[i], params, f"{call}:{requests[i].rid}")
                answer = await client.generate(body)
                results[i] = result_of(answer, requests[i], params.stop_token_ids, client.url)

        slots = min(self._max_running, -(-len(requests) // len(self._clients)))
        # slot by slot over the servers, so that few requests are spread evenly
        tasks = [asyncio.create_task(feed(client)) for _ in range(slots) for client in self._clients]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *(client.abort() for client in self._clients), return_exceptions=True)
            raise
        return [results[i] for i in range(len(requests))]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        require(self._state, EngineState.HEALTHY, "score")
        self._calls += 1
        call = f"{self._version}.{self._calls}"

        async def one(client: SGLangClient, number: int, tokens: Sequence[int]) -> list[float]:
            answer = await client.generate(score_body(tokens, f"{call}:{number}"))
            return prompt_log_probs(answer, tokens, client.url)

        async def by(client: SGLangClient) -> list[list[float]]:
            return await everywhere(*(one(client, i, tokens) for i, tokens in enumerate(sequences)))

        return self._run(everywhere(*(by(client) for client in self._clients)))

    def begin_weight_update(self, version: int) -> None:
        self._state = advance(self._state, EngineState.UPDATING)
        self._update = WeightUpdate(self._clients, self._sync, version, self._family, self._dtype)
        self._guarded(self._update.begin())

    def update_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._guarded(self._open_update("update weights").send(named_tensors))

    def end_weight_update(self) -> dict[str, str]:
        update = self._open_update("end the weight update")
        checksums = self._guarded(update.end())
        self._state, self._version = advance(self._state, EngineState.HEALTHY), update.version
        return checksums

    def _open_update(self, action: str) -> WeightUpdate:
        require(self._state, EngineState.UPDATING, action)
        assert self._update is not None
        return self._update

    def _guarded(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a part of a weight update. Where it fails the engine is DIRTY, and its servers stay paused."""
        try:
            return self._run(coroutine)
        except BaseException:
            self._state = advance(self._state, EngineState.DIRTY)
            raise

    def release_memory(self) -> None:
        require(self._state, EngineState.HEALTHY, "release its memory")
        self._state = advance(self._state, EngineState.RELEASED)
        self._run(release(self._clients))

    def resume_memory(self) -> None:
        require(self._state, EngineState.RELEASED, "resume its memory")
        self._run(resume(self._clients))
        self._state = advance(self._state, EngineState.DIRTY)

    def memory_mb(self) -> float | None:
        """Of the servers started here, Pss; None for others'."""
        return sum(process.memory_mb() for process in self.processes) if self.processes else None

    def model_info(self) -> ModelInfo:
        version = self._version if self._state is EngineState.HEALTHY else None
        return ModelInfo(version, self._state, self._vocab_size, self._context_length, self._stop_token_ids)

    def close(self) -> None:
        if self._state is EngineState.DEAD:
            return
        self._state = advance(self._state, EngineState.DEAD)
        try:
            with contextlib.suppress(SGLangError):
                self._loop.run_until_complete(self._leave())
        finally:
            for process in self.processes:
                process.close()
            self._loop.close()

    async def _leave(self) -> None:
        """Ends what is under way on the servers, and the connections to them."""
        await asyncio.gather(*(client.abort() for client in self._clients), return_exceptions=True)
        await self._sync.close()
        await everywhere(*(client.close() for client in self._clients))
