"""Where training gets its rollout batches from, and takes its new weights to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron_stare.batch import Prompt, SamplingParams
from megatron_stare.environments.environment import WHERE, Environment, Generate, Turn
from megatron_stare.errors import DataError, WeightVersionError
from megatron_stare.interruption import run_whole
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory, VersionRuns
from megatron_stare.rollout.dispatch import Serving
from megatron_stare.rollout.engine import GenerateRequest, GenerateResult
from megatron_stare.rollout.engine_pool import EnginePool, Exported
from megatron_stare.rollout.model_folder import sampled_text, text_of
from megatron_stare.rollout.under_way import ResponseCut, UnderWay

Progress = Callable[[int, int], None]  # is told trajectories finished and wanted
Enough = Callable[
    [Sequence[Trajectory]], bool
]  # is told a prompt's trajectories, all verified; True: no more is needed


class Verdict(Protocol):
    """What became of one answer; see rewards.verifier_pool.Verdict."""

    @property
    def reward(self) -> float | None: ...
    @property
    def status(self) -> Literal["ok", "timeout", "crash"]: ...
    @property
    def answer_at(self) -> int | None: ...
    @property
    def answer(self) -> str | None: ...


class Judge(Protocol):
    """Verifies answers as they come; see rewards.verdicts.Verdicts."""

    async def of(self, response: str, answer: str) -> Verdict: ...


class PromptStream(Protocol):
    """Prompts in order; see data.source.PromptSource."""

    def take(self, n: int) -> list[Prompt]: ...


class RolloutSource(ABC):
    """Rollout batches, one a training step, from weights that training publishes.

    What the synchronous source gives for nothing, an asynchronous one must keep:
    - every prompt of the stream is used exactly once, in the order of its cursor, also over a save and a resume;
    - a token's weight version is that of the weights that sampled it, and none is older than the bound that was asked
      for; at a bound of 0 every batch is the synchronous source's, bit for bit;
    - `publish` never leaves a replica with a mixture of weights that goes on sampling;
    - trajectories in flight, and those that wait for their step, are of prompts that `state` counts as not used, or are
      kept beside it (see group_sampling.Groups.kept).
    """

    @abstractmethod
    def next(self, step: int) -> RolloutBatch:
        """The batch that this step trains on, verified. Waits until it is whole."""

    @abstractmethod
    def publish(self, weights: Exported, version: int) -> None:
        """Hands over new weights; when it returns, `next` samples from none older than the source allows."""

    @abstractmethod
    def state(self) -> dict[str, int]:
        """Of the stream of prompts, before the first one that no batch was made of yet: a source that begins from it
        uses each prompt once."""

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """While open, the engines are the caller's. Waits until they have nothing of this source to do."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - most sources have nothing to give up
        """Gives up what is under way. Closing twice is allowed."""


