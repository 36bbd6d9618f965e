"""All replicas of a run behind one object: the way to them for requests (dispatch.py), and the way
in for new weights. The pool's workers hold an engine each."""

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
        "for responses that were lost and asked of another server",
        "0; any is an alert",
    ),
    Metric(
        "rollout/retried_late",
        "requests",
        "those of them that passed their time limit",
        "0; raise faults.requests.request_s where responses are longer",
    ),
    Metric(
        "engine/serving",
        "engines",
        "that may be asked for tokens after the step's weight sync",
        "all of them",
    ),
    Metric(
        "engine/dead",
        "times",
        "that an engine was lost since the weight sync before",
        "0; any is an alert",
    ),
    Metric("engine/starting", "times", "that one was begun again", "0"),
    Metric(
        "engine/dirty",
        "times",
        "that one came up, or was left with a mixture of weights",
        "0; sglang.colocated: any",
    ),
    Metric("engine/healthy", "times", "that one came to serve", "0; sglang.colocated: any"),
    Metric("engine/suspect", "times", "that one lost a request", "0"),
    Metric(
        "engine/released",
        "times",
        "that one gave the memory of its weights back",
        "0; sglang.colocated: all of them",
    ),
)


ONCE_AND_AGAIN = RequestRule()
RESTARTED = RestartRule()
THERE = (*SYNCED, Health.RELEASED)  # a call is answered


class SyncError(UserError):
    """The engines do not hold the weights that were sent."""


