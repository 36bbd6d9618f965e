"""Requests of trajectories on their way to the replicas and back, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# a timer may fire a tick too early, and nothing else would wake a pool of one replica
LATER_S = 1e-3
WAIT_S = 0.1  # a replica that is at work is asked this often whether it takes more
# least seconds between two pages of requests, also as a multiple of the last one's cost
PAGE_S, PAGE_SHARE = 1.0, 100.0
OLDEST = 5  # requests of each engine that the page names


class RolloutLateError(UserError):
    """A rollout did not end within its limit."""


@dataclass
class _Replica:
    """The requests under way at one replica."""

    number: int
    capacity: int | None  # see ModelInfo
    # assigned to the replica, not handed over yet
    assigned: deque[tuple[GenerateRequest, SamplingParams]] = field(default_factory=deque)
    under_way: int = 0  # assigned, or handed over and not answered
    reserved: int = 0  # places of requests just answered, for those that continue them
    work: asyncio.Event = field(default_factory=asyncio.Event)  # there is something under way
    # held while the replica is asked for room; first come, first served
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def give(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        if requests:
            self.assigned += [(request, params) for request in requests]
            self.under_way += len(requests)
            self.work.set()

    def next_call(self) -> tuple[list[GenerateRequest], SamplingParams]:
        """Takes what it is given next: what was assigned first, as far as that is sampled alike."""
        params = self.assigned[0][1]
        requests = []
        while self.assigned and self.assigned[0][1] == params:
            requests.append(self.assigned.popleft()[0])
        return requests, params


@dataclass(eq=False)
class _Queue:
    """The requests of one serving that no replica has been given.

    live: trajectories that are still being made.
    again: requests that a replica lost.
    continuing: those that continue what a replica had before, by that replica.
    new: all others.
    """

    params: SamplingParams
    live: int
    again: deque[GenerateRequest] = field(default_factory=deque)
    continuing: dict[int, deque[GenerateRequest]] = field(default_factory=dict)
    new: deque[GenerateRequest] = field(default_factory=deque)

    def lines(self) -> Iterator[deque[GenerateRequest]]:
        yield from (self.again, self.new, *self.continuing.values())


class RequestsPage:
    """A page of what the driver has asked of engines, and how these stand: one small file in the
    node's memory, which the black box reads.

    Written about once a second while requests are under way, and less often where that would cost
    more than a hundredth of the event loop's time: `write` is due `wait_s` after something has
    changed. Nobody watches, nothing is written.
    """

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._file = None if not folder else Path(folder) / REQUESTS
        self._next = 0.0

    def wait_s(self) -> float | None:
        """Seconds until the page is to be written, where something has changed; None: nobody reads
        it."""
        return None if self._file is None else max(0.0, self._next - time.monotonic())

    def write(
        self, states: Sequence[str], given: Mapping[str, tuple[int, float, int, int]]
    ) -> None:
        """Replaces the page.

        Args:
            states: of the engines, in order.
            given: of each request under way: the engine, when it was given, seconds of
                CLOCK_MONOTONIC, prompt, sample.
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
    """Hands requests to the replicas and answers back, for all who are served; lives in one event
    loop. Who is served asks through a Serving, of which this knows the queue alone.

    A request that a replica lost is given to another (retries.py), before those of its queue that
    none has had.

    Where replicas have a capacity, each request goes at once to the one with the most room. One
    that continues what a replica had before goes there again, in front of what is begun, because
    that holds its keys and values. While that one is full it waits, as long as there is other work
    for the rest: no replica is left with room for its sake. One that has lost a request since it
    last answered is not waited for.

    Where replicas take all that waits, requests wait until every trajectory that is still being
    made waits for tokens, and are shared out then: what stands in a batch depends on the
    trajectories alone, not on the clock. An environment that waits for something else, a tool say,
    keeps such replicas waiting.

    Args:
        held: whether replicas may not be asked for tokens now; `hold` waits for those that are
            being asked.
    """

    def __init__(self, fleet: Fleet, held: Callable[[], bool], retries: Retries) -> None:
        self._fleet, self._held, self._retries = fleet, held, retries
        self._wake_ups: set[asyncio.TimerHandle] = set()
        self._going_on = asyncio.Event()  # set when what held the replicas ends
        self._assigning = False  # will be done soon
        self._page = RequestsPage()
        self._putting: asyncio.TimerHandle | None = None
        self._queues: list[_Queue] = []  # in the order in which they were opened
        self._asked: dict[str, tuple[_Queue, GenerateRequest, asyncio.Future[GenerateResult]]] = {}
        self._replicas = [
            _Replica(number, info.capacity) for number, info in enumerate(fleet.infos)
        ]
        self._together = any(replica.capacity is None for replica in self._replicas)
        self.loop = asyncio.get_running_loop()
        # pumps end by an error alone
        self.pumps = [asyncio.create_task(self._pump(replica)) for replica in self._replicas]
        fleet.health.end_back_offs()

    @property
    def in_use(self) -> bool:
        """True while anybody is served."""
        return bool(self._queues)

    @property
    def under_way(self) -> int:
        """Requests at the replicas that are not answered."""
        return sum(replica.under_way for replica in self._replicas)

    def open(self, params: SamplingParams, trajectories: int) -> _Queue:
        """Opens a queue for a number of trajectories, each of which is said to have `left` at its
        end."""
        queue = _Queue(params, trajectories)
        self._queues.append(queue)
        return queue

    def close(self, queue: _Queue) -> None:
        """Closes a queue in which nothing is asked for any more."""
        self._queues.remove(queue)

    async def ask(self, queue: _Queue, request: GenerateRequest) -> GenerateResult:
        """Waits for the request's answer; unblocked by it. A replica's error is raised by its pump.

        Raises:
            RequestLostError: it was asked for as often as allowed, and lost each time.
        """
        answer: asyncio.Future[GenerateResult] = self.loop.create_future()
        self._asked[request.rid] = queue, request, answer
        if request.replica is None or self._together:
            queue.new.append(request)
        else:
            queue.continuing.setdefault(request.replica, deque()).append(request)
        self._assign_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            for line in queue.lines():
                # ValueError: a replica has the request already, and may still answer
                with contextlib.suppress(ValueError):
                    line.remove(request)
            raise

    def left(self, queue: _Queue) -> None:
        """Takes down that one of the queue's trajectories is finished and will ask for nothing
        more."""
        queue.live -= 1
        self._assign_soon()

    def _assign_soon(self) -> None:
        """Assigns once all who were woken with the caller have asked: they come before what is not
        begun."""
        if not self._assigning:
            self._assigning = True
            self.loop.call_soon(self._assign)

    def _assign(self) -> None:
        """Gives replicas what they have room for."""
        self._assigning = False
        for queue in self._queues:
            if self._together:
                self._share_out(queue)
            else:
                self._place_all(queue)
        self._put_down()

    def _share_out(self, queue: _Queue) -> None:
        """Gives all that waits to the replicas in equal parts, once every trajectory waits."""
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
        """Gives each request that waits to a replica that has room for it."""
        for number, line in queue.continuing.items():
            while line and self._place_at(number, line[0], queue.params):
                line.popleft()
        # one retry may have to wait for a replica while the next need not
        for _ in range(len(queue.again)):
            request = queue.again.popleft()
            if not self._place(request, queue.params):
                queue.again.append(request)
        left = [line for number, line in queue.continuing.items() if not self._trusted(number)]
        for line in (*left, queue.new, *queue.continuing.values()):
            while line and self._place(line[0], queue.params):
                line.popleft()

    def _put_down(self) -> None:
        """Has the page of requests written soon, because something has changed."""
        if self._putting is None and (wait_s := self._page.wait_s()) is not None:
            self._putting = self.loop.call_later(wait_s, self._put)

    def _put(self) -> None:
        """Writes the page. Times of this loop are those of CLOCK_MONOTONIC."""
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
        """Gives a request to a replica with room, if there is one for it."""
        health = self._fleet.health
        best = self._retries.choose(
            request.rid, self._rooms(), health.avoided(self.loop.time()), health.suspected()
        )
        if best is not None:
            self._give(self._replicas[best], [request], params)
        return best is not None

    def _place_at(self, replica: int, request: GenerateRequest, params: SamplingParams) -> bool:
        """Gives a request to this replica, if it has room and has lost nothing since it last
        answered."""
        if not self._trusted(replica) or (self._rooms()[replica] or 0) < 1:
            return False
        self._give(self._replicas[replica], [request], params)
        return True

    def _trusted(self, replica: int) -> bool:
        """See FleetHealth."""
        return self._fleet.health.trusted(replica, self.loop.time())

    def _rooms(self) -> list[int | None]:
        """By replica, how many more requests it may be given now; None: it is not there."""
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
        """Waits until no replica is being asked; unblocked by what they have finished, or
        WAIT_S."""
        for replica in self._replicas:
            async with replica.turn:
                pass

    def go_on(self) -> None:
        """Goes on after what held the replicas has ended. One that has come back meanwhile is given
        requests."""
        self._going_on.set()
        self._assign()

    async def stop(self) -> None:
        """Ends the pumps. Waits until they are cancelled, and for no replica."""
        if self._putting is not None:
            self._putting.cancel()
        self._page.write([self._fleet.health.state(r.number).value for r in self._replicas], {})
        for wake_up in self._wake_ups:
            wake_up.cancel()
        for pump in self.pumps:
            pump.cancel()
        await asyncio.gather(*self.pumps, return_exceptions=True)

    async def _pump(self, replica: _Replica) -> None:
        """Hands a replica what is assigned to it and takes what it has finished, until it is
        cancelled.

        Waits for an assignment where nothing is under way, else for the replica; unblocked by what
        it has finished, or after WAIT_S where it can say that nothing is, so that it is given more
        meanwhile. Where replicas are held it waits for the end of that, and after each answer for
        one turn of the loop, in which those who were answered ask for more.
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
            await asyncio.sleep(0)  # who was answered asks for more, if at once
            replica.reserved = 0
            self._assign()

    async def _advanced(
        self, replica: int, new: Sequence[GenerateRequest], params: SamplingParams | None
    ) -> tuple[str, Sequence[GenerateResult | LostRequest]]:
        """Asks a replica. Returns why it is lost, "" where it is there, and what it has
        finished."""
        workers = self._fleet.workers
        try:
            return "", await workers.result(
                workers.start_on(replica, "advance", new, params, WAIT_S)
            )
        except LOST as error:
            return error.what, []

    def _lost_all(self, replica: _Replica, why: str) -> None:
        """Has all that a lost replica had made again."""
        for rid in self._retries.under_way(replica.number):
            self._make_again(replica, LostRequest(rid, why))
        replica.assigned.clear()
        replica.under_way = 0
        replica.work.clear()

    def _lost(self, replica: _Replica, lost: LostRequest) -> bool:
        """Has a request made again that a replica called lost. Returns whether the replica is lost
        itself."""
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
        """Puts a request that a replica has lost into its queue anew. Where it was made as often as
        allowed, whoever waits for it is told."""
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
    """The way to the replicas for trajectories that are made together, from their environments and
    back.

    Args:
        trajectories: that will be made; each says `leave` at its end.
        limit_s: in which all of them must have been made; None: no limit.
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
        """Says that a trajectory is finished and will ask for nothing more."""
        self.dispatch.left(self._queue)

    def close(self) -> None:
        """Says that nothing is asked for any more."""
        self.dispatch.close(self._queue)

    async def finished(self, trajectories: Sequence[asyncio.Task[None]]) -> None:
        """Waits until all trajectories are; unblocked by the first error of one of them or of a
        replica, and raises it, or by the rollout's limit.

        Raises:
            RolloutLateError: the limit passed.
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
            # `made` too: asyncio reports the error of a future that nobody asked, with a traceback
            await asyncio.gather(made, *trajectories, return_exceptions=True)


def split_evenly(requests: Sequence[GenerateRequest], engines: int) -> list[list[GenerateRequest]]:
    """One contiguous shard an engine; their sizes differ by at most one, and are 0 where requests
    are few."""
    if engines < 1:
        raise ValueError(f"cannot split over {engines} engines")
    bounds = [len(requests) * i // engines for i in range(engines + 1)]
    return [list(requests[a:b]) for a, b in pairwise(bounds)]
