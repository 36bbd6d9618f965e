"""Defines the interface of a rollout source. A rollout source supplies batches to training and
receives new weights from training."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from megatron_stare.environments.environment import WHERE, Environment
from megatron_stare.errors import DataError, UserError
from megatron_stare.process.interruption import run_whole
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import NOT_SAMPLED, RewardStatus, Trajectory
from megatron_stare.rollout.engines.model_folder import sampled_text
from megatron_stare.rollout.fleet.dispatch import Serving
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.calls import CallJournal
from megatron_stare.rollout.sources.turns import Turns, covered
from megatron_stare.rollout.sources.under_way import ResponseCut, ResponseGivenUp, UnderWay
from megatron_stare.weights.sync.target import WeightStream

Progress = Callable[[int, int], None]  # called with the numbers of trajectories finished and wanted
Enough = Callable[
    [Sequence[Trajectory]], bool
]  # called with all trajectories of a prompt, verified; True: no more prompts are needed


class Verdict(Protocol):
    """Verdict on one answer; see rewards.verifier_pool.Verdict."""

    @property
    def reward(self) -> float | None: ...
    @property
    def status(self) -> RewardStatus: ...
    @property
    def answer_at(self) -> int | None: ...
    @property
    def answer(self) -> str | None: ...


class Judge(Protocol):
    """Verifies answers as they arrive; see rewards.verdicts.Verdicts."""

    @property
    def judges_groups(self) -> bool: ...

    async def of(
        self, response: str, answer: str, columns: Mapping[str, Any] | None = None
    ) -> Verdict: ...

    async def of_group(
        self, responses: Sequence[str], answer: str, columns: Mapping[str, Any] | None = None
    ) -> Sequence[Verdict]: ...

    def given(
        self, reward: float | None, status: Literal["ok", "timeout", "crash"], detail: str
    ) -> Verdict: ...


class PromptStream(Protocol):
    """Prompts in order; see data.source.PromptSource."""

    def take(self, n: int) -> list[Prompt]: ...


class _Judging:
    """Obtains verdicts on the responses of a rollout. If the verifier needs whole groups, a
    response waits until all responses to the same prompt have arrived. When the last response to a
    prompt arrives, all responses to this prompt are verified together.

    Args:
        wanted: number of responses to expect, by prompt cursor.
    """

    def __init__(self, judge: Judge, wanted: Mapping[int, int]) -> None:
        self._judge, self._wanted = judge, dict(wanted)
        self._here: dict[int, list[tuple[Trajectory, asyncio.Future[Verdict | None]]]] = {}
        self._given_up: set[int] = set()

    async def of(self, trajectory: Trajectory) -> Verdict | None:
        """Waits for the verdict on a response. Returns None if the response's group has been given
        up."""
        prompt = trajectory.prompt
        status = trajectory.reward_status
        if status in ("ok", "timeout", "crash"):  # by the environment
            return self._judge.given(trajectory.reward, status, trajectory.verdict_detail)
        if not self._judge.judges_groups:
            return await self._judge.of(trajectory.said, prompt.answer, prompt.columns)
        if prompt.cursor in self._given_up:
            return None
        verdict: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        self._here.setdefault(prompt.cursor, []).append((trajectory, verdict))
        await self._judge_whole(prompt)
        return await verdict

    async def without(self, prompt: Prompt) -> None:
        """Reduces by one the number of responses that are expected for a prompt. If the number of
        arrived responses to the prompt now equals the number of expected responses, verifies all
        arrived responses together."""
        self._wanted[prompt.cursor] -= 1
        await self._judge_whole(prompt)

    def give_up(self, cursor: int) -> None:
        """Gives up a group that will never be complete. The waiting responses of the group receive
        None instead of a verdict."""
        self._given_up.add(cursor)
        for _, verdict in self._here.pop(cursor, ()):
            if not verdict.done():
                verdict.set_result(None)

    async def _judge_whole(self, prompt: Prompt) -> None:
        here = self._here.get(prompt.cursor, ())
        if not here or len(here) < self._wanted[prompt.cursor]:
            return
        # in sample order, not in the order of completion
        group = sorted(self._here.pop(prompt.cursor), key=lambda each: each[0].sample_index)
        said = [trajectory.said for trajectory, _ in group]
        try:
            found = await self._judge.of_group(said, prompt.answer, prompt.columns)
        except Exception as error:  # every waiting response raises the error
            for _, verdict in group:
                if not verdict.done():
                    verdict.set_exception(error)
            return
        for (_, verdict), told in zip(group, found, strict=True):
            if not verdict.done():
                verdict.set_result(told)


class RolloutSource(ABC):
    """Supplies one rollout batch per training step. Batches are sampled from the weights that
    training publishes.

    Every rollout source must meet the following requirements. SynchronousSource meets all
    requirements by design.

    - Every prompt of the stream is used exactly once, in cursor order, even if the run is saved and
      resumed.

    - The weight version of a token is the version of the weights that sampled the token. No token
      is sampled from weights that are older than the configured age bound. With an age bound of 0,
      every batch equals the batch of SynchronousSource bit for bit.

    - After `publish`, no replica samples from a mixture of weight versions.

    - When the run is saved, some trajectories may be in flight or wait for their step. After a
      resume, none of these trajectories is missing. If the checkpoint stores a trajectory (see
      group_sampling.Groups.kept), the resumed run restores the trajectory. If the checkpoint does
      not store a trajectory, the method `state` treats the trajectory's prompt as unused. The
      resumed run then samples the trajectory again.
    """

    @abstractmethod
    def next(self, step: int) -> RolloutBatch:
        """Returns the verified batch of this step. Waits until the batch is complete."""

    @abstractmethod
    def publish(self, weights: WeightStream, version: int) -> None:
        """Publishes new weights. After this call, the batches from `next` contain no token that was
        sampled from weights older than the source allows."""

    @abstractmethod
    def state(self) -> dict[str, int]:
        """Returns the state that the prompt stream had before the first unused prompt. A prompt is
        used if a returned batch contains the prompt, if dynamic sampling dropped the prompt, or if
        `Groups.kept` stores the prompt. All other prompts are unused.

        A source that resumes from this state uses each prompt exactly once.
        """

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager. Inside the `with` block, only the caller uses the engines.
        Before the `with` block begins, the context manager waits until the engines have no work
        from this source."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - most sources have no work in flight
        """Cancels work in flight. Idempotent."""


@dataclass(frozen=True)
class Rollouts:
    """Makes trajectories with engines, environment and verifier.

    `verify`: function that returns an async context manager. The context manager yields a Judge,
        which verifies answers; see rewards/verdicts.py. The argument of the function is the number
        of responses that the Judge may have to verify.
    `calls`: journal of tool calls. By default, the journal of tool calls is kept only in the memory
        of this process.
    """

    pool: EnginePool
    environment: Environment
    verify: Callable[[int], contextlib.AbstractAsyncContextManager[Judge]]
    calls: CallJournal = field(default_factory=CallJournal)

    def make(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        params: SamplingParams,
        progress: Progress = lambda *_: None,
        wanted: Sequence[tuple[Prompt, int]] | None = None,
        verified: Callable[[Trajectory], None] = lambda _: None,
    ) -> list[Trajectory]:
        """Makes the same trajectories as the async method `Rollouts.made`, for callers without an
        event loop. Runs `Rollouts.made` in a new event loop and returns the trajectories."""
        return run_whole(
            lambda: self.made(prompts, samples, params, progress, wanted=wanted, verified=verified)
        )

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
        """Makes `samples` trajectories per prompt and returns them in canonical order. Each
        trajectory is verified as soon as the trajectory is finished.

        Waits for the last verdict. Raises the first error of an engine, an environment or the
        verifier.

        Args:
            enough: called with all verified trajectories of a prompt. Once `enough` returns True,
                unfinished trajectories are cancelled and left out of the result.
            wanted: prompt and sample index of every trajectory to make. If `wanted` is None, all
                samples of all prompts are made.
            verified: called with each trajectory after its verdict.

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
        """Starts or continues responses. Each response grows until the response is finished, or
        until the response has grown by `tokens` tokens. Finished responses are verified.

        Waits until all verdicts have arrived and every response is either finished or cut after
        `tokens` tokens. Raises the first error.

        Args:
            responses: responses to start or continue. If `enough` is given, `responses` must
                consist of complete groups.
            enough: as in `made`.
            tokens: number of tokens to sample per response. A response that is unfinished after
                `tokens` tokens is cut. If `tokens` is None, every response is sampled to its end.
            verified: called with each trajectory after its verdict.

        Raises:
            DataError: an engine or an environment broke its contract.
            WeightVersionError: `tokens` is given, and a token was not sampled by the weights that
                step `params.step` trains.
        """
        wanted = Counter(response.prompt.cursor for response in responses)
        # verified trajectories, by prompt
        groups: dict[int, list[Trajectory]] = {cursor: [] for cursor in wanted}
        sampling: dict[int, asyncio.Task[None]] = {}
        made, given_up = 0, False
        longest = self.environment.config.rollout.max_prompt_tokens + params.max_new_tokens

        async def judged(
            response: UnderWay, turns: Turns, trajectory: Trajectory, judging: _Judging
        ) -> bool:
            """Checks an environment's trajectory and waits for the verifier's reward. Returns
            False if the response's group was given up."""
            turns.check_repeated()
            trajectory.prompt, trajectory.sample_index = response.prompt, response.sample_index
            check_trajectory(trajectory, params.max_new_tokens, longest)
            self._set_sampled_text(trajectory, response, params)
            verdict = await judging.of(trajectory)
            if verdict is None:
                return False
            trajectory.reward, trajectory.reward_status = verdict.reward, verdict.status
            trajectory.answer_at, trajectory.answer = verdict.answer_at, verdict.answer
            response.finish(trajectory)
            return True

        async def one(number: int, serving: Serving, judging: _Judging) -> None:
            """Makes one trajectory and waits for the verdict on the trajectory. The function
            returns early if the response is cut, or if the response is cancelled because enough
            trajectories are finished."""
            nonlocal made, given_up
            response = responses[number]
            prompt = response.prompt
            turns = Turns(
                serving,
                response,
                params,
                tokens,
                longest,
                self.environment.tokenizer,
                self.calls,
            )
            try:
                trajectory = await self.environment.run(prompt, turns)
            except ResponseCut:
                return
            except ResponseGivenUp:
                trajectory = response.give_up()
            except SystemExit as error:  # would end the process as if the run were done
                await turns.take_back_failures()
                raise UserError(
                    f"the environment tried to end the process ({error.code})",
                    where=f"{WHERE}, prompt {prompt.id}",
                    fix="raise an error, or return the response",
                ) from error
            except Exception:
                await turns.take_back_failures()
                raise
            except asyncio.CancelledError:
                if given_up:
                    judging.give_up(prompt.cursor)
                    self.calls.forget(response.key)
                    return
                await turns.take_back_failures()
                raise
            finally:
                del sampling[number]
                serving.leave()
            made += 1
            progress(made, len(responses))
            kept = True
            if trajectory is response.trajectory:
                await judging.without(prompt)
            else:
                kept = await judged(response, turns, trajectory, judging)
            self.calls.forget(response.key)
            if not kept:
                return
            verified(trajectory)
            group = groups[prompt.cursor]
            group.append(trajectory)
            if len(group) == wanted[prompt.cursor] and not given_up and enough(group):
                given_up = True
                for task in sampling.values():
                    task.cancel()

        progress(0, len(responses))
        async with (
            self.verify(len(responses)) as judge,
            self.pool.serving(params, len(responses)) as serving,
        ):
            judging = _Judging(judge, wanted)
            for number in range(len(responses)):
                sampling[number] = asyncio.create_task(one(number, serving, judging))
            await serving.finished(list(sampling.values()))

    def _set_sampled_text(
        self, trajectory: Trajectory, response: UnderWay, params: SamplingParams
    ) -> None:
        """Sets the text that the verifier reads. The text is decoded from the sampled tokens alone,
        so the verifier never reads text that the environment wrote. For a single-turn response, the
        text is the engine's decoded text."""
        answers = response.answers
        if len(answers) == 1 and torch.equal(answers[0].tokens, trajectory.tokens):
            said = answers[0].text
        else:
            said = sampled_text(trajectory, params.stop_token_ids, self.environment.tokenizer)
        trajectory.sampled_text = None if said == trajectory.text else said


