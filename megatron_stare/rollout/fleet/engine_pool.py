"""Presents all replicas of a run as one object. The pool dispatches requests to the replicas
(dispatch.py) and distributes new weights. Each of the pool's workers holds one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.process.interruption import wait_for
from megatron_stare.process.workers import Workers
from megatron_stare.records.batch import SamplingParams
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.engines.engine import ModelInfo
from megatron_stare.rollout.engines.state import MEMORY
from megatron_stare.rollout.fleet.dispatch import Dispatch, Serving
from megatron_stare.rollout.fleet.fleet import Fleet
from megatron_stare.rollout.fleet.health import SYNCED, Health, RestartRule
from megatron_stare.rollout.fleet.retries import RequestRule, Retries
from megatron_stare.weights.sync.stream_plan import BucketLayout
from megatron_stare.weights.sync.target import SyncTarget, WeightStream

METRICS = (
    Metric(
        "sync/proven",
        "0 or 1",
        "1: all values of the newest weights were compared with what was sent; with"
        " rollout.prove_every above 1",
        "1 every prove_every steps",
    ),
    Metric(
        "rollout/retried",
        "requests",
        "requests for responses that were lost and sent again",
        "0; any is an alert",
    ),
    Metric(
        "rollout/retried_late",
        "requests",
        "lost requests that exceeded their time limit, among rollout/retried",
        "0; if responses take longer, raise faults.requests.request_s",
    ),
    Metric(
        "engine/serving",
        "engines",
        "engines that can sample after the step's weight sync",
        "all of them",
    ),
    Metric(
        "engine/dead",
        "times",
        "losses of an engine since the previous weight sync",
        "0; any is an alert",
    ),
    Metric("engine/starting", "times", "restarts of an engine", "0"),
    Metric(
        "engine/dirty",
        "times",
        "an engine started, or was left with a mixture of weights",
        "0; sglang.colocated: any",
    ),
    Metric(
        "engine/healthy", "times", "an engine became ready to serve", "0; sglang.colocated: any"
    ),
    Metric("engine/suspect", "times", "an engine lost a request", "0"),
    Metric(
        "engine/released",
        "times",
        "an engine released the memory of its weights",
        "0; sglang.colocated: all of them",
    ),
)


ONCE_AND_AGAIN = RequestRule()
RESTARTED = RestartRule()
THERE = (*SYNCED, Health.RELEASED)  # states in which a replica answers calls


class SyncError(UserError):
    """Raised if an engine's weights differ from the weights that the trainer sent."""


