"""A run's engines without its trainer: a pool over workers as a run has them, and weights of which
each version says a token of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support import sglang_servers as servers
from support.replicas import TOKENIZER, judged

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.cluster.trainer_group import TrainerWeights
from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import Environment, Generate, Response
from megatron_stare.process.workers import Workers
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.rollout.engines.engine_worker import EngineWorker
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.fleet.health import Health, RestartRule
from megatron_stare.rollout.fleet.retries import RequestRule
from megatron_stare.rollout.sources.rollout_source import Progress, Rollouts
from megatron_stare.rollout.sources.turns import check_versions
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot
from megatron_stare.weights.sync.target import SyncTarget

TOKENS, SAMPLES = 90, 4
PROMPTS = [Prompt(n, str(n), "", "", (2, 3 + n)) for n in range(6)]
SAYS = (5, 9, 7, 11)  # the token of a version, in turns
BACK_S = 300.0  # in which a server that is begun again is up


def said(version: int) -> int:
    return SAYS[version % len(SAYS)]


class Rank:
    """A trainer's only rank, which sends the weights it is given in some buckets. `sending` is told
    before each."""

    def __init__(self, buckets: int = 4) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.sending: Callable[[int], None] = lambda number: None
        self.targets: list[SyncTarget] = []  # that it sent to
        self._buckets, self._sender = buckets, None

    def prepare_weights(self, target: SyncTarget, prove: bool) -> None:
        if not self.targets or self.targets[-1] != target:
            self.close()
            self.targets.append(target)
            self._sender = target.sender(0)
        self._sender.expect(prove, None)

    def send_weights(self, *after: Any) -> Any:
        sender: Any = self._sender
        sender.begin()
        names = sorted(self.tensors)
        for number in range(self._buckets):
            self.sending(number)
            sender.send(
                bucket_of({name: self.tensors[name] for name in names[number :: self._buckets]})
            )
        return sender.end()

    def forget_weights(self) -> None:
        if self._sender is not None:
            self._sender.forget()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def bucket_of(tensors: dict[str, torch.Tensor]) -> Bucket:
    slots, start = [], 0
    for name, tensor in tensors.items():
        slots.append(Slot(name, tuple(tensor.shape), start))
        start += tensor.numel()
    return Bucket(
        BucketLayout(torch.float32, tuple(slots)),
        torch.cat([t.flatten() for t in tensors.values()]),
    )


class Lengths(Environment):
    """The first prompts' responses are short, so that the others are under way when these are
    done."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids, wanted(prompt)))
        return response.trajectory()


def wanted(prompt: Prompt) -> int:
    return 2 if prompt.cursor < 2 else TOKENS


class Run:
    """A pool over real engines, and a trainer's rank.

    Args:
        workers: None: workers of their own, as a run in one process has them.
        tensors: the weights of a version.
    """

    def __init__(
        self,
        config: Config,
        replicas: int,
        workers: Workers | None = None,
        prove_every: int = 1,
        tensors: Callable[[int], dict[str, torch.Tensor]] = lambda version: servers.says_only(
            said(version)
        ),
    ) -> None:
        def make(number: int) -> EngineWorker:
            return EngineWorker(config, number)

        self.rank, self._tensors, self.version, self._config = Rank(), tensors, 0, config
        self._ranks = InlineWorkers([self.rank])
        made = (
            InlineWorkers([make(number) for number in range(replicas)], make)
            if workers is None
            else workers
        )
        self.workers: Any = made
        try:
            self.pool = EnginePool(made, prove_every, RequestRule(6, 0.1), RestartRule.of(config))
        except BaseException:
            made.close()
            raise

    @property
    def health(self) -> list[Health]:
        return [
            self.pool._fleet.health.state(number) for number in range(len(self.pool._fleet.infos))
        ]

    def engine(self, number: int) -> Any:
        return self.workers._workers[number]._engine

    def publish(self) -> None:
        """The next version's weights; each replica that serves then holds them all, proved."""
        self.version += 1
        self.rank.tensors = self._tensors(self.version)
        self.pool.update_weights(self.version, TrainerWeights(self._ranks, (), [0]))

    def roll_out(self, progress: Progress = lambda *_: None) -> list[Trajectory]:
        """Every sample of every prompt once, of the newest weights."""
        params = SamplingParams(1.0, TOKENS, seed=1, step=1, stop_token_ids=(1,))
        rollouts = Rollouts(self.pool, Lengths(self._config, TOKENIZER), judged)
        found = rollouts.make(PROMPTS, SAMPLES, params, progress)
        assert [(t.prompt.cursor, t.sample_index) for t in found] == [
            (p.cursor, i) for p in PROMPTS for i in range(SAMPLES)
        ]
        assert all(t.tokens.tolist() == [said(self.version)] * wanted(t.prompt) for t in found)
        check_versions(found, self.version)
        return found

    def bring_back(self, number: int) -> None:
        """Waits until the lost replica is up; then the next weights make it serve, and not
        sooner."""
        assert self.health[number] is Health.STARTING
        error = self.pool._fleet._coming[number].exception(timeout=BACK_S)
        assert error is None, error
        assert not self.pool._fleet.serves(number)
        self.publish()
        assert self.health == [Health.HEALTHY] * len(self.health)
        infos = self.pool.infos()
        assert [info.weight_version for info in infos] == [self.version] * len(infos)

    def asked(self, number: int) -> int:
        """Responses that the replica was asked for, by its present worker."""
        return self.engine(number)._calls

    def close(self) -> None:
        self._ranks.close()
        self.pool.close()


def transitions(news: Sequence[str], number: int) -> list[str]:
    """The states that a replica came to, as they were told."""
    return [line.split()[3] for line in news if line.startswith(f"engine {number} ")]