@dataclass(frozen=True)
class Rollouts:
    """What makes trajectories: engines, environment and verifier.

    verify: opens the verifier for a number of answers; see rewards/verdicts.py.
    """

    pool: EnginePool
    environment: Environment
    verify: Callable[[int], contextlib.AbstractAsyncContextManager[Judge]]

    def make(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        params: SamplingParams,
        progress: Progress = lambda *_: None,
        wanted: Sequence[tuple[Prompt, int]] | None = None,
        verified: Callable[[Trajectory], None] = lambda _: None,
    ) -> list[Trajectory]:
        """See `made`; in an event loop of its own."""
        return run_whole(lambda: self.made(prompts, samples, params, progress, wanted=wanted, verified=verified))

    async def made(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        params: SamplingParams,
        progress: Progress = lambda *_: None,
        enough: Enough = lambda _: False,
        wanted: Sequence[tuple[Prompt, int]] | None = None,
        verified: Callable[[Trajectory], None] = lambda _: None,
    ) -> list[Trajectory]:
        """`samples` trajectories a prompt, in canonical order, verified as they come.

        Waits for the last verdict; unblocked by it, or by the first error of an engine, an environment or the
        verifier.

        Args:
            enough: once it says so, what is still being sampled is given up, and missing from what is returned.
            wanted: prompt and sample number of every trajectory that is made; None: all of them.
            verified: is told each trajectory as it gets its verdict.

        Raises:
            DataError: an engine or an environment broke its contract.
        """
        asked = wanted or [(prompt, index) for prompt in prompts for index in range(samples)]
        begun = [UnderWay(prompt, index, params.step) for prompt, index in asked]
        await self.carry_on(begun, params, progress, enough, verified=verified)
        made = [each.trajectory for each in begun if each.trajectory is not None]
        return sorted(made, key=lambda t: (t.prompt.cursor, t.sample_index))

    async def carry_on(
        self,
        responses: Sequence[UnderWay],
        params: SamplingParams,
        progress: Progress = lambda *_: None,
        enough: Enough = lambda _: False,
        tokens: int | None = None,
        verified: Callable[[Trajectory], None] = lambda _: None,
    ) -> None:
        """Makes responses that are under way, or have not been begun, to their end and their verdict, or until each has
        grown by so many tokens.

        Waits for the last verdict, and the last token of those that are cut; unblocked as `made` is.

        Args:
            responses: of whole groups, where `enough` is given.
            enough: as in `made`.
            tokens: that are sampled of a response; what is not finished then is cut. None: to its end.
            verified: is told each trajectory as it gets its verdict.

        Raises:
            DataError: an engine or an environment broke its contract.
            WeightVersionError: responses are cut, and a token is not of the weights that `params.step` trains.
        """
        wanted = Counter(response.prompt.cursor for response in responses)
        groups: dict[int, list[Trajectory]] = {cursor: [] for cursor in wanted}  # those that are verified
        sampling: dict[int, asyncio.Task[None]] = {}
        made, given_up = 0, False

        async def one(number: int, serving: Serving, judge: Judge) -> None:
            """One trajectory, from its prompt to its verdict. Waits for its environment, which waits for tokens, and
            then for the verifier; unblocked by them, by a cut, or by cancellation once there is enough."""
            nonlocal made, given_up
            response = responses[number]
            prompt = response.prompt
            calls = itertools.count()
            try:
                trajectory = await self.environment.run(
                    prompt, self._generate(serving, response, calls, params, tokens)
                )
            except ResponseCut:
                return
            except asyncio.CancelledError:
                if given_up:
                    return
                raise
            finally:
                del sampling[number]
                serving.leave()
            if next(calls) < len(response.answers):
                raise response.not_repeated()
            trajectory.prompt, trajectory.sample_index = prompt, response.sample_index
            check_trajectory(trajectory, params.max_new_tokens)
            made += 1
            progress(made, len(responses))
            self._set_sampled_text(trajectory, response, params)
            verdict = await judge.of(trajectory.said, prompt.answer)
            trajectory.reward, trajectory.reward_status = verdict.reward, verdict.status
            trajectory.answer_at, trajectory.answer = verdict.answer_at, verdict.answer
            response.finish(trajectory)
            verified(trajectory)
            group = groups[prompt.cursor]
            group.append(trajectory)
            if len(group) == wanted[prompt.cursor] and not given_up and enough(group):
                given_up = True
                for task in sampling.values():
                    task.cancel()

        progress(0, len(responses))
        async with self.verify(len(responses)) as judge, self.pool.serving(params, len(responses)) as serving:
            for number in range(len(responses)):
                sampling[number] = asyncio.create_task(one(number, serving, judge))
            await serving.finished(list(sampling.values()))

    def _set_sampled_text(self, trajectory: Trajectory, response: UnderWay, params: SamplingParams) -> None:
        """Sets what a verifier reads: it is made of the tokens, so that no word of an environment is in it whatever the
        environment calls the response's text. That of a single turn is there already."""
        answers = response.answers
        if len(answers) == 1 and torch.equal(answers[0].tokens, trajectory.tokens):
            said = answers[0].text
        else:
            said = sampled_text(trajectory, params.stop_token_ids, self.environment.tokenizer)
        trajectory.sampled_text = None if said == trajectory.text else said

    def _generate(
        self,
        serving: Serving,
        response: UnderWay,
        calls: Iterator[int],
        params: SamplingParams,
        tokens: int | None,
    ) -> Generate:
        """What the environment of a response asks for tokens: see environments.environment.Generate.

        Args:
            calls: numbers what it asks for.
            tokens: as in `carry_on`.
        """
        prompt, budget = response.prompt, tokens

        async def generate(context: Sequence[int], max_new_tokens: int | None = None) -> Turn:
            nonlocal budget
            start = len(context) - len(prompt.token_ids)
            if tuple(context[: len(prompt.token_ids)]) != prompt.token_ids:
                raise DataError("what is to be continued does not begin with the prompt", where=f"prompt {prompt.id}")
            left = params.max_new_tokens - start
            if left < 1:
                return Turn(torch.zeros(0, dtype=torch.int32), torch.zeros(0), (), "length", "")
            call, limit = next(calls), min(left, max_new_tokens or left)
            answer = response.answer(call, context)
            while answer.finish_reason is None:
                asked = limit - len(answer)
                if asked < 1:
                    raise response.not_repeated()
                if budget is not None:
                    asked = min(asked, budget)
                    budget -= asked
                    if not asked:
                        raise response.cut(context)
                result = await serving.generate(
                    GenerateRequest(
                        rid=f"{prompt.cursor}:{response.sample_index}:{call}",
                        input_ids=(*context, *answer.tokens.tolist()) if len(answer) else tuple(context),
                        prompt_cursor=prompt.cursor,
                        sample_index=response.sample_index,
                        start=start + len(answer),
                        max_new_tokens=asked,
                        noise_step=response.step,
                        replica=response.replica,
                    )
                )
                check_result(result, params.stop_token_ids)
                if tokens is not None:
                    check_versions([result], params.step - 1)
                first = not len(answer)
                answer.add(result)
                response.replica = result.replica
                # one that ends by its length before it was told to has no room left in the engine's context
                if result.finish_reason != "length" or result.output_ids.numel() < asked or len(answer) == limit:
                    answer.finish_reason = result.finish_reason
                    answer.text = (
                        result.text
                        if first
                        else text_of(answer.tokens, result.finish_reason, self.environment.tokenizer)
                    )
            return answer.turn()

        return generate