class EnginePool:
    """The replicas of a run. Between two weight updates, all replicas hold the same weights.

    Args:
        workers: the workers that hold the engines, one engine each. The constructor brings up all
            engines at once.
        prove_every: number of updates from one verified update to the next; 1 means that every
            update verifies the values of the weights. The other updates compare only names and
            counts.
        rule: limits on the retries of a lost request.
        restarts: limits on the restarts of a lost replica.

    Raises:
        UserError: a replica does not come up.
    """

    def __init__(
        self,
        workers: Workers,
        prove_every: int = 1,
        rule: RequestRule = ONCE_AND_AGAIN,
        restarts: RestartRule = RESTARTED,
    ) -> None:
        self._fleet = Fleet(workers, restarts, rule.back_off_s)
        self._prove_every, self._rule = prove_every, rule
        # counts of retried requests since the last weight update
        self._requests: Counter[str] = Counter()
        self._reported: dict[str, float] = {}  # metrics at the last weight update
        # updates since the last verified one; None: the next update must be verified
        self._unproved: int | None = None
        # losses, replicas and bucket layouts at the last `expect_buckets`
        self._told: tuple[int, set[int], tuple[BucketLayout, ...]] = (0, set(), ())
        # number of losses when the target was joined, and the targets by replica
        self._targets: tuple[int, dict[int, SyncTarget]] = (0, {})
        self._target: SyncTarget | None = None  # the replicas' targets, joined
        # True if engines are servers; only servers can release memory
        infos = self._fleet.infos
        self.served = bool(infos) and all(info.served for info in infos)
        self._dispatch: Dispatch | None = None  # not None while a Serving is open
        self._held = False  # True: no replica may be called for tokens
        self.measures_memory = True  # False: `memory_mb` returns None

    @contextlib.asynccontextmanager
    async def serving(self, params: SamplingParams, trajectories: int) -> AsyncIterator[Serving]:
        """Opens a `Serving` object for concurrent trajectories. The argument `trajectories` is the
        number of trajectories that will send requests through this `Serving` object. Several
        `Serving` objects may be open in one event loop. Requests of a `Serving` object are assigned
        to replicas before requests of `Serving` objects that were opened later.

        If a request is still in flight when the `Serving` object closes, the request belongs to a
        cancelled trajectory, and the answer is discarded. If a call to a replica raises an error,
        the method `finished` of every open `Serving` object raises the same error. When the last
        open `Serving` object closes, with or without an error, the pool aborts all requests that
        are still in flight at the replicas.
        """
        if self._dispatch is None:
            self._dispatch = Dispatch(
                self._fleet, lambda: self._held, Retries(self._rule, self._requests)
            )
        dispatch = self._dispatch
        serving = Serving(dispatch, params, trajectories, self._rule.rollout_s)
        try:
            yield serving
        except BaseException:
            # as long as another Serving is open, the replicas also hold requests that it waits for
            if await self._leave(serving):
                # keep the first error; a lost replica cannot answer
                with contextlib.suppress(Exception):
                    self._fleet.call("abort")
            raise
        last = await self._leave(serving)
        if last and dispatch.under_way:
            self._fleet.call("abort")

    async def _leave(self, serving: Serving) -> bool:
        """Closes a `Serving` object. Returns True if this object was the last open one."""
        serving.close()
        if serving.dispatch.in_use:
            return False
        self._dispatch = None
        await serving.dispatch.stop()
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context manager that pauses generation calls. Before the `with` block begins, waits until
        all generation calls in progress have ended. During the `with` block, the pool sends no
        generation requests to the replicas, and collects no responses from the replicas.

        Trajectories can run in another thread and make new requests during the `with` block. The
        pool stores these requests, and sends the stored requests after the `with` block. The pool
        does not cancel requests that the replicas received before the `with` block. The pool
        collects the responses to such requests after the `with` block.

        Raises:
            RuntimeError: the caller runs in the event loop of the open `Serving` object. The wait
                for the calls in progress would then never end.
        """
        # set before the check for calls in progress, so that every later call sees it
        self._held = True
        dispatch = self._dispatch
        try:
            if dispatch is not None:
                if _runs_here(dispatch.loop):
                    raise RuntimeError(
                        "replicas cannot be held from the event loop that asks them for tokens"
                    )
                wait_for(asyncio.run_coroutine_threadsafe(dispatch.hold(), dispatch.loop))
            yield
        finally:
            self._held = False
            for served in {dispatch, self._dispatch} - {None}:
                assert served is not None
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    served.loop.call_soon_threadsafe(served.go_on)

    def infos(self) -> list[ModelInfo]:
        """Returns the ModelInfo of every replica that is not lost."""
        with self._alone():
            return self._results("model_info")

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> dict[int, list[list[float]]]:
        """Returns, for each sequence, the log-probs at temperature 1 of all tokens after the first
        token. The result maps the index of each replica to a list with the log-probs of every
        sequence. Lost replicas are left out of the result.

        Raises:
            UserError: the engines are not servers.
        """
        with self._alone():
            return self._fleet.call("prompt_log_probs", sequences, states=THERE)

    def release_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Releases the memory of `parts` on every engine. `parts` are the weights, the cache, or
        both. The engines are unusable until `resume_memory` is called. If the weights were
        released, the engines also need a complete weight update before they can generate.

        Raises:
            UserError: the engines are not servers.
        """
        for number in self._fleet.call("release_memory", parts, states=THERE):
            if "weights" in parts:
                self._fleet.health.released(number)

    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Allocates the released memory of `parts` again on every engine. The memory of the weights
        must be allocated before the memory of the cache."""
        for number in self._fleet.call("resume_memory", parts, states=THERE):
            if "weights" in parts:
                self._fleet.health.resumed(number)

    def allow_restarts(self) -> None:
        """Allows restarts of lost engines until `hold_restarts` is called. Engines that are lost
        after this call may restart too. Only engines on the trainer's devices need permission to
        restart."""
        self._fleet.allow_restarts()

    def hold_restarts(self) -> None:
        """Prevents new restarts of engines until `allow_restarts` is called. If engines are already
        restarting, waits until each of these engines has started or has failed to start. Does
        nothing if restarts of the engines need no permission."""
        self._fleet.hold_restarts()

    def memory_mb(self) -> float | None:
        """Returns the memory that the engines' own processes use now, in MB (10^6 bytes).

        Returns None if the memory is unknown or `measures_memory` is False. This method reads all
        memory mappings of every server.
        """
        if not self.measures_memory:
            return None
        held = self._results("memory_mb")
        return None if None in held else sum(held)

    def _results(self, method: str, *args: Any) -> list[Any]:
        return list(self._fleet.call(method, *args, states=THERE).values())

    def update_weights(self, version: int, weights: WeightStream) -> None:
        """Sends the policy's weights to every live engine. An engine generates with the new version
        only if the engine has received all weights of this version. The first update, every update
        after a failure, and every update that includes a restarted replica are always verified.

        A replica that is lost during the update is left out. If a lost replica interrupts the
        transfer to the remaining replicas, the pool sends all weights to the remaining replicas
        again.

        Raises:
            SyncError: an engine holds weights that differ from the sent weights.
            NoEngineError: no replica is left.
        """
        with self._alone():
            self._update_weights(version, weights)

    def _update_weights(self, version: int, weights: WeightStream) -> None:
        passed, self._unproved = self._unproved, None  # stays None if the update fails
        self._fleet.look()
        prove = passed is None or passed + 1 >= self._prove_every or self._fleet.health.needs_proof
        took: Collection[int] | None = None
        try:
            while took is None:
                took = self._sent(version, weights, prove)
                prove = prove or took is None
        except BaseException:
            for number in self._fleet.health.among(SYNCED):
                self._fleet.health.mixed(number, f"the weight update to version {version} failed")
            raise
        for number in took:
            self._fleet.health.synced(number, version, prove)
        self._unproved = 0 if prove or passed is None else passed + 1
        counted = dict(self._requests)
        self._requests.subtract(counted)  # the counts may have grown meanwhile
        names = ("rollout/retried", "rollout/retried_late")
        if self.served:
            self._reported = {
                name: float(counted.get(name, 0)) for name in names
            } | self._fleet.metrics()

    def _sent(self, version: int, weights: WeightStream, prove: bool) -> Collection[int] | None:
        """Sends the weights once. Returns the replicas that received all weights. Returns None if a
        replica was lost and the remaining replicas therefore did not receive all weights."""
        # The target is most likely the same as before, so ranks can gather weights while the
        # servers pause.
        if self._target is not None:
            weights.prepare(self._target, prove)
        targets = self._fleet.call("begin_weight_update", version, prove)
        if None in targets.values():
            return self._hand_over(weights, prove, targets)
        try:
            took = self._let_send(targets, weights, prove)
        except Exception:
            # keep the first error; a lost rank cannot answer
            with contextlib.suppress(Exception):
                weights.forget()
            raise
        if took is None or (self._target is not None and self._target.leaves_files):
            weights.forget()
        return took

    def _hand_over(
        self, weights: WeightStream, prove: bool, to: Collection[int]
    ) -> Collection[int]:
        """Passes the weights, bucket by bucket, to engines that have no SyncTarget."""
        fleet = self._fleet
        if self._told != (told := (fleet.losses, set(to), weights.layouts)):
            self._told, to = told, fleet.call("expect_buckets", weights.layouts, among=to)
        for number, (bucket, others) in enumerate(weights.buckets(prove)):
            to = fleet.call("update_weights", number, bucket, among=to, beside=others)
        sent = weights.checksums()
        ended = fleet.call("end_weight_update", among=to)
        for engine, held in ended.items():
            check_arrived(engine, sent, held)
        return ended

    def _let_send(
        self, targets: dict[int, SyncTarget], weights: WeightStream, prove: bool
    ) -> Collection[int] | None:
        """Lets the trainer's ranks send their weights directly to the engines. Returns the replicas
        that received all weights, or None (see `_sent`)."""
        fleet = self._fleet
        if self._target is None or self._targets != (fleet.losses, targets):
            self._targets = fleet.losses, targets
            self._target = next(iter(targets.values())).joined(list(targets.values()))
        try:
            told = weights.send_to(self._target, prove)
        except Exception as error:
            if not fleet.find_lost(targets):
                raise
            for number in fleet.call("drop_weight_update", among=targets):
                fleet.health.mixed(
                    number, f"the weight update is begun anew, which could not be sent: {error}"
                )
            return None
        # one copy for all engines, since the reports of all senders are large
        return fleet.call("end_sent_update", fleet.workers.share(told), among=targets)

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the pool. The metrics include `sync/proven` if `prove_every` is
        above 1. If the engines are servers, the metrics also include the metrics of Fleet, and the
        number of requests that were retried between the two newest weight updates."""
        proven = {"sync/proven": float(self._unproved == 0)} if self._prove_every > 1 else {}
        return proven | self._reported

    def news(self) -> list[str]:
        """Removes and returns all new messages about the replicas. Each message is one line."""
        return self._fleet.take_news()

    def close(self) -> None:
        """Ends all workers, including workers that are restarting. Idempotent."""
        self._fleet.close()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Returns True if the caller runs in the given event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def check_arrived(engine: int, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Compares the checksums of the sent weights with the checksums of an engine's weights. Raises
    SyncError if the checksums differ."""
    differing = [name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name)]
    if differing:
        named = ", ".join(sorted(differing)[:3]) + (", ..." if len(differing) > 3 else "")
        raise SyncError(
            f"engine {engine} holds other values than the trainer sent in {len(differing)} of"
            f" {len(sent)} tensors: {named}",
            fix=(
                "the engine's memory or its weight loading is at fault; the last checkpoint is"
                " intact"
            ),
        )
