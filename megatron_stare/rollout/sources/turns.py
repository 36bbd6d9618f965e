"""Serves the environment of one response: generates the policy's tokens turn by turn, and calls
tools.

Requests go to the engines through a `Serving` object. An `UnderWay` object keeps the engines'
answers, and the journal of calls keeps the tools' answers. An environment that runs again therefore
receives the same answers.
"""

from __future__ import annotations

import functools
import itertools
import json
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_stare.environments.environment import (
    WHERE,
    CallFailedError,
    Tool,
    Turn,
    unusable_stop,
)
from megatron_stare.errors import DataError, WeightVersionError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.records.trajectory import NOT_SAMPLED, Branch, Trajectory, VersionRuns
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult
from megatron_stare.rollout.engines.model_folder import text_of
from megatron_stare.rollout.fleet.dispatch import Serving
from megatron_stare.rollout.sources.calls import Call, CallJournal
from megatron_stare.rollout.sources.under_way import Answer, ResponseGivenUp, UnderWay

# maximum: a character has up to four bytes, and a token may be a single byte
TOKENS_A_CHARACTER = 4


class Turns:
    """Implements environments.environment.Generate.

    Args:
        tokens: number of tokens to sample before the response is cut. If `tokens` is None, the
            response is never cut.
        longest: maximum number of tokens of a branch, including the branch's context.
        tokenizer: a transformers tokenizer.
        journal: journal of tool calls.
    """

    def __init__(
        self,
        serving: Serving,
        response: UnderWay,
        params: SamplingParams,
        tokens: int | None,
        longest: int,
        tokenizer: Any,
        journal: CallJournal,
    ) -> None:
        self._serving = serving
        self._response = response
        self._params = params
        self._tokens = tokens
        self._left = tokens
        self._longest = longest
        self._tokenizer, self._journal = tokenizer, journal
        self._turns, self._calls = itertools.count(), itertools.count()
        self._failed: list[Call] = []

    async def __call__(
        self,
        context: Sequence[int],
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        branch: Branch | None = None,
    ) -> Turn:
        """See Generate."""
        response, prompt, params = self._response, self._response.prompt, self._params
        at, opening = (0, prompt.token_ids) if branch is None else (branch.start, branch.context)
        if tuple(context[: len(opening)]) != opening:
            what = "the prompt" if branch is None else "that of its branch"
            raise DataError(
                f"the context to continue does not begin with {what}",
                where=f"{WHERE}, prompt {prompt.id}",
                fix="pass response.context, and response.branch once the response has branches",
            )
        start = at + len(context) - len(opening)
        stops = _checked(
            (stop,) if isinstance(stop, str) else tuple(stop), self._tokenizer, prompt.id
        )
        left = params.max_new_tokens - start
        if branch is not None:  # whose context no source of prompts has bounded
            left = min(left, self._longest - len(context))
        if left < 1:
            return Turn(torch.zeros(0, dtype=torch.int32), torch.zeros(0), (), "length", "")
        self._failed.clear()  # the environment has caught these errors
        call, limit = next(self._turns), min(left, max_new_tokens or left)
        pauses = may_complete(stops, self._tokenizer) if stops else ()
        answer = response.answer(call, context)
        while answer.finish_reason is None:
            asked = limit - len(answer)
            if asked < 1:
                raise response.not_repeated()
            if self._left is not None:
                asked = min(asked, self._left)
                self._left -= asked
                if not asked:
                    raise response.cut(context)
            result = await self._serving.generate(
                GenerateRequest(
                    rid=f"{prompt.cursor}:{response.sample_index}:{call}",
                    input_ids=(
                        (*context, *answer.tokens.tolist()) if len(answer) else tuple(context)
                    ),
                    prompt_cursor=prompt.cursor,
                    sample_index=response.sample_index,
                    start=start + len(answer),
                    branch=at,
                    max_new_tokens=asked,
                    noise_step=response.step,
                    replica=response.replica,
                    stop_token_ids=pauses,
                )
            )
            check_result(result, {*params.stop_token_ids, *pauses})
            if self._tokens is not None:
                check_versions([result], params.step - 1)
            if self._left is not None:
                self._left += asked - result.output_ids.numel()
            response.replica = result.replica
            self._add(answer, result, asked, limit, stops)
        return answer.turn()

    def _add(
        self, answer: Answer, result: GenerateResult, asked: int, limit: int, stops: tuple[str, ...]
    ) -> None:
        """Appends an engine's tokens to the answer. If the appended tokens finish the answer, also
        sets the answer's finish reason and text."""
        first, reason = not len(answer), result.finish_reason
        answer.add(result)
        paused = reason == "stop" and int(result.output_ids[-1]) not in self._params.stop_token_ids
        if paused:
            answer.stop = completed(answer.tokens, stops, self._tokenizer)
            if answer.stop is None and len(answer) < limit:
                return
            reason = "length" if answer.stop is None else "stop"
        # a result shorter than requested that ended by length has filled the engine's context
        elif reason == "length" and result.output_ids.numel() == asked and len(answer) < limit:
            return
        answer.finish_reason = reason
        # text without the stop token
        ends = "length" if paused else reason
        answer.text = (
            result.text if first and not paused else text_of(answer.tokens, ends, self._tokenizer)
        )

    async def call(self, tool: Tool, request: Any, *, idempotent: bool = False) -> Any:
        """Implements Generate.call. Waits until the tool has finished and the journal has stored
        the outcome of the call.

        Raises:
            ResponseGivenUp: an earlier run began the call, the outcome of the call is unknown, and
                the call is not idempotent.
        """
        response, name = self._response, str(getattr(tool, "__name__", type(tool).__name__))
        where = f"{WHERE}, prompt {response.prompt.id}, tool {name}"
        asked = _json([name, request], "a tool is asked", where)
        number, key = next(self._calls), response.key
        before = response.called(number, asked)
        call = self._journal.find(key, number, asked)
        made = before or (call.id if call is not None else uuid.uuid4().hex)
        response.begin_call(number, asked, made)
        if call is not None and call.outcome is not None:
            return self._said(call, where)
        if (before or call is not None) and not idempotent:
            raise ResponseGivenUp
        if call is None:  # never made, or the journal does not belong to the checkpoint
            call = await self._journal.begin(key, number, asked, made)
        try:
            outcome = {"answer": await tool(request, call.id)}
        except (Exception, SystemExit) as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
            self._failed.append(call)  # first, as this may be cancelled while the record is written
        text = _json(outcome, "a tool answered", where)
        await self._journal.end(key, call, json.loads(text))
        return self._said(call, where)

    def _said(self, call: Call, where: str) -> Any:
        """Returns a new copy of a tool call's answer. Raises CallFailedError if the answer was an
        error."""
        assert call.outcome is not None
        if "error" in call.outcome:
            if call not in self._failed:
                self._failed.append(call)
            raise CallFailedError(
                f"the tool failed: {call.outcome['error']}",
                where=where,
                fix="mend it, or let the environment catch CallFailedError",
            )
        return json.loads(json.dumps(call.outcome["answer"]))

    async def take_back_failures(self) -> None:
        """Marks the outcome of a tool call as unknown if the call failed after the policy's last
        turn. The outcomes of calls that failed before the last turn stay in the journal. The
        environment has caught the errors of these earlier calls, because the environment went on to
        request the last turn.

        The rollout source calls this method after the environment was cancelled or has ended with
        an error. A failed tool call may have caused the environment's error. If the journal kept
        the outcome of the failed tool call, every resumed run would receive the same tool error
        again.
        """
        for call in self._failed:
            await self._journal.take_back(self._response.key, call)

    def check_repeated(self) -> None:
        """Raises DataError if the environment ran again and made fewer calls than before."""
        if next(self._turns) < len(self._response.answers) or next(self._calls) < len(
            self._response.calls
        ):
            raise self._response.not_repeated()


