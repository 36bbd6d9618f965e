"""Everything a run holds open - workers, verifiers, prompts, files - built in order and closed in reverse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from megatron_stare.batch import Prompt, SamplingParams
from megatron_stare.config.schema import Config
from megatron_stare.data.source import make_source
from megatron_stare.errors import RewardFailureError
from megatron_stare.methods import build_method
from megatron_stare.observability.live import make_display
from megatron_stare.observability.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron_stare.orchestration.agreement import AgreementWatch
from megatron_stare.orchestration.colocation import Colocation
from megatron_stare.orchestration.groups import Runner
from megatron_stare.preflight import check, check_checkpoints, load_tokenizer, notices
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.rewards.pool import RewardPool
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
        with contextlib.ExitStack() as stack:
            self.dir = RunDir.reopen(config) if resume else RunDir.create(config)
            stack.callback(self.dir.close)
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
        self._open.close()

    def steps(self) -> Iterator[int]:
        """The steps still to do."""
        yield from range(self.state.step + 1, self.config.run.steps + 1)

    def rollout(
        self, prompts: list[Prompt], count: int, *, step: int, seed: int | None = None, greedy: bool = False
    ) -> list[Trajectory]:
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

    def score(self, samples: list[Trajectory]) -> None:
        """Fills in rewards.

        Raises:
            RewardFailureError: more verifiers timed out or crashed than the configuration allows.
        """
        scores = self.verifiers.score([(s.text, s.prompt.answer) for s in samples])
        for sample, score in zip(samples, scores, strict=True):
            sample.reward, sample.reward_status, sample.answer_at = score.reward, score.status, score.answer_at
        failed = [score for score in scores if score.status != "ok"]
        limit = self.config.reward.max_failure_rate
        if len(failed) > limit * len(samples):
            raise RewardFailureError(
                f"{len(failed)} of {len(samples)} answers could not be verified, the limit is {limit:.0%}; "
                f"the first: {failed[0].status} {failed[0].detail}".rstrip(),
                where="reward.verifier",
                fix="mend the verifier, or raise reward.timeout_s or reward.max_failure_rate",
            )


def make_runner(config: Config) -> Runner:
    """The runner that the configuration names; its module is imported only then, so that inline runs need no Ray."""
    if config.runtime.runner == "inline":
        from megatron_stare.orchestration.inline import InlineRunner

        return InlineRunner(config)
    from megatron_stare.orchestration.ray import RayRunner

    return RayRunner(config)
