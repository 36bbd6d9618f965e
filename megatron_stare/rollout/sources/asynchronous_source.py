"""Samples batches ahead of training, from weights that may be a few versions old.

Training step s updates the weights from version s - 1 to version s. With a staleness bound of k,
step s begins when version s - 1 - k is published. When a step begins, the source draws the step's
prompts and starts to sample. The weights that sample a token of step s are therefore at most k
versions old. With a staleness bound of 0, no batch is sampled ahead of training. The prompts of a
batch depend on the order of the prompt stream, and not on which responses finish first. A long
response therefore delays its own batch, and is never moved to a later batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from megatron_stare.process.interruption import TICK_S, poll, wait_for
from megatron_stare.records.batch import SamplingParams
from megatron_stare.records.metric import Metric
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.rollout.sources.ages import Ages
from megatron_stare.rollout.sources.rollout_source import (
    Collected,
    GroupSampling,
    Progress,
    Rollouts,
    RolloutSource,
    training_params,
)
from megatron_stare.weights.sync.target import WeightStream

METRICS = (
    Metric(
        "staleness/mean_age",
        "steps",
        "mean over the step's tokens of the steps since the weights that sampled them",
        "at most rollout.staleness",
    ),
    Metric(
        "staleness/max_age",
        "steps",
        "the largest age of a token",
        "at most rollout.staleness; more stops the run",
    ),
    Metric(
        "staleness/steps_ahead",
        "steps",
        "whole batches that wait to be trained on",
        "0: training waits for rollouts; rollout.staleness: rollouts wait",
    ),
)


T = TypeVar("T")
PromptState = dict[str, int]  # see data.prompt_source.PromptSource


class AsynchronousSource(RolloutSource):
    """Samples on a separate thread, whose event loop drives engines, environments and verifiers.

    `next` waits only until the last response of the step is verified. `publish` waits until the
    current call to each replica has ended and the new weights have arrived. Responses in flight
    stay at their replicas and continue with the new weights. Each token records the version of the
    weights that sampled the token.

    Args:
        groups: takes prompts and selects the trajectories that a step trains on.
        sampling: function that returns the sampling parameters of a step, given the step's number.
        prompts: function that returns the state of the stream from which `groups` takes prompts.
        staleness: maximum age of a token when it is trained on, in versions.
        last_step: last step for which batches are sampled.
        masked_from: see Ages.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        groups: GroupSampling,
        sampling: Callable[[int], SamplingParams],
        prompts: Callable[[], PromptState],
        staleness: int,
        last_step: int,
        progress: Progress = lambda *_: None,
        masked_from: int | None = None,
    ) -> None:
        if staleness < 0:
            raise ValueError(f"no token is {staleness} versions old")
        self._ages = Ages(staleness, masked_from)
        self._rollouts = rollouts
        self._groups = groups
        self._sampling = sampling
        self._prompts = prompts
        self._staleness, self._last, self._progress = staleness, last_step, progress
        self.version = -1  # of the newest weights
        self.metrics: Mapping[str, float] = {}  # of the last batch
        # steps that have begun and that `next` has not returned
        self._ahead: dict[int, asyncio.Task[Collected]] = {}
        # the stream's state before the first prompt of a step
        self._before: dict[int, PromptState] = {}
        self._counts: dict[int, tuple[int, int]] = {}  # by step, trajectories made and wanted
        # step that `next` waits for, and the queue of its progress reports
        self._watched: tuple[int, SimpleQueue[tuple[int, int] | None]] | None = None
        self._held = False  # True: no new step may begin
        self._loop = asyncio.new_event_loop()
        # notified when the version, the hold or the steps ahead change; belongs to the loop
        self._changed = asyncio.Condition()
        self._making: asyncio.Task[None] | None = None
        # A new thread starts with torch's default thread count, which would change the order of
        # sums. So it receives the caller's count.
        self._thread = threading.Thread(
            target=self._serve, args=(torch.get_num_threads(),), name="rollouts"
        )
        self._thread.start()

    def next(self, step: int) -> RolloutBatch:
        """See RolloutSource.

        Raises:
            WeightVersionError: the weights that sampled a token are too old, or newer than the
                trainer's weights.
            ValueError: sampling is greedy or truncated. The loss assumes sampling from the full
                policy.
        """
        collected = self._wait_showing(step)
        self.metrics = {
            **collected.metrics,
            **self._ages.settle(collected.trajectories, step),
            "staleness/steps_ahead": self._wait(self._count_made),
        }
        return RolloutBatch.from_trajectories(collected.trajectories, step)

    def publish(self, weights: WeightStream, version: int) -> None:
        self._rollouts.pool.update_weights(version, weights)
        self._wait(partial(self._published, version))

    def state(self) -> PromptState:
        """Returns the state of the prompt stream from which a resumed run must continue. A step is
        pending if the sampling of the step has begun and the method `next` has not returned the
        step's batch yet. If steps are pending, the result is the state that the prompt stream had
        before the first pending step took prompts. If no step is pending, the result is the current
        state of the prompt stream. If a run resumes from the returned state, the responses of all
        pending steps are sampled again."""
        return self._wait(self._first_unused)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Context manager. Inside the `with` block, only the caller uses the engines. Before the
        `with` block begins, waits until all responses of the steps that have begun are verified. No
        new step begins until the `with` block ends."""
        try:
            # if a step that had begun fails, this raises its error and the hold ends
            self._wait(self._hold)
            yield
        finally:
            self._wait(self._go_on)

    def close(self) -> None:
        """Cancels work in flight. Idempotent."""
        if not self._thread.is_alive():
            return
        self._wait(self._cancel)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self, threads: int) -> None:
        """Runs the event loop on the source's thread until `close`."""
        torch.set_num_threads(threads)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _wait(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the loop's thread and returns its result. If a signal interrupts the
        wait, the coroutine continues on the loop's thread."""
        return wait_for(asyncio.run_coroutine_threadsafe(make(), self._loop))

    def _wait_showing(self, step: int) -> Collected:
        """Waits for a step's trajectories. Reports progress for each finished trajectory, in the
        caller's thread."""
        news: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._watched = step, news
        try:
            if step in self._counts:
                self._progress(*self._counts[step])
            future = asyncio.run_coroutine_threadsafe(self._taken(step), self._loop)
            future.add_done_callback(lambda _: news.put(None))
            while True:
                poll()
                with contextlib.suppress(Empty):
                    if (counts := news.get(timeout=TICK_S)) is None:
                        break
                    self._progress(*counts)
            return future.result()
        finally:
            self._watched = None

    async def _make_ahead(self, first: int) -> None:
        """Starts to sample the batches of all steps, in step order.

        Step s begins only after weights of version s - 1 - `staleness` are published, because no
        older weights may sample tokens of step s. Step s also begins only after step s - 1 has
        finished its use of the prompt stream. From then on, step s - 1 takes no prompts from the
        stream and returns no prompts to the stream.
        """
        try:
            for step in range(first, self._last + 1):
                settled = asyncio.Event()
                async with self._changed:
                    await self._changed.wait_for(partial(self._may_begin, step))
                    self._before[step] = dict(self._prompts())
                    self._ahead[step] = asyncio.create_task(self._collect(step, settled))
                    self._changed.notify_all()
                await settled.wait()
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _may_begin(self, step: int) -> bool:
        return not self._held and self.version >= step - 1 - self._staleness

    async def _collect(self, step: int, settled: asyncio.Event) -> Collected:
        """Makes a step's batch with Groups.collect. Sets the event `settled` before this method
        ends, even if the method fails, so that the next step may begin."""

        def progress(done: int, wanted: int) -> None:
            self._counts[step] = done, wanted
            if self._watched and self._watched[0] == step:
                self._watched[1].put((done, wanted))

        try:
            params = training_params(self._sampling(step))
            return await self._groups.collect(self._rollouts, params, progress, settled.set)
        finally:
            settled.set()

    async def _taken(self, step: int) -> Collected:
        """Waits until the step has begun and its last trajectory is verified. Raises the error of
        the task `_make_ahead` if this task failed before the step began. Raises the error of
        `_collect` if making the step's batch failed."""
        making = self._making
        if making is None or step > self._last:
            raise ValueError(
                f"nothing is sampled for step {step} of {self._last}, or before weights are"
                " published"
            )
        async with self._changed:
            await self._changed.wait_for(lambda: step in self._ahead or making.done())
        if step not in self._ahead:
            making.result()
        collected = await self._ahead[step]
        async with self._changed:
            del self._ahead[step], self._before[step], self._counts[step]
        return collected

    async def _count_made(self) -> int:
        return sum(task.done() for task in self._ahead.values())

    async def _published(self, version: int) -> None:
        async with self._changed:
            self.version = version
            if self._making is None:
                self._making = asyncio.create_task(self._make_ahead(version + 1))
            self._changed.notify_all()

    async def _first_unused(self) -> PromptState:
        return self._before[min(self._before)] if self._before else dict(self._prompts())

    async def _hold(self) -> None:
        """Prevents new steps from beginning. Waits until the responses of every step that has begun
        are verified, and raises the first error of these steps."""
        async with self._changed:
            self._held = True
        await asyncio.gather(*self._ahead.values())

    async def _go_on(self) -> None:
        async with self._changed:
            self._held = False
            self._changed.notify_all()

    async def _cancel(self) -> None:
        """Cancels every task of the loop. Waits until the cancelled tasks have ended, which can
        take as long as the current call to a replica."""
        tasks: Sequence[asyncio.Task[Any]] = [
            *self._ahead.values(),
            *([self._making] if self._making else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # an interrupted caller may have left its own coroutine behind
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