@dataclass(frozen=True)
class Collected:
    """A step's trajectories in canonical order, and metrics about the selection of these
    trajectories."""

    trajectories: list[Trajectory]
    metrics: Mapping[str, float]


class GroupSampling(Protocol):
    """Selects the groups of trajectories for a training step; see
    rollout/sources/group_sampling.py."""

    async def collect(
        self,
        rollouts: Rollouts,
        params: SamplingParams,
        progress: Progress,
        settled: Callable[[], None],
    ) -> Collected: ...


def training_params(params: SamplingParams) -> SamplingParams:
    """Returns `params`. Raises ValueError if `params` would not sample from the policy's full
    distribution."""
    if params.greedy or params.top_p != 1:
        raise ValueError(f"training samples from the whole distribution, not with {params}")
    return params


def check_trajectory(trajectory: Trajectory, max_new_tokens: int, longest: int) -> None:
    """Raises DataError if an environment broke its contract. The tokens, log-probs, loss mask and
    weight versions of a trajectory must have the same length. Only sampled tokens may be in the
    loss mask. The response and each of its branches must not be longer than the run allows.

    Args:
        longest: maximum number of tokens of a branch, including the branch's context.
    """
    where = f"{WHERE}, prompt {trajectory.prompt.id}"
    n = len(trajectory)
    if (
        trajectory.experts is not None
        and len(trajectory.experts) > len(trajectory.prompt.token_ids) + n
    ):
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
            f"a response has {n} tokens, the environment's included; the run allows"
            f" {max_new_tokens}",
            where=where,
            fix="let the environment say less, or raise rollout.max_new_tokens",
        )
    for branch, (start, end) in zip(trajectory.branches, trajectory.spans[1:], strict=True):
        if (size := len(branch.context) + end - start) > longest:
            raise DataError(
                f"a branch has {size} tokens, its context included; the run allows {longest}",
                where=where,
                fix="shorten the context, or raise rollout.max_prompt_tokens",
            )
    end = 0
    for version, tokens in trajectory.versions:
        if version == NOT_SAMPLED and bool(trajectory.loss_mask[end : end + tokens].any()):
            raise DataError("a token that no weights sampled carries loss", where=where)
        end += tokens
