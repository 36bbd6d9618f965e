"""Sends the generation requests of trajectories to engine replicas, and returns the replicas'
answers to the trajectories. All code of this module runs in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import (
    GenerateRequest,
    GenerateResult,
    LostRequest,
    RequestLostError,
)
from megatron_stare.rollout.fleet.fleet import LOST, Fleet
from megatron_stare.rollout.fleet.retries import Retries
from megatron_stare.run_dir.heartbeat import FOLDER_VARIABLE, REQUESTS, write_whole

# added to every wake-up: a timer may fire a tick early, and nothing else wakes a pool of one
# replica
LATER_S = 1e-3
# a call of a busy server waits this long for results; then the server is offered new requests
WAIT_S = 0.1
# minimum time between two writes of the page: in seconds, and as a multiple of the last write's
# duration
PAGE_S, PAGE_SHARE = 1.0, 100.0
OLDEST = 5  # number of each engine's oldest requests that the page lists


class RolloutLateError(UserError):
    """Raised if a rollout does not finish within its time limit."""


@dataclass
class _Replica:
    """Requests in flight at one replica."""

    number: int
    capacity: int | None  # see ModelInfo
    # assigned to the replica and not sent yet
    assigned: deque[tuple[GenerateRequest, SamplingParams]] = field(default_factory=deque)
    under_way: int = 0  # assigned, or sent and not answered
    reserved: int = 0  # slots kept for the continuations of requests that were just answered
    work: asyncio.Event = field(default_factory=asyncio.Event)  # set while requests are in flight
    # held during a call of the replica; first come, first served
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def give(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        if requests:
            self.assigned += [(request, params) for request in requests]
            self.under_way += len(requests)
            self.work.set()

    def next_call(self) -> tuple[list[GenerateRequest], SamplingParams]:
        """Removes requests from the front of the queue `assigned`, for the next call to the
        replica. Stops before the first request that has other sampling parameters than the requests
        before it. Returns the removed requests and their sampling parameters."""
        params = self.assigned[0][1]
        requests = []
        while self.assigned and self.assigned[0][1] == params:
            requests.append(self.assigned.popleft()[0])
        return requests, params


@dataclass(eq=False)
class _Queue:
    """Requests from one `Serving` object that are not assigned to a replica yet.

    `live`: number of unfinished trajectories.
    `again`: requests that a replica lost and that must be sent again.
    `continuing`: requests that continue a response, grouped by the index of the replica that
        sampled the earlier part of the response.
    `new`: all other requests.
    """

    params: SamplingParams
    live: int
    again: deque[GenerateRequest] = field(default_factory=deque)
    continuing: dict[int, deque[GenerateRequest]] = field(default_factory=dict)
    new: deque[GenerateRequest] = field(default_factory=deque)


class RequestsPage:
    """Writes the status page. For each engine, the status page gives the state, the number of
    requests in flight, and the oldest of these requests. The status page is a small file in a
    RAM-backed folder of the node. The watcher process, which reports runs that hang
    (docs/black_box.md), reads the status page.

    The status page is written about once a second while requests are in flight. If writing the
    status page once a second takes more than 1 % of the event loop's time, the status page is
    written less often. When a request is sent or ends, the status page is written within `wait_s()`
    seconds. If no process reads the status page, the status page is not written.
    """

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._file = None if not folder else Path(folder) / REQUESTS
        self._next = 0.0

    def wait_s(self) -> float | None:
        """Returns the seconds until the status page may be written again, or None if no process
        reads the status page."""
        return None if self._file is None else max(0.0, self._next - time.monotonic())

    def write(
        self, states: Sequence[str], given: Mapping[str, tuple[int, float, int, int]]
    ) -> None:
        """Replaces the status page.

        Args:
            states: states of the engines, in order.
            given: for each request in flight, the index of the engine, the time at which the
                request was assigned to the engine (seconds of CLOCK_MONOTONIC), the prompt cursor
                and the sample index.
        """
        begun = time.monotonic()
        if self._file is None:
            return
        replicas: list[dict[str, Any]] = [
            {"number": number, "state": state, "under_way": 0, "oldest": []}
            for number, state in enumerate(states)
        ]
        for replica, when, prompt, sample in given.values():
            replicas[replica]["under_way"] += 1
            replicas[replica]["oldest"].append((when, prompt, sample))
        for each in replicas:
            each["oldest"] = [
                (prompt, sample, when) for when, prompt, sample in sorted(each["oldest"])[:OLDEST]
            ]
        with contextlib.suppress(OSError):
            write_whole(self._file, {"replicas": replicas})
        took = time.monotonic() - begun
        self._next = begun + max(PAGE_S, PAGE_SHARE * took)


class Dispatch:
    """Sends the requests of all open `Serving` objects to the replicas and returns the answers. A
    Dispatch belongs to one event loop. Trajectories send requests through a `Serving` object.
    Dispatch keeps one queue of waiting requests for each `Serving` object.

    If a replica loses a request, Dispatch retries the request, at another replica if possible
    (retries.py).

    If replicas have a capacity limit, Dispatch assigns each new request immediately to the replica
    with the most room. A continuation, which is a request that continues a response, goes to the
    replica whose KV cache holds the earlier part of the response. For each `Serving` object,
    Dispatch first assigns the continuations, then the retries, and then the new requests. A
    continuation waits while the replica with the earlier part of the response is full. If Dispatch
    has assigned all new requests and some replica still has room, Dispatch assigns the waiting
    continuation to this replica. A replica is untrusted if the replica does not serve, or if the
    replica has lost a request and has not answered any request since the loss. If an untrusted
    replica sampled the earlier part of a response, the continuation is treated like a new request
    and goes to the replica with the most room.

    If replicas have no capacity limit, Dispatch handles each `Serving` object separately. Dispatch
    waits until every unfinished trajectory of the `Serving` object has a waiting request, and then
    splits these requests evenly over the replicas. With this even split, the composition of a batch
    depends only on the trajectories, not on timing. One slow environment therefore delays all
    trajectories of the same `Serving` object. While an environment runs a tool, the trajectory of
    this environment sends no request, and all other trajectories of the `Serving` object must wait.

    Args:
        held: function that returns True while replicas must not be called for tokens. `hold` waits
            for the calls in progress.
    """

    def __init__(self, fleet: Fleet, held: Callable[[], bool], retries: Retries) -> None:
        self._fleet, self._held, self._retries = fleet, held, retries
        self._wake_ups: set[asyncio.TimerHandle] = set()
        self._going_on = asyncio.Event()  # set when the hold on the replicas ends
        self._assigning = False  # True while a call of `_assign` is scheduled
        self._page = RequestsPage()
        self._putting: asyncio.TimerHandle | None = None
        self._queues: list[_Queue] = []  # in opening order
        self._asked: dict[str, tuple[_Queue, GenerateRequest, asyncio.Future[GenerateResult]]] = {}
        self._replicas = [
            _Replica(number, info.capacity) for number, info in enumerate(fleet.infos)
        ]
        self._together = any(replica.capacity is None for replica in self._replicas)
        self.loop = asyncio.get_running_loop()
        # a pump ends only by an error or by `stop`
        self.pumps = [asyncio.create_task(self._pump(replica)) for replica in self._replicas]
        fleet.health.end_back_offs()

    @property
    def in_use(self) -> bool:
        """Returns True if at least one `Serving` object is open."""
        return bool(self._queues)

    @property
    def under_way(self) -> int:
        """Number of requests in flight at the replicas."""
        return sum(replica.under_way for replica in self._replicas)

    def open(self, params: SamplingParams, trajectories: int) -> _Queue:
        """Opens a queue for requests. `trajectories` is the number of trajectories that will send
        requests to the queue. When a trajectory finishes, the caller must call the method
        `Dispatch.left`."""
        queue = _Queue(params, trajectories)
        self._queues.append(queue)
        return queue

    def close(self, queue: _Queue) -> None:
        """Closes a queue that will receive no more requests."""
        self._queues.remove(queue)

    async def ask(self, queue: _Queue, request: GenerateRequest) -> GenerateResult:
        """Waits for the request's answer. If a call to a replica raises an error, `ask` does not
        raise this error. The task `_pump`, which calls the replica, raises the error.

        Raises:
            RequestLostError: all allowed attempts of the request failed.
        """
        answer: asyncio.Future[GenerateResult] = self.loop.create_future()
        self._asked[request.rid] = queue, request, answer
        line = queue.new
        if request.replica is not None and not self._together:
            line = queue.continuing.setdefault(request.replica, deque())
        line.append(request)
        self._assign_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            # A replica's request is in no line. To search for each of thousands among the tens of
            # thousands that wait would take longer than a run has to save.
            if request.rid not in self._retries.given():
                for each in (queue.again, line):
                    with contextlib.suppress(ValueError):
                        each.remove(request)
            raise

    def left(self, queue: _Queue) -> None:
        """Records that one of the queue's trajectories is finished and will send no more
        requests."""
        queue.live -= 1
        self._assign_soon()

    def _assign_soon(self) -> None:
        """Schedules a call of `_assign` in the event loop, unless a call is already scheduled. The
        event loop first runs all tasks that are ready now. Each of these tasks can therefore queue
        a request before `_assign` assigns the waiting requests to replicas. In each queue,
        `_assign` assigns continuations before new requests."""
        if not self._assigning:
            self._assigning = True
            self.loop.call_soon(self._assign)

    def _assign(self) -> None:
        """Assigns waiting requests to the replicas that have room."""
        self._assigning = False
        for queue in self._queues:
            if self._together:
                self._share_out(queue)
            else:
                self._place_all(queue)
        self._put_down()

    def _share_out(self, queue: _Queue) -> None:
        """Splits all waiting requests evenly over the replicas. If at least one unfinished
        trajectory has no waiting request yet, this method assigns no requests."""
        waiting = [*queue.again, *queue.new]
        if not waiting or len(waiting) < queue.live:
            return
        waiting.sort(key=lambda request: (request.prompt_cursor, request.sample_index))
        queue.again.clear()
        queue.new.clear()
        replicas = [replica for replica in self._replicas if self._fleet.serves(replica.number)]
        for replica, shard in zip(replicas, split_evenly(waiting, len(replicas)), strict=True):
            self._give(replica, shard, queue.params)

    def _place_all(self, queue: _Queue) -> None:
        """Assigns waiting requests to replicas as long as suitable replicas have room."""
        for number, line in queue.continuing.items():
            while line and self._place_at(number, line[0], queue.params):
                line.popleft()
        # one retry may have to wait for its replica while the next one can be placed
        for _ in range(len(queue.again)):
            request = queue.again.popleft()
            if not self._place(request, queue.params):
                queue.again.append(request)
        left = [line for number, line in queue.continuing.items() if not self._trusted(number)]
        for line in (*left, queue.new, *queue.continuing.values()):
            while line and self._place(line[0], queue.params):
                line.popleft()

    def _put_down(self) -> None:
        """Makes the event loop write the status page as soon as the page may be written again."""
        if self._putting is None and (wait_s := self._page.wait_s()) is not None:
            self._putting = self.loop.call_later(wait_s, self._put)

    def _put(self) -> None:
        """Writes the status page. All times on the status page come from the event loop's clock,
        CLOCK_MONOTONIC."""
        self._putting = None
        given = {
            rid: (
                replica,
                when,
                self._asked[rid][1].prompt_cursor,
                self._asked[rid][1].sample_index,
            )
            for rid, (replica, when) in self._retries.given().items()
            if rid in self._asked
        }
        self._page.write([self._fleet.health.state(r.number).value for r in self._replicas], given)

    def _place(self, request: GenerateRequest, params: SamplingParams) -> bool:
        """Assigns a request to the replica that `Retries.choose` selects. Returns False if no
        suitable replica has room."""
        health = self._fleet.health
        best = self._retries.choose(
            request.rid, self._rooms(), health.avoided(self.loop.time()), health.suspected()
        )
        if best is not None:
            self._give(self._replicas[best], [request], params)
        return best is not None

    def _place_at(self, replica: int, request: GenerateRequest, params: SamplingParams) -> bool:
        """Assigns a request to the replica with index `replica` if this replica serves, has room,
        and has lost no request since its last answer. Returns True if the request was assigned."""
        if not self._trusted(replica) or (self._rooms()[replica] or 0) < 1:
            return False
        self._give(self._replicas[replica], [request], params)
        return True

    def _trusted(self, replica: int) -> bool:
        """See FleetHealth."""
        return self._fleet.health.trusted(replica, self.loop.time())

    def _rooms(self) -> list[int | None]:
        """Returns how many more requests each replica can take now, or None for a replica that does
        not serve."""
        now, health = self.loop.time(), self._fleet.health
        return [
            (
                health.room(r.number, r.capacity or 0, r.under_way + r.reserved, now)
                if self._fleet.serves(r.number)
                else None
            )
            for r in self._replicas
        ]

    def _give(
        self, replica: _Replica, requests: Sequence[GenerateRequest], params: SamplingParams
    ) -> None:
        now = self.loop.time()
        for request in requests:
            self._retries.give(request.rid, replica.number, now)
        replica.give(requests, params)

    async def hold(self) -> None:
        """Waits until every call in progress to a replica has ended. A call to a server lasts at
        most about WAIT_S seconds."""
        for replica in self._replicas:
            async with replica.turn:
                pass

    def go_on(self) -> None:
        """Lets `_pump` call the replicas again after a pause. Replicas that started to serve during
        the pause receive requests too."""
        self._going_on.set()
        self._assign()

    async def stop(self) -> None:
        """Cancels the tasks that call the replicas (`_pump`). Waits for the end of the cancelled
        tasks, but not for answers of the replicas."""
        if self._putting is not None:
            self._putting.cancel()
        self._page.write([self._fleet.health.state(r.number).value for r in self._replicas], {})
        for wake_up in self._wake_ups:
            wake_up.cancel()
        for pump in self.pumps:
            pump.cancel()
        await asyncio.gather(*self.pumps, return_exceptions=True)

    async def _pump(self, replica: _Replica) -> None:
        """Sends assigned requests to a replica and distributes the replica's results, until this
        task is cancelled.

        If the replica has no request in flight, `_pump` waits for an assignment. If the replica has
        requests in flight, `_pump` calls the replica for results. A call to a server returns after
        about WAIT_S seconds, even if the server has no results yet. `_pump` then calls the server
        again, and passes the requests that were assigned during the previous call. While `held`
        returns True, `_pump` waits. After each call to the replica, `_pump` yields to the event
        loop, so that trajectories that received answers can send their next requests.
        """
        params = None
        while True:
            await replica.work.wait()
            while self._held():
                self._going_on.clear()
                await self._going_on.wait()
            if not self._fleet.serves(replica.number):
                self._lost_all(replica, "its engine was lost in a weight update")
                self._assign()
                continue
            self._put_down()
            async with replica.turn:
                new, params = replica.next_call() if replica.assigned else ([], params)
                gone, results = await self._advanced(replica.number, new, params)
            for result in results:
                if isinstance(result, LostRequest):
                    if self._lost(replica, result):
                        gone = gone or result.reason
                else:
                    self._retries.answered(result.rid, replica.number)
                    self._fleet.health.answered(replica.number)
                    _, _, answer = self._asked.pop(result.rid)
                    if not answer.cancelled():
                        result.replica = replica.number
                        answer.set_result(result)
                replica.under_way -= 1
            if gone:
                self._fleet.lose(replica.number, gone)
                self._fleet.require_serving()
                self._lost_all(replica, gone)
            if not replica.under_way:
                replica.work.clear()
            replica.reserved = len(results)
            # trajectories that received an answer may send their next request
            await asyncio.sleep(0)
            replica.reserved = 0
            self._assign()

    async def _advanced(
        self, replica: int, new: Sequence[GenerateRequest], params: SamplingParams | None
    ) -> tuple[str, Sequence[GenerateResult | LostRequest]]:
        """Calls a replica. Returns two values. The first value is the reason why the replica is
        lost, or "" if the replica is not lost. The second value contains the results of the
        call."""
        workers = self._fleet.workers
        try:
            return "", await workers.result(
                workers.start_on(replica, "advance", new, params, WAIT_S)
            )
        except LOST as error:
            return error.what, []

    def _lost_all(self, replica: _Replica, why: str) -> None:
        """Queues all requests of a lost replica for a retry."""
        for rid in self._retries.under_way(replica.number):
            self._make_again(replica, LostRequest(rid, why))
        replica.assigned.clear()
        replica.under_way = 0
        replica.work.clear()

    def _lost(self, replica: _Replica, lost: LostRequest) -> bool:
        """Queues a lost request for a retry. Returns True if, after this loss, the whole replica
        counts as lost."""
        _, given = self._retries.given().get(lost.rid, (None, 0.0))
        self._make_again(replica, lost)
        now = self.loop.time()
        if lost.gone or self._fleet.health.lost_request(replica.number, lost.reason, given, now):
            return True
        self._wake_ups = {wake_up for wake_up in self._wake_ups if wake_up.when() > now}
        self._wake_ups.add(
            self.loop.call_at(self._fleet.health.open_again(replica.number) + LATER_S, self._assign)
        )
        return False

    def _make_again(self, replica: _Replica, lost: LostRequest) -> None:
        """Puts a lost request back into its queue. If no further attempt is allowed, the task that
        waits for the answer gets a RequestLostError."""
        queue, request, answer = self._asked[lost.rid]
        try:
            self._retries.lost(lost, replica.number)
        except RequestLostError as error:
            del self._asked[lost.rid]
            if not answer.cancelled():
                answer.set_exception(error)
            return
        if answer.cancelled():
            del self._asked[lost.rid]
            self._retries.forget(lost)
        else:
            queue.again.append(request)


class Serving:
    """Connects a set of trajectories to the replicas.

    Args:
        trajectories: number of trajectories. Each trajectory calls `leave` when the trajectory
            ends.
        limit_s: time limit for all trajectories together, in seconds. None means no limit.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        params: SamplingParams,
        trajectories: int,
        limit_s: float | None = None,
    ) -> None:
        self.dispatch, self._limit_s = dispatch, limit_s
        self._queue = dispatch.open(params, trajectories)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See Dispatch.ask."""
        return await self.dispatch.ask(self._queue, request)

    def leave(self) -> None:
        """Records that a trajectory is finished and will send no more requests."""
        self.dispatch.left(self._queue)

    def close(self) -> None:
        """Closes the queue. After `close`, this object must not receive further requests."""
        self.dispatch.close(self._queue)

    async def finished(self, trajectories: Sequence[asyncio.Task[None]]) -> None:
        """Waits until all trajectories are finished. Raises the first error of a trajectory or a
        replica.

        Raises:
            RolloutLateError: the time limit passed.
        """
        made = asyncio.ensure_future(asyncio.gather(*trajectories))
        ended: list[asyncio.Future[Any]] = [made, *self.dispatch.pumps]
        try:
            done, _ = await asyncio.wait(
                ended, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise RolloutLateError(
                    f"{sum(t.done() for t in trajectories)} of {len(trajectories)} trajectories"
                    f" were made in {self._limit_s:g} s, and {self.dispatch.under_way} requests are"
                    " under way at the engines",
                    where="faults.requests.rollout_s",
                    fix=(
                        "raise the limit, or set it to null; if few requests are under way, the"
                        " environment or the verifier is slow"
                    ),
                )
            for each in ended:
                if each.done():
                    each.result()
        finally:
            for trajectory in trajectories:
                trajectory.cancel()
            # `made` too: asyncio prints a traceback for a future whose error nobody retrieves
            await asyncio.gather(made, *trajectories, return_exceptions=True)


def split_evenly(requests: Sequence[GenerateRequest], engines: int) -> list[list[GenerateRequest]]:
    """Splits requests into one contiguous shard per engine. The sizes of any two shards differ by
    at most one request, and a shard may be empty."""
    if engines < 1:
        raise ValueError(f"cannot split over {engines} engines")
    bounds = [len(requests) * i // engines for i in range(engines + 1)]
    return [list(requests[a:b]) for a, b in pairwise(bounds)]