@dataclass(frozen=True)
class Collected:
    """A step's trajectories, in canonical order, and what there is to say of how they were chosen."""

    trajectories: list[Trajectory]
    metrics: Mapping[str, float]


class GroupSampling(Protocol):
    """Which prompt groups a step trains on; see rollout/group_sampling.py."""

    async def collect(
        self, rollouts: Rollouts, params: SamplingParams, progress: Progress, settled: Callable[[], None]
    ) -> Collected: ...


def training_params(params: SamplingParams) -> SamplingParams:
    """`params`. Raises ValueError where they do not sample from the whole distribution."""
    if params.greedy or params.top_p != 1:
        raise ValueError(f"training samples from the whole distribution, not with {params}")
    return params


def check_result(result: GenerateResult, stop_token_ids: Collection[int]) -> None:
    """Raises DataError where an engine breaks its contract: columns of different lengths, or a finish reason that its
    tokens contradict."""
    where = f"request {result.rid}"
    ids, log_probs = result.output_ids.numel(), result.output_log_probs.numel()
    versions = covered(result.versions)
    if not ids == log_probs == versions:
        raise DataError(
            f"the engine returned {ids} tokens, {log_probs} log-probs and weight versions of {versions}", where=where
        )
    if result.finish_reason == "stop" and (not ids or int(result.output_ids[-1]) not in stop_token_ids):
        raise DataError(
            f"the response stopped, but its last token {result.output_ids[-1:].tolist()} is no stop token "
            f"({sorted(stop_token_ids)})",
            where=where,
            fix="the engine must return the stop token with its log-prob, and stop at no other",
        )


def check_trajectory(trajectory: Trajectory, max_new_tokens: int) -> None:
    """Raises DataError where an environment breaks its contract: columns of different lengths, a token that carries
    loss though nothing sampled it, or a response longer than the run allows."""
    where = f"{WHERE}, prompt {trajectory.prompt.id}"
    n = len(trajectory)
    if trajectory.experts is not None and len(trajectory.experts) > len(trajectory.prompt.token_ids) + n:
        raise DataError(f"a trajectory of {n} tokens names the experts of more", where=where)
    columns = {
        "log-probs": trajectory.log_probs.numel(),
        "loss mask": trajectory.loss_mask.numel(),
        "weight versions": covered(trajectory.versions),
    }
    for name, length in columns.items():
        if length != n:
            raise DataError(f"a trajectory of {n} tokens has {name} of {length}", where=where)
    if n > max_new_tokens:
        raise DataError(
            f"a response of {n} tokens, what the environment says included; the run allows {max_new_tokens}",
            where=where,
            fix="let the environment say less, or raise rollout.max_new_tokens",
        )
    end = 0
    for version, tokens in trajectory.versions:
        if version == NOT_SAMPLED and bool(trajectory.loss_mask[end : end + tokens].any()):
            raise DataError("a token carries loss that no weights sampled", where=where)
        end += tokens


def covered(versions: VersionRuns) -> int:
    """Tokens that the runs cover."""
    return sum(tokens for _, tokens in versions)


def check_versions(responses: Sequence[Trajectory | GenerateResult], expected_version: int) -> None:
    """Raises WeightVersionError unless every sampled token was sampled by the weights of `expected_version`."""
    found: Counter[int] = Counter()
    for response in responses:
        for version, tokens in response.versions:
            found[version] += tokens
    del found[NOT_SAMPLED]
    if set(found) <= {expected_version}:
        return
    counts = ", ".join(f"version {version}: {count} tokens" for version, count in sorted(found.items()))
    raise WeightVersionError(
        f"the trainer holds version {expected_version}, but the rollout was sampled by {counts}",
        where="rollout",
        fix="sync the weights to every engine before generating, and drop the samples of other versions",
    )
