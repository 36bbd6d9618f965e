"""All replicas of a run behind one object: the way to them for requests (dispatch.py), and the way in for new weights.
The pool's workers hold an engine each."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from megatron_stare.batch import SamplingParams
from megatron_stare.errors import UserError
from megatron_stare.rollout.dispatch import Dispatch, Serving
from megatron_stare.rollout.engine import ModelInfo
from megatron_stare.rollout.retries import RequestRule, Retries
from megatron_stare.rollout.state import MEMORY
from megatron_stare.weights.outlet import Outlet, Route
from megatron_stare.weights.stream_plan import BucketLayout
from megatron_stare.workers import Handle, Workers

ONCE_AND_AGAIN = RequestRule()


class SyncError(UserError):
    """The engines do not hold the weights that were sent."""


class Exported(Protocol):
    """The policy's weights on their way, bucket by bucket; see WeightStream in orchestration/groups.py."""

    layouts: tuple[BucketLayout, ...]

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]: ...

    def checksums(self) -> dict[str, str]: ...

    def prepare(self, outlet: Outlet, prove: bool) -> None: ...

    def send_by(self, outlet: Outlet, prove: bool) -> list[Any]: ...

    def forget(self) -> None: ...


class EnginePool:
    """The replicas, which hold the same weights between two updates.

    Args:
        workers: an engine each; brought up here, all at once.
        prove_every: updates from one whose values are proven to the next; in between names and counts are compared.
        rule: what is done for a response that does not come.

    Raises:
        UserError: one does not come up.
    """

    def __init__(self, workers: Workers, prove_every: int = 1, rule: RequestRule = ONCE_AND_AGAIN) -> None:
        self._workers, self._prove_every, self._rule = workers, prove_every, rule
        self._requests: Counter[str] = Counter()  # what became of them since the last weight update
        self._reported: dict[str, float] = {}  # likewise, up to that
        self._unproved: int | None = None  # updates since the last proof; None: the next one must be
        self._infos: list[ModelInfo] = workers.call("bring_up")
        self._layouts: tuple[BucketLayout, ...] = ()  # of the buckets the engines know to expect
        self._routes: tuple[Route, ...] = ()  # that the outlet was made of
        self._outlet: Outlet | None = None
        self.served = all(info.served for info in self._infos)  # by servers, which alone can release memory
        self._dispatch: Dispatch | None = None  # while anyone is served
        self._held = False  # no replica is asked for tokens

    @contextlib.asynccontextmanager
    async def serving(self, params: SamplingParams, trajectories: int) -> AsyncIterator[Serving]:
        """The way to the replicas for a number of trajectories that are made at the same time. Several may be open, in
        one event loop; the one that was opened first is served first.

        What is under way at the end, of trajectories that were cancelled, is forgotten. Raises what a replica raised,
        in whoever waits for it; what is under way at the others is then forgotten as well.
        """
        if self._dispatch is None:
            self._dispatch = Dispatch(
                self._workers, self._infos, lambda: self._held, Retries(self._rule, len(self._infos), self._requests)
            )
        dispatch = self._dispatch
        serving = Serving(dispatch, params, trajectories, self._rule.rollout_s)
        try:
            yield serving
        except BaseException:
            await self._leave(serving)
            with contextlib.suppress(Exception):  # the first error counts; a replica that is lost cannot be asked
                self._workers.call("abort")
            raise
        last = await self._leave(serving)
        if last and dispatch.under_way:
            self._workers.call("abort")

    async def _leave(self, serving: Serving) -> bool:
        """Whether nobody else is served any more."""
        dispatch = serving.dispatch
        dispatch.servings.remove(serving)
        if dispatch.servings:
            return False
        self._dispatch = None
        await dispatch.stop()
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While open, no replica is asked for tokens: whoever is served, in another thread's event loop, waits.
        Requests that the replicas have stay with them."""
        self._held = True  # before it is looked who is served: whoever begins after that look sees it
        dispatch = self._dispatch
        if dispatch is not None:
            asyncio.run_coroutine_threadsafe(dispatch.hold(), dispatch.loop).result()
        try:
            yield
        finally:
            self._held = False
            for served in {dispatch, self._dispatch} - {None}:
                assert served is not None
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    served.loop.call_soon_threadsafe(served.go_on)

    def infos(self) -> list[ModelInfo]:
        """What every replica holds now."""
        with self._alone():
            return self._workers.call("model_info")

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probs, at temperature 1, of all tokens but the first of every sequence; by replica, then by sequence.

        Raises:
            UserError: the engines are not served.
        """
        with self._alone():
            return self._workers.call("prompt_log_probs", sequences)

    def release_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Every engine gives back the memory of its weights, of its cache or of both, and is of no use until
        `resume_memory`, and where it was that of weights a whole weight update.

        Raises:
            UserError: the engines are not served.
        """
        self._workers.call("release_memory", parts)

    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Every engine takes that memory again; the weights' before the cache's."""
        self._workers.call("resume_memory", parts)

    def memory_mb(self) -> float | None:
        """What the engines' own processes hold now, 10^6 bytes; None where that is not known."""
        held = self._workers.call("memory_mb")
        return None if None in held else sum(held)

    def update_weights(self, version: int, exported: Exported) -> None:
        """Sends the policy to every engine; only an engine that took all of it publishes the version. The first
        update, and the one after a failure, are proven in any case.

        Raises:
            SyncError: an engine holds other weights than were sent.
        """
        with self._alone():
            self._update_weights(version, exported)

    def _update_weights(self, version: int, exported: Exported) -> None:
        passed, self._unproved = self._unproved, None  # None stays where this fails
        prove = passed is None or passed + 1 >= self._prove_every
        begun = self._workers.start("begin_weight_update", version, prove)
        if self._outlet is not None:  # as it will be, most likely: ranks gather while servers are asked to pause
            exported.prepare(self._outlet, prove)
        routes = tuple(self._workers.wait(begun))
        if None in routes:
            self._hand_over(exported, prove)
        else:
            self._let_send(routes, exported, prove)
        self._unproved = 0 if prove or passed is None else passed + 1
        counted = dict(self._requests)
        self._requests.subtract(counted)  # others may be counted meanwhile
        names = ("rollout/retried", "rollout/retried_late")
        self._reported = {name: float(counted.get(name, 0)) for name in names} if self.served else {}

    def _hand_over(self, exported: Exported, prove: bool) -> None:
        """Bucket by bucket to engines that take them in their own process."""
        if self._layouts is not exported.layouts:
            self._workers.call("expect_buckets", exported.layouts)
            self._layouts = exported.layouts
        for number, (bucket, others) in enumerate(exported.buckets(prove)):
            self._workers.wait([*self._workers.start("update_weights", number, bucket), *others])
        sent = exported.checksums()
        for engine, held in enumerate(self._workers.call("end_weight_update")):
            check_arrived(engine, sent, held)

    def _let_send(self, routes: tuple[Route, ...], exported: Exported, prove: bool) -> None:
        """The ranks that hold the weights send them to the engines themselves."""
        if self._outlet is None or routes != self._routes:
            self._routes, self._outlet = routes, routes[0].outlet(routes)
        try:
            self._workers.call("end_sent_update", exported.send_by(self._outlet, prove))
        except Exception:
            with contextlib.suppress(Exception):  # the first error counts; a rank that is lost cannot be asked
                exported.forget()
            raise
        if self._outlet.leaves_files:
            exported.forget()

    @property
    def metrics(self) -> dict[str, float]:
        """Whether the values of the newest weights were proven to have arrived, where not all are; and, of servers, the
        requests that were made again between the two newest weight updates."""
        proven = {"sync/proven": float(self._unproved == 0)} if self._prove_every > 1 else {}
        return proven | self._reported

    def close(self) -> None:
        self._workers.close()


def check_arrived(engine: int, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Compares the checksums of what was sent with those of what an engine holds. Raises SyncError."""
    differing = [name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name)]
    if differing:
        named = ", ".join(sorted(differing)[:3]) + (", ..." if len(differing) > 3 else "")
        raise SyncError(
            f"engine {engine} holds other values than the trainer sent in {len(differing)} of {len(sent)} tensors: "
            f"{named}",
            fix="the engine's memory or its weight loading is at fault; the last checkpoint is intact",
        )