class EnginePool:
    """The replicas, which hold the same weights between two updates.

    Args:
        workers: an engine each; brought up here, all at once.
        prove_every: updates from one whose values are proven to the next; in between names and
            counts are compared.
        rule: what is done for a response that does not come.
        restarts: and for a replica that is lost.

    Raises:
        UserError: one does not come up.
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
        self._requests: Counter[str] = Counter()  # what became of them since the last weight update
        self._reported: dict[str, float] = {}  # likewise, up to that
        # updates since the last proof; None: the next update must be proven
        self._unproved: int | None = None
        # losses, replicas and bucket layouts at the last `expect_buckets`
        self._told: tuple[int, set[int], tuple[BucketLayout, ...]] = (0, set(), ())
        # number of losses at that time, and the targets by replica
        self._targets: tuple[int, dict[int, SyncTarget]] = (0, {})
        self._target: SyncTarget | None = None  # all of those, joined
        # True where engines are servers, which alone can release memory
        self.served = all(info.served for info in self._fleet.infos)
        self._dispatch: Dispatch | None = None  # while anyone is served
        self._held = False  # no replica is asked for tokens

    @contextlib.asynccontextmanager
    async def serving(self, params: SamplingParams, trajectories: int) -> AsyncIterator[Serving]:
        """The way to the replicas for a number of trajectories that are made at the same time.
        Several may be open, in one event loop; the one that was opened first is served first.

        What is under way at the end, of trajectories that were cancelled, is forgotten. Raises what
        a replica raised, in whoever waits for it; what is under way at the others is then forgotten
        as well.
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
            await self._leave(serving)
            # the first error counts; a replica that is lost cannot be asked
            with contextlib.suppress(Exception):
                self._fleet.call("abort")
            raise
        last = await self._leave(serving)
        if last and dispatch.under_way:
            self._fleet.call("abort")

    async def _leave(self, serving: Serving) -> bool:
        """Closes a serving. Returns whether nobody else is served."""
        serving.close()
        if serving.dispatch.in_use:
            return False
        self._dispatch = None
        await serving.dispatch.stop()
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While open, no replica is asked for tokens: whoever is served, in another thread's event
        loop, waits. Requests that the replicas have stay with them.

        Raises:
            RuntimeError: called from that loop's own thread, which would wait for itself.
        """
        # set before the look at requests under way: whoever begins later sees it
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
        """Asks every replica that is not lost what it holds now."""
        with self._alone():
            return self._results("model_info")

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> dict[int, list[list[float]]]:
        """Log-probs, at temperature 1, of all tokens but the first of every sequence; by the number
        of each replica that is not lost, then by sequence.

        Raises:
            UserError: the engines are not served.
        """
        with self._alone():
            return self._fleet.call("prompt_log_probs", sequences, states=THERE)

    def release_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Every engine gives back the memory of its weights, of its cache or of both, and is of no
        use until `resume_memory`, and where it was that of weights a whole weight update.

        Raises:
            UserError: the engines are not served.
        """
        for number in self._fleet.call("release_memory", parts, states=THERE):
            if "weights" in parts:
                self._fleet.health.released(number)

    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Every engine takes that memory again; the weights' before the cache's."""
        for number in self._fleet.call("resume_memory", parts, states=THERE):
            if "weights" in parts:
                self._fleet.health.resumed(number)

    def memory_mb(self) -> float | None:
        """Memory of the engines' own processes now, 10^6 bytes; None where that is not known."""
        held = self._results("memory_mb")
        return None if None in held else sum(held)

    def _results(self, method: str, *args: Any) -> list[Any]:
        return list(self._fleet.call(method, *args, states=THERE).values())

    def update_weights(self, version: int, weights: WeightStream) -> None:
        """Sends the policy to every engine that is there; only one that took all of it publishes
        the version. The first update, the one after a failure, and one that a replica takes part in
        that was lost, are proven in any case.

        A replica that is lost meanwhile is left out; where what the others were sent is not whole
        for it, they are sent all of it anew.

        Raises:
            SyncError: an engine holds other weights than were sent.
            NoEngineError: no replica is left.
        """
        with self._alone():
            self._update_weights(version, weights)

    def _update_weights(self, version: int, weights: WeightStream) -> None:
        passed, self._unproved = self._unproved, None  # None stays where this fails
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
        self._requests.subtract(counted)  # others may be counted meanwhile
        names = ("rollout/retried", "rollout/retried_late")
        if self.served:
            self._reported = {
                name: float(counted.get(name, 0)) for name in names
            } | self._fleet.metrics()

    def _sent(self, version: int, weights: WeightStream, prove: bool) -> Collection[int] | None:
        """The replicas that took all weights; None: one was lost on the way, and the others lack
        what it stopped."""
        # The next target is most likely the same: ranks gather while servers are asked to pause.
        if self._target is not None:
            weights.prepare(self._target, prove)
        targets = self._fleet.call("begin_weight_update", version, prove)
        if None in targets.values():
            return self._hand_over(weights, prove, targets)
        try:
            took = self._let_send(targets, weights, prove)
        except Exception:
            # the first error counts; a rank that is lost cannot be asked
            with contextlib.suppress(Exception):
                weights.forget()
            raise
        if took is None or (self._target is not None and self._target.leaves_files):
            weights.forget()
        return took

    def _hand_over(
        self, weights: WeightStream, prove: bool, to: Collection[int]
    ) -> Collection[int]:
        """Bucket by bucket to engines that take them in their own process."""
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
        """The ranks that hold the weights send them to the engines themselves. None: see
        `_sent`."""
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
        return fleet.call("end_sent_update", told, among=targets)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics: whether the values of the newest weights were proven to have arrived, where not
        all are; and, of servers, the requests that were made again between the two newest weight
        updates, and how the replicas stand."""
        proven = {"sync/proven": float(self._unproved == 0)} if self._prove_every > 1 else {}
        return proven | self._reported

    def news(self) -> list[str]:
        """Takes what became of replicas since this was asked last, a line each."""
        return self._fleet.take_news()

    def close(self) -> None:
        """Ends the workers, those on their way up too. Closing twice is allowed."""
        self._fleet.close()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """True where this is called from within the loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def check_arrived(engine: int, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Compares the checksums of what was sent with those of what an engine holds. Raises
    SyncError."""
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
