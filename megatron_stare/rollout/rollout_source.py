"""Where training gets its rollout batches from, and takes its new weights to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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
    - trajectories in flight, and those that wait for their step, are of prompts that `state` counts as not used.
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
        return run_whole(self.made(prompts, samples, params, progress, wanted=wanted, verified=verified))

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
        wanted = wanted or [(prompt, index) for prompt in prompts for index in range(samples)]
        found: list[Trajectory | None] = [None] * len(wanted)
        groups: dict[int, list[Trajectory]] = {prompt.cursor: [] for prompt in prompts}  # those that are verified
        sampling: dict[int, asyncio.Task[None]] = {}
        made, given_up = 0, False

        async def one(number: int, serving: Serving, judge: Judge) -> None:
            """One trajectory, from its prompt to its verdict."""
            nonlocal made, given_up
            prompt, index = wanted[number]
            try:
                trajectory = await self.environment.run(prompt, self._generate(serving, prompt, index, params))
            except asyncio.CancelledError:
                if given_up:
                    return
                raise
            finally:
                del sampling[number]
                serving.leave()
            trajectory.prompt, trajectory.sample_index = prompt, index
            check_trajectory(trajectory, params.max_new_tokens)
            found[number] = trajectory
            made += 1
            progress(made, len(wanted))
            verdict = await judge.of(trajectory.text, prompt.answer)
            trajectory.reward, trajectory.reward_status = verdict.reward, verdict.status
            trajectory.answer_at, trajectory.answer = verdict.answer_at, verdict.answer
            verified(trajectory)
            group = groups[prompt.cursor]
            group.append(trajectory)
            if len(group) == samples and not given_up and enough(group):
                given_up = True
                for task in sampling.values():
                    task.cancel()

        progress(0, len(wanted))
        async with self.verify(len(wanted)) as judge, self.pool.serving(params, len(wanted)) as serving:
            for number in range(len(wanted)):
                sampling[number] = asyncio.create_task(one(number, serving, judge))
            await serving.finished(list(sampling.values()))
        return sorted((t for t in found if t is not None), key=lambda t: (t.prompt.cursor, t.sample_index))

    def _generate(self, serving: Serving, prompt: Prompt, index: int, params: SamplingParams) -> Generate:
        turns = itertools.count()

        async def generate(context: Sequence[int], max_new_tokens: int | None = None) -> Turn:
            """See environments.environment.Generate."""
            start = len(context) - len(prompt.token_ids)
            if tuple(context[: len(prompt.token_ids)]) != prompt.token_ids:
                raise DataError("what is to be continued does not begin with the prompt", where=f"prompt {prompt.id}")
            left = params.max_new_tokens - start
            if left < 1:
                return Turn(torch.zeros(0, dtype=torch.int32), torch.zeros(0), (), "length", "")
            request = GenerateRequest(
                rid=f"{prompt.cursor}:{index}:{next(turns)}",
                input_ids=tuple(context),
                prompt_cursor=prompt.cursor,
                sample_index=index,
                start=start,
                max_new_tokens=min(left, max_new_tokens or left),
            )
            result = await serving.generate(request)
            check_result(result, params.stop_token_ids)
            return Turn(
                result.output_ids,
                result.output_log_probs,
                result.versions,
                result.finish_reason,
                result.text,
                result.experts,
            )

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


class SynchronousSource(RolloutSource):
    """Samples a step's batch when it is asked for, from the weights that were published last.

    Args:
        groups: takes prompts, and says which of their trajectories a step trains on.
        sampling: for a step's number, how its trajectories are sampled.
        prompts: the state of the stream that `groups` takes them from.
        idle: called when a batch is made and the engines have nothing to do until the next `publish`.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        groups: GroupSampling,
        sampling: Callable[[int], SamplingParams],
        prompts: Callable[[], dict[str, int]],
        progress: Progress = lambda *_: None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._rollouts, self._groups = rollouts, groups
        self._sampling, self._prompts, self._progress, self._idle = sampling, prompts, progress, idle
        self.version = -1  # of the newest weights
        self.metrics: Mapping[str, float] = {}  # of the last batch

    def next(self, step: int) -> RolloutBatch:
        """See RolloutSource.

        Raises:
            WeightVersionError: a token was sampled by other weights than the newest.
            ValueError: greedily, or from a part of the vocabulary; the loss takes the policy for what was sampled from.
        """
        params = training_params(self._sampling(step))
        collected = run_whole(self._groups.collect(self._rollouts, params, self._progress, lambda: None))
        check_versions(collected.trajectories, self.version)
        self._idle()
        self.metrics = collected.metrics
        return RolloutBatch.from_trajectories(collected.trajectories, step)

    def publish(self, weights: Exported, version: int) -> None:
        self._rollouts.pool.update_weights(version, weights)
        self.version = version

    def state(self) -> dict[str, int]:
        return self._prompts()


def training_params(params: SamplingParams) -> SamplingParams:
    """`params`. Raises ValueError where they do not sample from the whole distribution."""
    if params.greedy or params.top_p != 1:
        raise ValueError(f"training samples from the whole distribution, not with {params}")
    return params


def check_result(result: GenerateResult, stop_token_ids: Collection[int]) -> None:
    """Raises DataError where an engine breaks its contract: columns of different lengths, or a finish reason that its
    tokens contradict."""
    where = f"request {result.rid}"
    ids, log_probs, versions = len(result.output_ids), len(result.output_log_probs), covered(result.versions)
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
        "log-probs": len(trajectory.log_probs),
        "loss mask": len(trajectory.loss_mask),
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


def check_versions(trajectories: Sequence[Trajectory], expected_version: int) -> None:
    """Raises WeightVersionError unless every sampled token was sampled by the weights of `expected_version`."""
    found: Counter[int] = Counter()
    for trajectory in trajectories:
        for version, tokens in trajectory.versions:
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
