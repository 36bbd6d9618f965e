"""Defines the environment in which the policy calls tools over several turns.

If a turn contains tool calls, the tools' answers follow the turn as tokens that the loss ignores.
If a call is wrong or a tool fails, the policy gets an answer that contains the text of the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import heapq
import inspect
import itertools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, validate_call
from transformers.utils import get_json_schema

from megatron_stare.config.schema import Config
from megatron_stare.environments.chat import (
    Call,
    ChatFormat,
    Malformed,
    encodable,
    read_calls,
)
from megatron_stare.environments.environment import (
    WHERE,
    Environment,
    Generate,
    Response,
    find_environment,
    unusable_stop,
)
from megatron_stare.environments.sandboxes import (
    DaemonThreads,
    Sandbox,
    SandboxName,
    make_sandbox,
)
from megatron_stare.errors import ConfigError, UserError, in_words
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.registry import Extension, forgotten_with_files, resolve, settings_of
from megatron_stare.rollout.engines.model_folder import stop_token_ids

TOOLS = {
    "code_interpreter": "megatron_stare.environments.tools.code_interpreter",
    "search": "megatron_stare.environments.tools.FolderSearch",
}
CALL_ID = "call_id"  # a tool's parameter that is given the call's id, not an argument
THREADS = 256  # of users' functions at once
PRINTED_NOTHING = "The program printed nothing."
_ONCE = "once"  # a setting of every tool

EarlierThinking = Literal["keep", "branch", "refuse"]
PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def code_interpreter(code: str) -> str:
    """Placeholder for the tool `code_interpreter`, whose code runs in the sandbox. Never called."""
    raise AssertionError("run by the sandbox")


code_interpreter.schema = {  # type: ignore[attr-defined]
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs Python code and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


class FolderSearch:
    """The tool `search`. Finds passages in the text files of a folder, and ranks them by BM25.

    Args:
        folder: folder with *.txt and *.md files, including all subfolders. Empty lines separate the
            passages of a file.
        results: largest number of passages in an answer.

    Raises:
        ConfigError: the folder contains no text.
    """

    __name__ = "search"
    _K, _B = 1.2, 0.75  # BM25 as Robertson and Zaragoza (2009) have it, with their usual values

    def __init__(self, *, folder: str, results: PositiveInt = 3) -> None:
        self._results = results
        files = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".txt", ".md"))
        self._passages = [
            (path.relative_to(folder).as_posix(), passage.strip())
            for path in files
            for passage in re.split(r"\n\s*\n", path.read_text(errors="replace"))
            if passage.strip()
        ]
        if not self._passages:
            raise ConfigError(
                f"there is no text in {folder!r}",
                where=f"{WHERE}.tools",
                fix="name a folder of .txt or .md files",
            )
        self._lengths: list[int] = []
        # by word, the passages that have it, and how often
        self._having: dict[str, list[tuple[int, int]]] = {}
        for number, (_, passage) in enumerate(self._passages):
            words = _words(passage)
            self._lengths.append(len(words))
            for word, count in Counter(words).items():
                self._having.setdefault(word, []).append((number, count))
        self._mean = sum(self._lengths) / len(self._lengths)

    def __call__(self, query: str) -> str:
        """
        Searches a collection of texts and returns the passages that fit best.

        Args:
            query: The words to search for.
        """
        scores: dict[int, float] = {}
        for word in sorted(set(_words(query)) & self._having.keys()):
            having = self._having[word]
            rarity = math.log(1 + (len(self._passages) - len(having) + 0.5) / (len(having) + 0.5))
            for number, count in having:
                weight = self._K * (1 - self._B + self._B * self._lengths[number] / self._mean)
                score = rarity * count * (self._K + 1) / (count + weight)
                scores[number] = scores.get(number, 0.0) + score
        best = heapq.nsmallest(self._results, scores, key=lambda each: (-scores[each], each))
        found = [self._passages[each] for each in best]
        return "\n\n".join(f"[{name}] {passage}" for name, passage in found) or "Nothing was found."


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Answer(NamedTuple):
    """A tool's answer. `seconds` is the wall-clock time of the call, without the time that the call
    waited for a free thread or a free sandbox worker."""

    text: str
    failed: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class ToolKind:
    """Definition of a tool. Contains the schema that describes the tool to the policy.

    `once`: if true, a call whose outcome is unknown is not repeated; the response that contains the
        call is discarded.
    """

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    once: bool


class Tools(Environment):
    """Environment in which the policy calls tools. The response ends after the first turn that
    contains no call of a tool. The environment has the following settings.

    `tools`: the list of tools. Each tool is code_interpreter, search, or the path of a function
        that has type annotations and a docstring: `path/to/tools.py:function` or
        `my_package.tools.function`. If a tool needs settings, write a mapping such as
        {name: search, folder: texts} instead of the tool's name. Add `once: true` to the mapping if
        a call of the tool must not be repeated.
    `max_turns`: the largest number of turns of the policy in a response. In the last allowed turn,
        tool calls are not executed.
    `max_calls`: the largest number of tool calls in a response. After `max_calls` calls, each
        further call gets an error as its answer.
    `turn_tokens`: limit on the number of tokens in a turn. If `turn_tokens` is null, a turn can use
        all tokens that remain for the response.
    `stop`: a stop string or a list of stop strings, such as "</tool_call>". The token that
        completes a stop string ends the turn and stays in the turn. If the turn contains calls, the
        environment then adds the token with which the chat template ends a turn. After this token,
        the environment adds the answers to the calls. The loss ignores all tokens that the
        environment adds. If the turn contains no call, the response ends.
    `earlier_thinking`: the way in which the environment handles a chat template that omits the
        thinking of earlier turns. If `earlier_thinking` is 'keep', the sampled thinking stays in
        the context. If `earlier_thinking` is 'branch', the environment begins a new branch of the
        response. The context of the new branch is the history, rendered by the chat template. The
        next turn is sampled and trained with this context. If `earlier_thinking` is 'refuse', the
        constructor raises ConfigError for a chat template that omits the thinking of earlier turns.
    `call_seconds`: the time limit of a call. If a call exceeds the limit, the policy gets an error
        as the answer. If the tool's function is not async, the function continues to run in its
        thread after the limit.
    `seconds`: the time that all calls of a response may take together. When the calls have used up
        `seconds`, each further call gets an error as its answer.
    `answer_characters`: the largest number of characters in an answer of a tool. If an answer is
        longer, the environment truncates the answer.
    `sandbox`: the sandbox in which `code_interpreter` runs: `bubblewrap`, `remote` or `monty`.
    `sandbox_url`: the URL of a server that uses SandboxFusion's protocol. Set `sandbox_url` only
        for the sandbox `remote`.
    `sandbox_workers`: the number of programs that can run in the sandbox at the same time.
    `memory_mb`: the memory limit of a program in the sandbox, in MiB (2**20 bytes).

    Raises:
        ConfigError: a tool cannot be read, two tools have the same name, a stop string is invalid,
            the sandbox does not work on this machine, or the chat template is unsuitable. A
            template is unsuitable if it does not support tools, ends turns with a token at which
            sampling does not stop, or changes earlier turns in a way that `earlier_thinking` does
            not allow.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        tools: Annotated[list[Extension], Field(min_length=1)],
        max_turns: PositiveInt = 8,
        max_calls: PositiveInt = 16,
        turn_tokens: PositiveInt | None = None,
        stop: str | list[str] | None = None,
        earlier_thinking: EarlierThinking = "keep",
        call_seconds: Seconds = 10.0,
        seconds: Seconds = 120.0,
        answer_characters: PositiveInt = 2000,
        sandbox: SandboxName = "bubblewrap",
        sandbox_url: str | None = None,
        sandbox_workers: PositiveInt = 8,
        memory_mb: Annotated[int, Field(ge=256)] = 1024,
    ) -> None:
        super().__init__(config, tokenizer)
        kinds = read_tools(tools)
        if not config.data.chat_template:
            raise ConfigError(
                "tools need prompts in the form of a chat, which tells the policy of them",
                where=WHERE,
                fix="data.chat_template=true",
            )
        self._format = ChatFormat(
            tokenizer, [kind.schema for kind in kinds], config.data.chat_template_kwargs
        )
        if self._format.end not in stop_token_ids(config.model.path, tokenizer):
            end = tokenizer.convert_ids_to_tokens(self._format.end)
            raise ConfigError(
                f"the chat template ends turns with {end}, where sampling does not stop, so no call"
                " would be answered",
                where=config.model.path,
                fix=f"add {self._format.end} to eos_token_id in generation_config.json",
            )
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        for each in self._stops:
            if found := unusable_stop(each, tokenizer):
                what, fix = found
                raise ConfigError(
                    f"the stop string {each!r} {what}", where=f"{WHERE}.stop", fix=fix
                )
        self._left_out = None if earlier_thinking == "keep" else self._format.left_out()
        if earlier_thinking == "refuse" and self._left_out is not None:
            raise ConfigError(
                "the chat template leaves out the thinking of earlier turns, which"
                " earlier_thinking=refuse does not allow",
                where=WHERE,
                fix="earlier_thinking: branch, or keep, or another template",
            )
        self._max_turns, self._max_calls, self._turn_tokens = max_turns, max_calls, turn_tokens
        self._call_seconds, self._seconds = call_seconds, seconds
        self._characters = answer_characters
        self._threads = DaemonThreads(THREADS)
        self._held: set[Future[Any]] = set()  # calls that outlast their time
        self._tools: dict[str, Tool] = {}
        self._boxes: list[Sandbox] = []
        for kind in kinds:
            if kind.function is code_interpreter:
                box = make_sandbox(
                    sandbox, sandbox_url, sandbox_workers, memory_mb, answer_characters
                )
                self._boxes.append(box)
                self._tools[kind.name] = Tool(kind, self._in_sandbox(box))
            else:
                self._tools[kind.name] = Tool(kind, self._in_threads(kind))

    @classmethod
    def tool_schemas(cls, settings: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
        return [kind.schema for kind in read_tools(settings["tools"])]

    @classmethod
    def branches(cls, settings: Mapping[str, Any]) -> bool:
        return settings.get("earlier_thinking") == "branch"

    def close(self) -> None:
        for box in self._boxes:
            box.close()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        response, made = Response(prompt), list[dict[str, Any]]()
        limit = self.config.rollout.max_new_tokens
        longest = self.config.rollout.max_prompt_tokens + limit
        cut = False
        for number in itertools.count(1):
            context = response.context
            turn = response.sampled(
                await generate(
                    context,
                    max_new_tokens=self._turn_tokens,
                    stop=self._stops,
                    branch=response.branch,
                )
            )
            stopped = turn.stop is not None  # and has not written the template's own end
            if not stopped and (
                turn.finish_reason != "stop" or int(turn.tokens[-1]) != self._format.end
            ):
                break
            calls = read_calls(turn.text)
            if not calls or number == self._max_turns:
                break
            answers = await self._answers(calls, made, generate)
            tokens, text = self._format.between(
                [{"role": "tool", "name": "call", "content": each.text} for each in answers]
            )
            history = None  # of a new branch
            if self._left_out is not None and self._left_out.changes(turn.text):
                history = self._format.history(context, turn.text, self._left_out)
            elif stopped:
                tokens = [self._format.end, *tokens]
            made += (
                {
                    "turn": number,
                    "name": call.name if isinstance(call, Call) else None,
                    "known": isinstance(call, Call) and call.name in self._tools,
                    "asked": dict(call.arguments) if isinstance(call, Call) else call.text,
                    "answer": answer.text,
                    "failed": answer.failed,
                    "seconds": answer.seconds,
                    "tokens": len(tokens) if first else 0,  # of all answers of the turn
                }
                for first, call, answer in zip(
                    itertools.chain([True], itertools.repeat(False)), calls, answers, strict=False
                )
            )
            # no room for the answers and a token of the policy's
            said = response.length + (len(tokens) if history is None else 0)
            before = len(response.context if history is None else history)
            if said >= limit or before + len(tokens) >= longest:
                cut = True
                break
            if history is None:
                response.observed(tokens, text)
            else:
                response.begin_branch([*history, *tokens], text)
        found = response.trajectory()
        found.turns, found.calls = number, tuple(made)
        return dataclasses.replace(found, finish_reason="length") if cut else found

    async def _answers(
        self,
        calls: Sequence[Call | Malformed],
        made: Sequence[Mapping[str, Any]],
        generate: Generate,
    ) -> list[Answer]:
        """Makes all calls of a turn concurrently, and returns their answers."""
        spent = sum(each["seconds"] for each in made)
        left = self._max_calls - len(made)
        answers = await asyncio.gather(
            *(
                self._answer(call, number < left, spent, generate)
                for number, call in enumerate(calls)
            ),
            return_exceptions=True,  # none is left behind
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [
            answer._replace(text=self._shortened(encodable(answer.text)))
            for answer in answers
            if not isinstance(answer, BaseException)
        ]

    async def _answer(
        self, call: Call | Malformed, allowed: bool, spent: float, generate: Generate
    ) -> Answer:
        if isinstance(call, Malformed):
            return _error(f"the call cannot be read, {call.why}")
        if not allowed:
            return _error(f"the limit of {self._max_calls} calls is reached")
        if spent >= self._seconds:
            return _error(f"the time of {self._seconds:g} seconds for calls is used up")
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        try:  # checked before the call, so that a wrong call costs none
            tool.check(call.arguments)
            request = json.loads(json.dumps(call.arguments, allow_nan=False))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return _error(f"argument {where}: {in_words(first)}")
        except ValueError as error:
            return _error(f"the arguments cannot be read: {error}")
        return Answer(**await generate.call(tool, request, idempotent=not tool.once))

    def _shortened(self, text: str) -> str:
        if len(text) <= self._characters:
            return text
        return f"{text[: self._characters]}\n... {len(text) - self._characters} characters left out"

    def _in_sandbox(self, box: Sandbox) -> Callable[..., Awaitable[Answer]]:
        async def run(arguments: Mapping[str, Any], call: str) -> Answer:
            ran = await box.run(arguments["code"], self._call_seconds)
            text = ran.output.rstrip("\n") or PRINTED_NOTHING
            return Answer(text, ran.failed, ran.seconds)

        return run

    def _require_threads(self, tool: str, thread: Future[Any]) -> None:
        """Registers a call that still runs in its thread after its time limit. Raises UserError
        when overdue calls occupy half of the threads or more. If overdue calls occupied all
        threads, every later call would wait for a free thread."""
        self._held.add(thread)
        self._held = {each for each in self._held if not each.done()}
        if len(self._held) >= THREADS // 2:
            raise UserError(
                f"{len(self._held)} calls of tools go on in their threads after their"
                f" {self._call_seconds:g} seconds, the newest one a call of {tool!r}",
                where=WHERE,
                fix="let the function give up by itself, for example by a timeout of its requests",
            )

    def _in_threads(self, kind: ToolKind) -> Callable[..., Awaitable[Answer]]:
        called: Any = kind.function
        if not inspect.isroutine(called) and not isinstance(called, functools.partial):
            called = called.__call__
        wants_id = CALL_ID in inspect.signature(called).parameters

        async def run(arguments: Mapping[str, Any], call: str) -> Answer:
            begun, thread = time.monotonic(), None
            asked = functools.partial(
                validate_call(called), **arguments, **({CALL_ID: call} if wants_id else {})
            )
            try:
                if inspect.iscoroutinefunction(called):
                    working: Awaitable[Any] = _awaited(asked)
                else:
                    starts = asyncio.Event()
                    thread = self._threads.submit(
                        _announced, asked, asyncio.get_running_loop(), starts
                    )
                    working = asyncio.wrap_future(thread)
                    await starts.wait()  # calls that wait for a thread lose none of their time
                    begun = time.monotonic()
                said = await asyncio.wait_for(working, self._call_seconds)
                text, failed = (
                    said if isinstance(said, str) else json.dumps(said, default=str),
                    False,
                )
            except TimeoutError:
                text, failed = f"Error: no answer in {self._call_seconds:g} seconds", True
                if thread is not None:
                    self._require_threads(kind.name, thread)
            except asyncio.CancelledError:
                if thread is not None:
                    thread.cancel()  # a call that has not begun is not made
                raise
            except UserError:  # for those who run the training
                raise
            except Exception as error:  # for the policy
                text, failed = f"Error: {type(error).__name__}: {error}", True
            return Answer(text, failed, time.monotonic() - begun)

        return run


def _announced(
    asked: Callable[[], Any], loop: asyncio.AbstractEventLoop, starts: asyncio.Event
) -> Any:
    """Runs in a thread. Signals to the event loop that the call has started, then calls the
    function."""
    with contextlib.suppress(RuntimeError):  # a loop that is closed waits for no call
        loop.call_soon_threadsafe(starts.set)
    with _staying():
        return asked()


async def _awaited(asked: Callable[[], Awaitable[Any]]) -> Any:
    with _staying():
        return await asked()


@contextlib.contextmanager
def _staying() -> Iterator[None]:
    """Context manager that turns SystemExit into a RuntimeError. For example, the policy can write
    `exit()` as the argument of a calculator, and the calculator evaluates the argument. In an event
    loop, a SystemExit would end the process."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"the tool tried to end the process ({error.code})") from error


class Tool:
    """Wraps a tool as the callable that `generate.call` expects."""

    def __init__(self, kind: ToolKind, run: Callable[..., Awaitable[Answer]]) -> None:
        self.__name__, self.once = kind.name, kind.once
        self._run, self._check = run, _checker(kind.function)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValidationError if the tool does not accept these arguments."""
        self._check(**arguments)

    async def __call__(self, request: Mapping[str, Any], call: str) -> dict[str, Any]:
        return (await self._run(request, call))._asdict()


def _error(text: str) -> Answer:
    return Answer(f"Error: {text}", True, 0.0)


def _checker(function: Callable[..., Any]) -> Callable[..., None]:
    """Returns a checker for calls of `function`. The checker takes the arguments of a call, and
    raises an error if `function` does not accept these arguments. The checker never calls
    `function`."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    _disguise(nothing, function)
    return validate_call(nothing)


def _disguise(stub: Any, function: Callable[..., Any]) -> None:
    """Gives `stub` the name, docstring and parameters of `function`. Two kinds of parameters are
    left out: the parameter that receives the call's id, and the parameters that the configuration
    has set."""
    inner, left_out = function, {CALL_ID}
    if isinstance(function, functools.partial):
        inner, left_out = function.func, {CALL_ID, *function.keywords}
    elif not inspect.isroutine(function):
        inner = type(function).__call__
    parameters = inspect.signature(function).parameters
    kept = [each for name, each in parameters.items() if name not in left_out]
    hints = inspect.get_annotations(inner, eval_str=True)
    stub.__name__ = stub.__qualname__ = str(getattr(function, "__name__", type(function).__name__))
    stub.__doc__ = inner.__doc__
    stub.__annotations__ = {
        name: hints[name] for name in hints if name in parameters and name not in left_out
    }
    stub.__signature__ = inspect.Signature(
        [each.replace(annotation=hints.get(each.name, each.empty)) for each in kept]
    )


def sandboxed(config: Config) -> Mapping[str, Any] | None:
    """Returns the environment's settings if the policy can run programs in a sandbox, and None
    otherwise. Raises ConfigError if the environment or a tool cannot be found."""
    kind, settings = find_environment(config.rollout.environment)
    if not issubclass(kind, Tools):
        return None
    found = [resolve(each.name, TOOLS, f"{WHERE}.tools") for each in settings["tools"]]
    return settings if code_interpreter in found else None


def read_tools(tools: Sequence[Extension]) -> list[ToolKind]:
    """Finds the tools that a configuration names.

    Raises:
        ConfigError: a tool cannot be found, lacks types or a docstring, or has the same name as
            another tool.
    """
    kinds: list[ToolKind] = []
    for extension in tools:
        kind = _read_tool(extension)
        if kind.name in [each.name for each in kinds]:
            raise ConfigError(
                f"two tools are called {kind.name!r}", where=f"{WHERE}.tools", fix="rename one"
            )
        kinds.append(kind)
    return kinds


@forgotten_with_files
@functools.lru_cache(maxsize=32)  # prompts' encoders ask, too, and a search reads its whole folder
def _read_tool(extension: Extension) -> ToolKind:
    where = f"{WHERE}.tools"
    settings = dict(extension.settings)
    once = settings.pop(_ONCE, False)
    if not isinstance(once, bool):
        raise ConfigError(f"once is {once!r}", where=where, fix="once: true or once: false")
    found = resolve(extension.name, TOOLS, where)
    given = settings_of(Extension(extension.name, settings), found, where, (CALL_ID,))
    if isinstance(found, type):
        found = found(**given)
    elif given:
        found = functools.update_wrapper(functools.partial(found, **given), found)
        del found.__wrapped__  # signatures would be those of the function without its settings
    return ToolKind(*_described(found, extension.name, where), found, once)


def _described(function: Any, name: str, where: str) -> tuple[str, Mapping[str, Any]]:
    """Returns the name and the schema of a tool, as the policy sees them. If the function has an
    attribute `schema`, this attribute is the schema. If the function has no attribute `schema`, the
    schema is built from the type annotations and the docstring of the function."""
    if (own := getattr(function, "schema", None)) is not None:
        return str(own["function"]["name"]), own

    def stub() -> None: ...

    try:
        _disguise(stub, function)
        schema = get_json_schema(stub)
        return str(schema["function"]["name"]), schema
    except Exception as error:  # transformers raises its own kinds, and a type may not exist
        raise ConfigError(
            f"the tool {name!r} cannot be described to the policy: {error}",
            where=where,
            fix="give it types, and a docstring with `Args:` and a line for each",
        ) from error
