"""Runs unmodified environments of the library `verifiers`, and trains on their episodes.

When the library plays an episode, its client sends requests for tokens to an inference server. This
module runs the inference server inside the driver and answers each request with tokens from
`generate`. Each request contains all token ids of the context to continue. For each request, the
module records the token ids of this context and the token ids that the policy samples after this
context. Training therefore uses exactly the token ids that the policy read and sampled.

The rollouts use a new event loop in each step, but the library's servers must outlive a step. The
library therefore runs in a separate thread with its own event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import (
    WHERE,
    Environment,
    Generate,
    Response,
    Turn,
    find_environment,
)
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory

COLUMN = "verifiers"  # of a prompt: the task's number and its key
SESSION, KEY = "X-Session-ID", "X-Run-Key"  # headers of a request
RENDERER = "megatron_stare.environments.chat_renderer.ChatRenderer"
_MODEL = "policy"
# tasks of an endless taskset: the first ones, which only evaluations use and which stay, and the
# newest ones, which stay as long as they are so few
EVALUATED, RECENT = 1_000, 5_000
_log = logging.getLogger(__name__)


class Verifiers(Environment):
    """Plays an environment of the library `verifiers`, version 0.4. The library's environment sets
    the reward, so `reward.verifier` must be `environment`. The prompts must come from
    `data.source: verifiers`.

    Args:
        taskset: name of the importable package that contains the taskset.
        settings: settings of the library's environment, with the names that the library's command
            line uses after `--env.`
        agent: the agent whose tokens are trained and whose reward counts. The policy plays the
            other agents too, without training on their tokens. null: the only agent.
        renderer: settings of one of the library's renderers. null: the tokenizer's chat template.

    Raises:
        ConfigError: the library or the taskset is not installed, a setting is invalid, or an agent
            would run programs of the policy outside of a container.
    """

    judges: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        taskset: str,
        settings: dict[str, Any] | None = None,
        agent: str | None = None,
        renderer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(config, tokenizer)
        self._library = opened(taskset, _text_of(settings))
        agents = self._library.agents
        if agent is None and len(agents) > 1:
            raise ConfigError(
                f"the environment {taskset!r} has the agents {', '.join(agents)}",
                where=f"{WHERE}.agent",
                fix="name the one to train",
            )
        if agent is not None and agent not in agents:
            raise ConfigError(
                f"the environment {taskset!r} has no agent {agent!r}",
                where=f"{WHERE}.agent",
                fix=f"one of {', '.join(agents)}",
            )
        self._agent = agent or agents[0]
        self._renderer = renderer or {
            "name": "custom",
            "import_path": RENDERER,
            "settings": config.data.chat_template_kwargs,
        }
        self._serving: Serving | None = None

    @classmethod
    def branches(cls, settings: Mapping[str, Any]) -> bool:
        return True

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        if self._serving is None:
            self._serving = Serving(self._library.environment, self._client())
        limit = self.config.rollout.max_new_tokens
        episode = Episode(
            prompt,
            generate,
            limit,
            self.config.rollout.max_prompt_tokens + limit,
            functools.partial(self.tokenizer.decode, skip_special_tokens=False),
        )
        playing = self._serving.begin(self._task(prompt), episode, self._agent)
        ended = asyncio.ensure_future(playing.wait())
        try:
            await asyncio.wait((ended, episode.failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await playing.cancel()
            await episode.close()
        if episode.failed.done():
            raise episode.failed.result()
        return episode.judged(playing.played(), self._agent)

    def close(self) -> None:
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    def _task(self, prompt: Prompt) -> Any:
        made_from = (prompt.columns or {}).get(COLUMN)
        if made_from is None:
            raise DataError(
                "the prompt is not of the source verifiers",
                where=f"{WHERE}, prompt {prompt.id}",
                fix="data.source=verifiers",
            )
        task = self._library.task(made_from["at"])
        if task.key != made_from["key"]:
            raise DataError(
                f"task {made_from['at']} of the taskset is not the one of the prompt",
                where=f"{WHERE}, prompt {prompt.id}",
                fix="let the taskset load the same tasks in the same order each time",
            )
        return task

    def _client(self) -> dict[str, Any]:
        return {"renderer": self._renderer, "renderer_model_name": self.config.model.path}


class Library:
    """An environment of the library `verifiers`, together with its tasks.

    `agents`: names of the environment's agents.
    `tasks`: number of tasks; None: the taskset is endless.
    """

    def __init__(self, taskset: str, settings: Mapping[str, Any]) -> None:
        self.environment = _made(taskset, settings)
        self.agents = list(self.environment.config.agent_harnesses())
        tasks = self.environment.taskset
        self._iterator = iter(tasks)
        self._tasks: dict[int, Any] = {}  # by index
        self._drawn = 0
        self.tasks: int | None = None
        if not tasks.INFINITE:
            self._tasks = dict(enumerate(self._iterator))
            self.tasks = self._drawn = len(self._tasks)
            if not self._tasks:
                raise ConfigError(f"the taskset {taskset!r} has no tasks", where=WHERE)

    def task(self, at: int) -> Any:
        """Returns a task of the taskset as a `verifiers.v1.Task`. The caller passes the task's
        index in the taskset. For an endless taskset, two constants limit the number of tasks in
        memory. The first `EVALUATED` tasks of the taskset stay in memory, because evaluations use
        these tasks repeatedly. Among the later tasks, only the tasks that were read most recently
        stay in memory, at most `RECENT` tasks. If a run goes back to an earlier checkpoint and
        needs a task that is no longer in memory, the taskset is read again from its beginning.
        Raises DataError if the taskset begins with a different task when it is read again."""
        if at < self._drawn and at not in self._tasks:
            first = self._tasks[0]
            self._iterator, self._tasks, self._drawn = iter(self.environment.taskset), {}, 0
            if self.task(0).key != first.key:
                raise DataError(
                    "the taskset does not give the same tasks again",
                    where=WHERE,
                    fix="continue the run in a new process, with --resume",
                )
        while self._drawn <= at:
            self._tasks[self._drawn] = next(self._iterator)
            if (old := self._drawn - RECENT) >= EVALUATED:
                del self._tasks[old]
            self._drawn += 1
        return self._tasks[at]


@functools.lru_cache(maxsize=8)  # the prompts and the environment use the same tasks
def opened(taskset: str, settings: str) -> Library:
    """Builds an environment of the library, together with its tasks. Results are cached.

    Args:
        settings: settings of the library's environment, as JSON.

    Raises:
        ConfigError: the environment cannot be made; see Verifiers.
    """
    return Library(taskset, json.loads(settings))


def opened_by(config: Config) -> Library:
    """Returns the environment that the setting `rollout.environment` selects. Raises ConfigError if
    this environment does not belong to the library `verifiers`."""
    kind, settings = find_environment(config.rollout.environment)
    if not issubclass(kind, Verifiers):
        raise ConfigError(
            "the source verifiers has the tasks of an environment of the library verifiers, but the"
            f" run's environment is {config.rollout.environment.name!r}",
            where="data.source",
            fix="rollout.environment={name: verifiers, taskset: NAME}",
        )
    return opened(settings["taskset"], _text_of(settings.get("settings")))


def _text_of(settings: Mapping[str, Any] | None) -> str:
    return json.dumps(settings or {}, sort_keys=True)


def _made(taskset: str, settings: Mapping[str, Any]) -> Any:
    """Builds an environment of the library `verifiers`. An agent without a configured runtime runs
    on this machine. An agent without a harness of its own uses the taskset's harness. If neither
    the agent nor the taskset has a harness, the agent uses ChatHarness, which only converses and
    calls tools."""
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        from megatron_stare.environments import chat_harness
    except ImportError as error:
        raise ConfigError(
            f"the library verifiers is not installed: {error}",
            where=WHERE,
            fix='pip install "megatron-stare[verifiers]"',
        ) from error
    # it warns of each response that is full; what fails is in the verdict
    logging.getLogger("verifiers").setLevel(logging.ERROR)
    try:
        known = loaders.env_config_type(taskset, str(settings.get("id", "")))
        chat_harness.register()
        own = loaders.default_harness_id(taskset)
        harness = own if own == taskset else chat_harness.ID
        agents = {
            name: {
                "runtime": {"type": "subprocess"},
                **({"harness": {"id": harness}} if _only_talks(default.harness) else {}),
                **settings.get(name, {}),
            }
            for name, default in agent_config_fields(known()).items()
        }
        data = {**settings, **agents, "taskset": {**settings.get("taskset", {}), "id": taskset}}
        config = loaders.resolve_env_config(data)
        made = loaders.load_environment(config)
    except Exception as error:  # of the taskset's own code, too
        raise ConfigError(
            f"the environment {taskset!r} cannot be made: {type(error).__name__}: {error}",
            where=WHERE,
            fix="install the taskset's package, and see its settings",
        ) from error
    for name, harness_config in config.agent_harnesses().items():
        runs_code = loaders.harness_class(harness_config.id).EXECUTES_CODE
        if runs_code and getattr(config, name).runtime.type == "subprocess":
            raise ConfigError(
                f"the harness {harness_config.id!r} of the agent {name!r} runs programs of the"
                " policy, which need a container",
                where=f"{WHERE}.settings.{name}",
                fix=f"{name}.runtime.type: docker, or {name}.harness.id: null",
            )
    return made


def _only_talks(harness: Any) -> bool:
    """Returns True if an agent has either no harness or the library's harness for conversations."""
    return harness is None or harness.id == "null"


