"""Evaluates tasks with engines and verifiers. Training and `megatron-stare eval` use this
module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from megatron_stare.config.schema import RewardConfig
from megatron_stare.environments.environment import Environment
from megatron_stare.errors import RewardFailureError
from megatron_stare.evaluation.evaluate import Evaluated, evaluate
from megatron_stare.evaluation.response import Response
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.registry import Extension
from megatron_stare.rewards.verdicts import Verdicts, verdicts
from megatron_stare.rewards.verifier_pool import TooManyFailuresError, VerifierPool
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.calls import CallJournal
from megatron_stare.rollout.sources.rollout_source import Progress, Rollouts
from megatron_stare.rollout.sources.turns import check_versions
from megatron_stare.tasks.task import Evaluation


class Kept(Protocol):
    """Responses of one task that are stored outside of this process; see
    commands/evaluate/evaluation_folder.py."""

    def known(self, greedy: bool) -> Mapping[tuple[int, int], Response]: ...

    def add(self, response: Response, greedy: bool) -> None: ...


class Evaluator:
    """Samples responses to the problems of tasks and computes the share of correct responses.

    Args:
        engines: engines that hold the weights to evaluate. None if every response is already
            stored.
        verifiers: one pool of processes for every verifier that a task names.
        reward: settings with the tolerated share of verifier failures.
        stop_ids: tokens that end a response.
    """

    def __init__(
        self,
        engines: EnginePool | None,
        verifiers: Mapping[Extension, VerifierPool],
        reward: RewardConfig,
        stop_ids: tuple[int, ...],
    ) -> None:
        self._engines = engines
        self._verifiers = verifiers
        self._reward = reward
        self._stop_ids = stop_ids

    def evaluate(
        self,
        evaluation: Evaluation,
        step: int,
        version: int,
        progress: Progress = lambda *_: None,
        kept: Kept | None = None,
    ) -> Evaluated:
        """Evaluates one task with the current weights of the engines.

        Args:
            step: number of training steps that produced the weights.
            version: version of the weights. Weights of this version must sample every token.
            progress: receives the number of finished responses and the number of wanted responses.
                Sampled and greedy responses count together.
            kept: stored responses; see `responses`. New responses are added to `kept`.

        Raises:
            UserError: an engine or environment failed, or too many verifier calls failed. The error
                names the task.
            WeightVersionError: other weights sampled a token.
        """
        task = evaluation.task
        told = answered(evaluation, progress)
        with task.blamed():
            return evaluate(
                evaluation.prompts,
                partial(self.responses, evaluation, version, told, kept),
                partial(self._right, task.verifier),
                step=step,
                greedy=task.config.eval.greedy,
                samples=task.samples,
                ks=task.ks,
                seed=task.config.eval.seed,
                about=evaluation.about(),
            )

    def responses(
        self,
        evaluation: Evaluation,
        version: int,
        progress: Progress,
        kept: Kept | None,
        prompts: list[Prompt],
        count: int,
        *,
        step: int,
        seed: int,
        greedy: bool,
    ) -> list[Response]:
        """Returns `count` verified responses per prompt, ordered by prompt and sample index.
        Samples only the responses that are not in `kept`. If the verifier needs all responses to a
        prompt at once and one of these responses is not in `kept`, the method samples all responses
        to this prompt again."""
        known = dict(kept.known(greedy)) if kept is not None else {}
        wanted = [(prompt, index) for prompt in prompts for index in range(count)]
        missing = [
            (prompt, index) for prompt, index in wanted if (prompt.cursor, index) not in known
        ]
        pool = self._verifiers.get(evaluation.task.verifier)
        if pool is not None and pool.judges_groups:
            whole = {prompt.cursor for prompt, _ in missing}  # judged as a whole group
            missing = [each for each in wanted if each[0].cursor in whole]
        progress(len(wanted) - len(missing), len(wanted))
        judged = 0

        def verified(trajectory: Trajectory) -> None:
            nonlocal judged
            check_versions([trajectory], version)
            response = Response.of(trajectory)
            if kept is not None:
                kept.add(response, greedy)
            known[response.prompt, response.sample] = response
            judged += 1
            progress(len(wanted) - len(missing) + judged, len(wanted))

        task = evaluation.task
        params = task.sampling(step, seed, self._stop_ids, greedy)
        if missing:
            left = {(prompt.cursor, index) for prompt, index in missing}
            keys = [(prompt.cursor, index) for prompt, index in wanted]
            stored = [known[key] for key in keys if key not in left]
            rollouts = self.rollouts(task.verifier, evaluation.environment, stored=stored)
            rollouts.make(prompts, count, params, wanted=missing, verified=verified)
        return [known[prompt.cursor, index] for prompt, index in wanted]

    def rollouts(
        self,
        verifier: Extension,
        environment: Environment,
        calls: CallJournal | None = None,
        stored: Sequence[Response] = (),
    ) -> Rollouts:
        """Returns a `Rollouts` object, which samples responses in `environment` and verifies them
        with `verifier`.

        Args:
            calls: journal of the environment's calls; None: a journal in memory only.
            stored: responses of the same evaluation that are verified already. Their failures count
                towards the tolerated share.
        """
        if self._engines is None:
            raise RuntimeError("there are no engines to answer anything")
        judged = partial(self._judged, verifier, stored)
        return Rollouts(self._engines, environment, judged, calls or CallJournal())

    def _right(self, verifier: Extension, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """See evaluation.response.Judged. If a pair's reference answer cannot be parsed by the
        verifier, the result for this pair is False."""
        return [
            (verdict.reward or 0.0) > 0.5 for verdict in self._verifiers[verifier].verify(pairs)
        ]

    @contextlib.asynccontextmanager
    async def _judged(
        self, verifier: Extension, stored: Sequence[Response], answers: int
    ) -> AsyncIterator[Verdicts]:
        """Yields an object that verifies each answer as soon as the answer arrives. The argument
        `answers` says how many answers will arrive. The limit `reward.max_failure_rate` applies to
        the arriving answers and the answers in `stored` together.

        Raises:
            RewardFailureError: more verifier calls timed out or crashed than the configuration
                allows. The error is raised as soon as the limit is passed. Otherwise, a verifier
                that hangs would delay the step by one timeout per answer.
        """
        limit, whole = self._reward.max_failure_rate, len(stored) + answers
        failed = sum(response.status in ("timeout", "crash") for response in stored)
        most = math.floor(limit * whole) - failed
        try:
            async with verdicts(self._verifiers[verifier], most) as found:
                yield found
        except TooManyFailuresError as error:
            first, waiting = error.failed[0], answers - error.known
            failed += len(error.failed)
            raise RewardFailureError(
                f"{failed} of {whole} answers could not be verified, the limit is"
                f" {limit:.0%}"
                + (f" and {waiting} more were not waited for" if waiting else "")
                + f"; the first: {first.status} {first.detail}".rstrip(),
                where="reward.verifier",
                fix="mend the verifier, or raise reward.timeout_s or reward.max_failure_rate",
            ) from None


def answered(evaluation: Evaluation, progress: Callable[[int, int], None]) -> Progress:
    """Wraps `progress` so that one progress bar counts both the sampled and the greedy answers of
    an evaluation."""
    task, behind = evaluation.task, 0
    total = len(evaluation.prompts) * (task.samples + task.config.eval.greedy)

    def told(done: int, wanted: int) -> None:
        nonlocal behind
        progress(behind + done, total)
        if done == wanted:
            behind += wanted

    return told
