"""Requests of trajectories on their way to the replicas and back, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult, LostRequest, RequestLostError
from megatron_stare.rollout.fleet.fleet import LOST, Fleet
from megatron_stare.rollout.fleet.requests_page import RequestsPage
from megatron_stare.rollout.fleet.retries import Retries

LATER_S = 1e-3  # a timer may go off a tick before its time, and nothing else would wake a pool of one replica
WAIT_S = 0.1  # a replica that is at work is asked this often whether it takes more


class RolloutLateError(UserError):
    """A rollout did not end within its limit."""


@dataclass
class _Replica:
    """What is under way at one replica."""

    number: int
    capacity: int | None  # see ModelInfo
    assigned: deque[tuple[GenerateRequest, SamplingParams]] = field(default_factory=deque)  # not handed over yet
    under_way: int = 0  # assigned, or handed over and not answered
    reserved: int = 0  # places of requests just answered, for those that continue them
    work: asyncio.Event = field(default_factory=asyncio.Event)  # there is something under way
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is asked; first come, first served

    def give(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        if requests:
            self.assigned += [(request, params) for request in requests]
            self.under_way += len(requests)
            self.work.set()

    def next_call(self) -> tuple[list[GenerateRequest], SamplingParams]:
        """What it is given next: what was assigned first, as far as that is sampled alike."""
        params = self.assigned[0][1]
        requests = []
        while self.assigned and self.assigned[0][1] == params:
            requests.append(self.assigned.popleft()[0])
        return requests, params


class Dispatch:
    """Hands requests to the replicas and answers back, for all who are served; lives in one event loop.

    A request that a replica lost is given to another (retries.py), before those of its serving that none has had.

    Args:
        held: whether replicas may not be asked for tokens now; `hold` waits for those that are being asked.
    """

    def __init__(self, fleet: Fleet, held: Callable[[], bool], retries: Retries) -> None:
        self._fleet, self._held, self._retries = fleet, held, retries
        self._wake_ups: set[asyncio.TimerHandle] = set()
        self._going_on = asyncio.Event()  # set when what held the replicas ends
        self._assigning = False  # will be done soon
        self._page = RequestsPage()
        self._putting: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()
        self.servings: list[Serving] = []  # in the order in which they were opened
        self.asked: dict[str, tuple[Serving, GenerateRequest, asyncio.Future[GenerateResult]]] = {}
        self.replicas = [_Replica(number, info.capacity) for number, info in enumerate(fleet.infos)]
        self.together = any(replica.capacity is None for replica in self.replicas)
        self.pumps = [asyncio.create_task(self._pump(replica)) for replica in self.replicas]

    @property
    def under_way(self) -> int:
        """Requests at the replicas that are not answered."""
        return sum(replica.under_way for replica in self.replicas)

    def assign(self) -> None:
        """Gives replicas what they have room for."""
        self._assigning = False
        for serving in self.servings:
            serving.assign()
        self._put_down()

    def _put_down(self) -> None:
        """Has the page of requests written soon, because something has changed."""
        if self._putting is None and (wait_s := self._page.wait_s()) is not None:
            self._putting = self.loop.call_later(wait_s, self._put)

    def _put(self) -> None:
        """Who has what. Times of this loop are those of CLOCK_MONOTONIC."""
        self._putting = None
        given = {
            rid: (replica, when, self.asked[rid][1].prompt_cursor, self.asked[rid][1].sample_index)
            for rid, (replica, when) in self._retries.given().items()
            if rid in self.asked
        }
        self._page.write([self._fleet.health.state(r.number).value for r in self.replicas], given)

    def assign_soon(self) -> None:
        """As `assign`, once all who were woken with the caller have asked: they come before what is not begun."""
        if not self._assigning:
            self._assigning = True
            self.loop.call_soon(self.assign)

    @property
    def serving(self) -> list[_Replica]:
        """The replicas that may be asked."""
        return [replica for replica in self.replicas if self._fleet.serves(replica.number)]

    def place(self, request: GenerateRequest, params: SamplingParams) -> bool:
        """Gives a request to a replica with room, if there is one for it."""
        best = self._retries.choose(request.rid, self._rooms(), self.loop.time())
        if best is not None:
            self.give(self.replicas[best], [request], params)
        return best is not None

    def place_at(self, replica: int, request: GenerateRequest, params: SamplingParams) -> bool:
        """Gives a request to this replica, if it has room and has lost nothing since it last answered."""
        if not self.trusted(replica) or (self._rooms()[replica] or 0) < 1:
            return False
        self.give(self.replicas[replica], [request], params)
        return True

    def trusted(self, replica: int) -> bool:
        """Whether it is there; and see Retries."""
        return self._fleet.serves(replica) and self._retries.trusted(replica, self.loop.time())

    def _rooms(self) -> list[int | None]:
        """By replica, how many more requests it may be given now; None: it is not there."""
        now = self.loop.time()
        rooms: list[int | None] = [None] * len(self.replicas)
        for r in self.serving:
            rooms[r.number] = self._retries.room(r.number, r.capacity or 0, r.under_way + r.reserved, now)
        return rooms

    def give(self, replica: _Replica, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        now = self.loop.time()
        for request in requests:
            self._retries.give(request.rid, replica.number, now)
        replica.give(requests, params)

    async def hold(self) -> None:
        """Waits until no replica is being asked; unblocked by what they have finished, or WAIT_S."""
        for replica in self.replicas:
            async with replica.turn:
                pass

    def go_on(self) -> None:
        """What held the replicas has ended. One that has come back meanwhile is given requests."""
        self._going_on.set()
        self.assign()

    async def stop(self) -> None:
        """Ends the pumps. Waits until they are cancelled, and for no replica."""
        if self._putting is not None:
            self._putting.cancel()
        self._page.write([self._fleet.health.state(r.number).value for r in self.replicas], {})
        for wake_up in self._wake_ups:
            wake_up.cancel()
        for pump in self.pumps:
            pump.cancel()
        await asyncio.gather(*self.pumps, return_exceptions=True)

    async def _pump(self, replica: _Replica) -> None:
        """Hands a replica what is assigned to it and takes what it has finished, until it is cancelled.

        Waits for an assignment where nothing is under way, else for the replica; unblocked by what it has finished, or
        after WAIT_S where it can say that nothing is, so that it is given more meanwhile. Where replicas are held it
        waits for the end of that, and after each answer for one turn of the loop, in which those who were answered ask
        for more.
        """
        params = None
        while True:
            await replica.work.wait()
            while self._held():
                self._going_on.clear()
                await self._going_on.wait()
            if not self._fleet.serves(replica.number):
                self._lost_all(replica, "its engine was lost in a weight update")
                self.assign()
                continue
            self._put_down()
            async with replica.turn:
                new, params = replica.next_call() if replica.assigned else ([], params)
                gone, results = await self._advanced(replica.number, new, params)
            for result in results:
                if isinstance(result, LostRequest):
                    before = self._retries.in_a_row(replica.number)
                    self._lost(replica, result)
                    counts = self._retries.in_a_row(replica.number) > before
                    if result.gone or self._fleet.lost_request(replica.number, result.reason, counts):
                        gone = gone or result.reason
                else:
                    self._retries.answered(result.rid, replica.number)
                    self._fleet.answered(replica.number)
                    _, _, answer = self.asked.pop(result.rid)
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
            self.assign()

    async def _advanced(
        self, replica: int, new: Sequence[GenerateRequest], params: SamplingParams | None
    ) -> tuple[str, Sequence[GenerateResult | LostRequest]]:
        """Why the replica is lost, "" where it is there; and what it has finished."""
        workers = self._fleet.workers
        try:
            return "", await workers.result(workers.start_on(replica, "advance", new, params, WAIT_S))
        except LOST as error:
            return error.what, []

    def _lost_all(self, replica: _Replica, why: str) -> None:
        """Has all that a lost replica had made again."""
        for rid in self._retries.under_way(replica.number):
            self._lost(replica, LostRequest(rid, why))
        replica.assigned.clear()
        replica.under_way = 0
        replica.work.clear()
        self._retries.renew(replica.number)

    def _lost(self, replica: _Replica, lost: LostRequest) -> None:
        """Has a request made again. Where it was made as often as allowed, whoever waits for it is told."""
        serving, request, answer = self.asked[lost.rid]
        try:
            open_again = self._retries.lost(lost, replica.number, self.loop.time())
        except RequestLostError as error:
            del self.asked[lost.rid]
            if not answer.cancelled():
                answer.set_exception(error)
            return
        now = self.loop.time()
        self._wake_ups = {wake_up for wake_up in self._wake_ups if wake_up.when() > now}
        self._wake_ups.add(self.loop.call_at(open_again + LATER_S, self.assign))
        if answer.cancelled():
            del self.asked[lost.rid]
            self._retries.forget(lost)
        else:
            serving.again.append(request)


class Serving:
    """Requests of trajectories under way, from their environments to the replicas and back.

    Where replicas have a capacity, each request goes at once to the one with the most room. One that continues what a
    replica had before goes there again, in front of what is begun, because that holds its keys and values. While that
    one is full it waits, as long as there is other work for the rest: no replica is left with room for its sake. One
    that has lost a request since it last answered is not waited for.

    Where replicas take all that waits, requests wait until every trajectory that is still being made waits for tokens,
    and are shared out then: what stands in a batch depends on the trajectories alone, not on the clock. An environment
    that waits for something else, a tool say, keeps such replicas waiting.

    Args:
        trajectories: that will be made; each says `leave` at its end.
        limit_s: in which all of them must have been made; None: no limit.
    """

    def __init__(
        self, dispatch: Dispatch, params: SamplingParams, trajectories: int, limit_s: float | None = None
    ) -> None:
        self.dispatch, self._params, self._limit_s = dispatch, params, limit_s
        self._live = trajectories
        self._waiting: deque[GenerateRequest] = deque()
        self._continuing: dict[int, deque[GenerateRequest]] = {}  # by the replica that had what stands before them
        self.again: deque[GenerateRequest] = deque()  # lost by a replica
        dispatch.servings.append(self)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Waits for the request's answer; unblocked by it. A replica's error is raised by its pump.

        Raises:
            RequestLostError: it was asked for as often as allowed, and lost each time.
        """
        answer: asyncio.Future[GenerateResult] = self.dispatch.loop.create_future()
        self.dispatch.asked[request.rid] = self, request, answer
        if request.replica is None or self.dispatch.together:
            self._waiting.append(request)
        else:
            self._continuing.setdefault(request.replica, deque()).append(request)
        self.dispatch.assign_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            for line in (self._waiting, self.again, *self._continuing.values()):
                with contextlib.suppress(ValueError):  # it has been given to a replica, which may still answer
                    line.remove(request)
            raise

    def leave(self) -> None:
        """A trajectory is finished and will ask for nothing more."""
        self._live -= 1
        self.dispatch.assign_soon()

    async def finished(self, trajectories: Sequence[asyncio.Task[None]]) -> None:
        """Waits until all trajectories are; unblocked by the first error of one of them or of a replica, and raises
        it, or by the rollout's limit.

        Raises:
            RolloutLateError: the limit passed.
        """
        made = asyncio.ensure_future(asyncio.gather(*trajectories))
        ended: list[asyncio.Future[Any]] = [made, *self.dispatch.pumps]  # a pump ends by an error alone
        try:
            done, _ = await asyncio.wait(ended, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RolloutLateError(
                    f"{sum(t.done() for t in trajectories)} of {len(trajectories)} trajectories were made in "
                    f"{self._limit_s:g} s, and {self.dispatch.under_way} requests are under way at the engines",
                    where="faults.requests.rollout_s",
                    fix="raise it, or set it to null; where few requests are under way, environment or verifier wait",
                )
            for each in ended:
                if each.done():
                    each.result()
        finally:
            for trajectory in trajectories:
                trajectory.cancel()
            # `made` too: asyncio reports the error of a future that nobody asked, with a traceback
            await asyncio.gather(made, *trajectories, return_exceptions=True)

    def assign(self) -> None:
        """Gives replicas what waits here and they have room for."""
        if self.dispatch.together:
            replicas = self.dispatch.serving
            waiting = len(self.again) + len(self._waiting)
            if not waiting or waiting < self._live:
                return
            every = [*self.again, *self._waiting]
            order = sorted(every, key=lambda request: (request.prompt_cursor, request.sample_index))
            self.again.clear()
            self._waiting.clear()
            for replica, shard in zip(replicas, split_evenly(order, len(replicas)), strict=True):
                self.dispatch.give(replica, shard, self._params)
            return
        for number, line in self._continuing.items():
            while line and self.dispatch.place_at(number, line[0], self._params):
                line.popleft()
        for _ in range(len(self.again)):  # one may have to wait for a replica that the next has not to
            request = self.again.popleft()
            if not self.dispatch.place(request, self._params):
                self.again.append(request)
        left = [line for number, line in self._continuing.items() if not self.dispatch.trusted(number)]
        for line in (*left, self._waiting, *self._continuing.values()):
            while line and self.dispatch.place(line[0], self._params):
                line.popleft()


def split_evenly(requests: Sequence[GenerateRequest], engines: int) -> list[list[GenerateRequest]]:
    """One contiguous shard an engine; their sizes differ by at most one, and are 0 where requests are few."""
    if engines < 1:
        raise ValueError(f"cannot split over {engines} engines")
    bounds = [len(requests) * i // engines for i in range(engines + 1)]
    return [list(requests[a:b]) for a, b in pairwise(bounds)]