def _json(value: Any, what: str, where: str) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what} a value that JSON cannot hold: {error}",
            where=where,
            fix="use text, finite numbers, true, false, None, and lists and dictionaries of these",
        ) from error


def _checked(stops: tuple[str, ...], tokenizer: Any, prompt: str) -> tuple[str, ...]:
    """Raises DataError if a stop string cannot be found reliably in the text of a turn."""
    for stop in stops:
        if found := unusable_stop(stop, tokenizer):
            what, fix = found
            raise DataError(
                f"the stop string {stop!r} {what}", where=f"{WHERE}, prompt {prompt}", fix=fix
            )
    return stops


def completed(tokens: Tensor, stops: tuple[str, ...], tokenizer: Any) -> str | None:
    """Returns the stop string that the last token of `tokens` [n] completes. Returns None if the
    last token completes no stop string. The tokens before the last token must not contain a whole
    stop string."""
    longest = TOKENS_A_CHARACTER * (max(map(len, stops)) + 1)
    text = text_of(tokens[-longest:], "length", tokenizer)
    return next((stop for stop in stops if stop in text), None)


@functools.lru_cache(maxsize=64)
def may_complete(stops: tuple[str, ...], tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids, in ascending order, of the tokens that may complete one of the stop strings.
    A token may complete a stop string if the token's text starts with a suffix of the stop string,
    or contains the whole stop string. Some tokens contain only some of the bytes of a character.
    The text of such an incomplete token cannot be compared with a suffix of the stop string. An
    incomplete token may complete a stop string if the token's text contains the last character of
    the stop string."""

    def may(text: str, stop: str) -> bool:
        if stop[-1] not in text:
            return False
        return (
            stop in text
            or "\ufffd" in text
            or any(text.startswith(stop[i:]) for i in range(1, len(stop)))
        )

    return tuple(
        token for token, text in _texts(tokenizer) if any(may(text, stop) for stop in stops)
    )


@functools.lru_cache(maxsize=4)
def _texts(tokenizer: Any) -> list[tuple[int, str]]:
    """Returns the id and the text of every token with a nonempty text. Each token is decoded as the
    second token of a pair, because some tokens lose their leading space if they are decoded alone.
    The first token is the same in every pair. After a pair is decoded, the text of the first token
    is removed from the decoded text."""
    before = tokenizer("0", add_special_tokens=False).input_ids[-1:]
    length = len(tokenizer.decode(before))
    ids = sorted(set(tokenizer.get_vocab().values()))
    texts = tokenizer.batch_decode([[*before, token] for token in ids], skip_special_tokens=True)
    return [(token, text[length:]) for token, text in zip(ids, texts, strict=True) if text[length:]]


def check_result(result: GenerateResult, stop_token_ids: Collection[int]) -> None:
    """Raises DataError if an engine broke its contract: columns differ in length, or the finish
    reason contradicts the tokens.

    Args:
        stop_token_ids: tokens that end a response, and tokens at which the request asked to stop.
    """
    where = f"request {result.rid}"
    ids, log_probs = result.output_ids.numel(), result.output_log_probs.numel()
    versions = covered(result.versions)
    if not ids == log_probs == versions:
        raise DataError(
            f"the engine returned {ids} tokens, {log_probs} log-probs and weight versions of"
            f" {versions}",
            where=where,
        )
    if early := set(result.output_ids[:-1].tolist()) & set(stop_token_ids):
        raise DataError(
            f"the response goes on after the tokens {sorted(early)}, which end it",
            where=where,
            fix=(
                "the engine must heed the request's stop_token_ids beside those of the sampling"
                " parameters"
            ),
        )
    if result.finish_reason == "stop" and (
        not ids or int(result.output_ids[-1]) not in stop_token_ids
    ):
        first = ", ".join(map(str, sorted(stop_token_ids)[:9]))
        raise DataError(
            f"the response stopped, but its last token {result.output_ids[-1:].tolist()} is no stop"
            f" token ({first}{', ...' * (len(stop_token_ids) > 9)})",
            where=where,
            fix="the engine must return the stop token with its log-prob, and stop at no other",
        )


def covered(versions: VersionRuns) -> int:
    """Returns the total number of tokens in a list of pairs (weight version, number of tokens)."""
    return sum(tokens for _, tokens in versions)


def check_versions(responses: Sequence[Trajectory | GenerateResult], expected_version: int) -> None:
    """Raises WeightVersionError if a sampled token has a weight version other than
    `expected_version`."""
    found: Counter[int] = Counter()
    for response in responses:
        for version, tokens in response.versions:
            found[version] += tokens
    del found[NOT_SAMPLED]
    if set(found) <= {expected_version}:
        return
    counts = ", ".join(
        f"version {version}: {count} tokens" for version, count in sorted(found.items())
    )
    raise WeightVersionError(
        f"the trainer holds version {expected_version}, but the rollout was sampled by {counts}",
        where="rollout",
        fix=(
            "sync the weights to every engine before generating, and drop the samples of other"
            " versions"
        ),
    )
