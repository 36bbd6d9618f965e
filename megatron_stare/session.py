"""Everything a run holds open - workers, verifiers, prompts, files - built in order and closed in reverse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from megatron_stare.batch import Prompt, Sample, SamplingParams
from megatron_stare.config.schema import Config
from megatron_stare.data.source import make_source
from megatron_stare.errors import RewardFailureError
from megatron_stare.interruption import ClosingStack, Standing, raise_if_received, stopped_at
from megatron_stare.methods import build_method
from megatron_stare.observability.live import make_display
from megatron_stare.observability.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron_stare.orchestration.agreement import AgreementWatch
from megatron_stare.orchestration.colocation import Colocation
from megatron_stare.orchestration.groups import Runner
from megatron_stare.preflight import check, check_checkpoints, load_tokenizer, notices
from megatron_stare.rewards.pool import RewardPool, TooManyFailuresError
from megatron_stare.rollout.collect import check_versions, requests_for, samples_from
from megatron_stare.rollout.stop import stop_token_ids
from megatron_stare.run_state import RunDir, RunState


class Session:
    """A run in progress. A context manager; nothing it started outlives it.

    Args:
        config: checked before anything is started.
        resume: continue the newest checkpoint of the run instead of starting one.
    """

    def __init__(self, config: Config, resume: bool) -> None:
        config = check(config)
        check_checkpoints(config)
        self.config = config
        self.method = build_method(config.algorithm)
        self.tokenizer = load_tokenizer(config.model.path)
        self.stop_ids = stop_token_ids(config.model.path, self.tokenizer)
        self.source = make_source(config, self.tokenizer, "train")
        self.eval_prompts = (
            make_source(config, self.tokenizer, "eval").take(config.eval.prompts) if config.eval.prompts else []
        )
        self.state = RunState(data=self.source.state(), method=self.method.initial_state())
        with ClosingStack() as stack:
            self.dir = RunDir.reopen(config) if resume else RunDir.create(config)
            stack.callback(self.dir.close)
            stack.push(self._note_standing)
            restored: Path | None = None
            if resume:
                restored, self.state = self.dir.newest()
                self.source.restore(self.state.data)
            self.display = make_display(config.run.steps, dtype=config.model.dtype)
            stack.callback(self.display.close)
            self.display.start(str(self.dir.path), config.algorithm["name"])
            self.writer = MetricsWriter(self.dir.path, self.state.step if resume else None)
            stack.callback(self.writer.close)
            self.verifiers = RewardPool(config.reward.verifier, config.reward.workers, config.reward.timeout_s)
            stack.callback(self.verifiers.close)
            if resume:
                self.display.restore(read_metrics(self.dir.path / METRICS_FILE))
            with self.display.phase("start"):
                runner = make_runner(config)
            stack.callback(runner.close)
            self.trainers, self.engines = runner.trainers, runner.engines
            self.agreement = AgreementWatch(config, self.trainers, self.engines)
            self.colocation = Colocation(config, self.engines)
            for line in [*notices(config), *self.trainers.notes()]:
                self.display.note(line)
            if restored:
                self.trainers.load(str(restored.resolve()))
                self.display.note(f"continuing after step {self.state.step}")
            self._open = stack.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def _note_standing(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leaves a note of how far the run got, where it is interrupted."""
        if isinstance(error, KeyboardInterrupt):
            run, newest = self.config.run, self.dir.newest_step()
            stopped_at(Standing(self.dir.path, self.state.step, run.steps, newest, chosen=run.dir is not None))

    def steps(self) -> Iterator[int]:
        """The steps still to do."""
        for step in range(self.state.step + 1, self.config.run.steps + 1):
            raise_if_received()
            yield step

    def rollout(
        self, prompts: list[Prompt], count: int, *, step: int, seed: int | None = None, greedy: bool = False
    ) -> list[Sample]:
        """`count` responses a prompt from the newest weights, in canonical order.

        Raises:
            WeightVersionError: a token was sampled by weights other than those of the last step.
        """
        rollout = self.config.rollout
        params = SamplingParams(
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
            seed=self.config.run.seed if seed is None else seed,
            step=step,
            stop_token_ids=self.stop_ids,
            greedy=greedy,
        )
        results = self.engines.generate(requests_for(prompts, count), params, self.display.rollout_progress)
        samples = samples_from(prompts, results, self.tokenizer, self.stop_ids)
        check_versions(samples, self.state.step)
        return samples

    def sync(self, version: int) -> None:
        """Brings the policy to the engines, as weights of this version, and proves that they compute with it."""
        self.colocation.resume()
        self.engines.update_weights(version, self.trainers.export())
        self.agreement.after_sync()

    def score(self, samples: list[Sample]) -> None:
        """Fills in rewards.

        Raises:
            RewardFailureError: more verifiers timed out or crashed than the configuration allows; as soon as it is
                certain, for a verifier that hangs would keep a step waiting for every answer in turn.
        """
        limit, total = self.config.reward.max_failure_rate, len(samples)
        try:
            scores = self.verifiers.score([(s.text, s.prompt.answer) for s in samples], math.floor(limit * total))
        except TooManyFailuresError as error:
            first, waiting = error.failed[0], total - error.known
            raise RewardFailureError(
                f"{len(error.failed)} of {total} answers could not be verified, the limit is {limit:.0%}"
                + (f" and {waiting} more were not waited for" if waiting else "")
                + f"; the first: {first.status} {first.detail}".rstrip(),
                where="reward.verifier",
                fix="mend the verifier, or raise reward.timeout_s or reward.max_failure_rate",
            ) from None
        for sample, score in zip(samples, scores, strict=True):
            sample.reward, sample.reward_status, sample.answer_at = score.reward, score.status, score.answer_at


def make_runner(config: Config) -> Runner:
    """The runner that the configuration names; its module is imported only then, so that inline runs need no Ray."""
    if config.runtime.runner == "inline":
        from megatron_stare.orchestration.inline import InlineRunner

        return InlineRunner(config)
    from megatron_stare.orchestration.ray import RayRunner

    return RayRunner(config)