class Episode:
    """Collects the response while the library plays an episode. An Episode must be used only in the
    event loop of the rollouts.

    `failed`: future that contains the error that ended the response, such as an error of an engine.
        The Episode stores the error in `failed` and does not raise the error inside the library.
        The library would treat an engine's error as an error of the library itself.
    """

    def __init__(
        self,
        prompt: Prompt,
        generate: Generate,
        limit: int,
        longest: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[BaseException] = self.loop.create_future()
        self._generate, self._limit, self._longest = generate, limit, longest
        self._decode = decode
        self._response = Response(prompt)
        self._turns, self._full = 0, False
        self._one = asyncio.Lock()  # agents may ask at the same time
        self._asking: set[asyncio.Task[Any]] = set()

    async def turn(self, context: Sequence[int], most: int | None, trained: bool) -> Turn | None:
        """Samples a turn after `context`. Returns None if sampling the response has failed, or if
        the response has no room for another turn.

        Args:
            most: token limit of the turn; None: the tokens that remain for the response.
            trained: whether the loss counts the turn's tokens.
        """
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            async with self._one:
                return await self._turn(context, most, trained)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a cut response, too
            if not self.failed.done():
                self.failed.set_result(error)
            return None
        finally:
            self._asking.discard(task)

    async def _turn(self, context: Sequence[int], most: int | None, trained: bool) -> Turn | None:
        response = self._response
        before = response.context
        follows = tuple(context[: len(before)]) == before
        told = context[len(before) :] if follows else ()
        length = response.length + len(told)
        if self.failed.done() or length >= self._limit or len(context) >= self._longest:
            self._full = True
            return None
        if not follows:
            response.begin_branch(context, f"\n\n{self._decode(context)}")
        elif told:
            response.observed(told, self._decode(told))
        turn = await self._generate(response.context, max_new_tokens=most, branch=response.branch)
        if trained:
            response.sampled(turn)
            self._turns += 1
        else:
            response.observed(turn.tokens.tolist(), turn.text)
        self._full = turn.finish_reason == "length" and (
            response.length >= self._limit or len(response.context) >= self._longest
        )
        return turn

    async def close(self) -> None:
        """Cancels all turns that are still being sampled."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def judged(self, played: Any, agent: str) -> Trajectory:
        """Returns the response. A response with the `reward_status` `ok` has the reward that the
        library gave to the agent's trace.

        Args:
            played: a `verifiers.v1.Episode`.

        Raises:
            DataError: the agent played more than once in the episode.
        """
        made = self._response.trajectory()
        made.turns = max(self._turns, 1)
        if self._full:
            made = dataclasses.replace(made, finish_reason="length")
        traces = [trace for trace in played.traces if trace.agent.name == agent]
        if len(traces) > 1:
            raise DataError(
                f"the agent {agent!r} played {len(traces)} times in one episode, and a response has"
                " one reward",
                where=f"{WHERE}, prompt {made.prompt.id}",
                fix="use an environment in which it plays once",
            )
        timeout = played.is_timeout or any(trace.is_timeout for trace in traces)
        if traces and (traces[0].ok or self._full):
            made.reward, made.reward_status = float(traces[0].reward), "ok"
        elif timeout:
            made.reward, made.reward_status = 0.0, "timeout"
        else:
            made.reward_status = "crash"
        if made.reward_status != "ok":
            errors = [*played.errors, *(each for trace in traces for each in trace.errors)]
            last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it ran no agent"
            made.verdict_detail = f"the episode of prompt {made.prompt.id} failed: {last}"
        return made


class _Session(NamedTuple):
    """Connects a trace of the library `verifiers` with the episode to which the trace belongs. Each
    request to the inference server has a header that contains the session's id."""

    episode: Episode
    trained: bool


class Playing:
    """Handle of an episode that runs in the library's event loop. The handle itself must be used
    only in the event loop of the rollouts."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]):
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._coroutine = coroutine
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(lambda _: self._ended.set_result(None))

    async def wait(self) -> None:
        """Waits until the episode has ended. Does not raise the error of a failed episode."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def cancel(self) -> None:
        """Cancels the episode, and waits until the episode's processes have ended."""
        if not self._ended.done():
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
            await self.wait()

    def played(self) -> Any:
        """Returns the finished `verifiers.v1.Episode`. The method `played` must be called only
        after the end of the episode."""
        assert self._task is not None
        return self._task.result()


class Serving:
    """Runs the library's servers for one environment, and the inference server from which the
    library requests tokens. The servers stop when `close` is called, when the Serving object is
    garbage-collected, or when the process ends.

    Args:
        environment: a `verifiers.v1.Env`.
        client: settings of the library's `TrainClient`, without the server's address.

    Raises:
        ConfigError: a server of the library does not start.
    """

    def __init__(self, environment: Any, client: Mapping[str, Any]) -> None:
        self._loop = library_loop()
        self._sessions: dict[str, _Session] = {}
        self._environment = environment
        stop = asyncio.Event()
        ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        served = asyncio.run_coroutine_threadsafe(
            _served(environment, dict(client), self._sessions, ready, stop), self._loop
        )
        self.close = weakref.finalize(self, _end, self._loop, stop, served)
        concurrent.futures.wait((ready, served), return_when=concurrent.futures.FIRST_COMPLETED)
        if not ready.done():
            error = served.exception()
            raise ConfigError(
                f"the servers of the library verifiers do not start: {error}", where=WHERE
            ) from error
        self._context = ready.result()

    def begin(self, task: Any, episode: Episode, agent: str) -> Playing:
        """Begins an episode and returns its handle."""
        return Playing(self._loop, self._play(task, episode, agent))

    async def _play(self, task: Any, episode: Episode, agent: str) -> Any:
        known: list[str] = []

        def begun(trace: Any) -> None:
            known.append(trace.id)
            self._sessions[trace.id] = _Session(episode, trace.agent.name == agent)

        try:
            return await self._environment.run_episode(task, self._context, on_trace=begun)
        finally:
            for each in known:
                del self._sessions[each]


@functools.cache
def library_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop in which the library runs. The first call creates the loop and its
    thread. All environments share one loop, because some locks of the library work in only one
    event loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _end(
    loop: asyncio.AbstractEventLoop,
    stop: asyncio.Event,
    served: concurrent.futures.Future[None],
) -> None:
    loop.call_soon_threadsafe(stop.set)
    if error := served.exception():
        _log.warning("the servers of the library verifiers ended: %s", error)


async def _served(
    environment: Any,
    client: dict[str, Any],
    sessions: Mapping[str, _Session],
    ready: concurrent.futures.Future[Any],
    stop: asyncio.Event,
) -> None:
    """Runs the servers until `stop` is set. When all servers have started, creates the
    `ModelContext` for all episodes. The future `ready` gets the `ModelContext` as its result."""
    from aiohttp import web
    from verifiers.v1 import ModelContext, TrainClientConfig

    key = secrets.token_hex(16)
    numbers = itertools.count()

    async def generate(request: Any) -> Any:
        session = sessions.get(request.headers.get(SESSION, ""))
        if session is None or request.headers.get(KEY) != key:
            return web.json_response({"error": {"message": "no such session"}}, status=404)
        body = await request.json()
        asked = session.episode.turn(
            body["token_ids"], body["sampling_params"].get("max_tokens"), session.trained
        )
        turn = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(asked, session.episode.loop)
        )
        if turn is None:
            message = "the response has no room for another turn"
            return web.json_response({"error": {"message": message}}, status=400)
        return web.json_response(_answer(turn, next(numbers)))

    application = web.Application(client_max_size=2**30)
    application.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        config = TrainClientConfig.model_validate(
            {
                **client,
                "base_url": address,
                "api_key_var": "MEGATRON_STARE_NO_API_KEY",
                "headers": {KEY: key},
            }
        )
        async with environment.serving():
            ready.set_result(ModelContext(model=_MODEL, client=config))
            await stop.wait()
    finally:
        await runner.cleanup()


def _answer(turn: Turn, number: int) -> dict[str, Any]:
    """Returns a turn in the format of a response from vLLM's /inference/v1/generate."""
    ids, log_probs = turn.tokens.tolist(), turn.log_probs.tolist()
    content = [
        {"token": f"token_id:{token}", "logprob": log_prob}
        for token, log_prob in zip(ids, log_probs, strict=True)
    ]
    return {
        "request_id": str(number),
        "choices": [
            {
                "index": 0,
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": turn.finish_reason,
            }
        ],
    }
