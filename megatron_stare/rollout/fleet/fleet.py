"""The replicas' workers as long as they last: called together, left out once they are lost, and
brought back beside the run. What a replica's state allows is health.py's matter; here is what is
done about it.

A replica is brought back on a thread of its own: its worker is ended and made anew where it was,
and comes up. The next weight update that finds it up takes it in.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.process.workers import Handle, WorkerLostError, Workers
from megatron_stare.rollout.engines.engine import EngineLostError, ModelInfo
from megatron_stare.rollout.engines.state import publishes
from megatron_stare.rollout.fleet.health import SERVING, SYNCED, FleetHealth, Health, RestartRule

LOST = (EngineLostError, WorkerLostError)
PATIENCE_S = 1.0  # until a server of somebody else is asked again, at least
LEAVE_S = 10.0  # that a worker on its way up is given to end


class Fleet:
    """The replicas of a run.

    Whoever hands requests to a replica, while nobody else has it, tells `health` what it lost and
    answered.

    Args:
        workers: an engine each; brought up here, all at once.
        back_off_s: see FleetHealth.

    Raises:
        UserError: one does not come up.
    """

    def __init__(self, workers: Workers, rule: RestartRule, back_off_s: float) -> None:
        self.workers = workers
        self.infos: list[ModelInfo] = workers.call("bring_up")
        self.health = FleetHealth(len(self.infos), rule, back_off_s)
        for number, info in enumerate(self.infos):
            self.health.came_up(number)
            if publishes(info.state):
                self.health.synced(number, info.weight_version, proved=True)
        self.losses = 0  # of all replicas together; what was agreed with them holds until it rises
        self._patient, self._back_off_s = rule.most is None, rule.back_off_s
        self._coming: dict[int, Future[ModelInfo]] = {}  # on their way up again
        self._closed, self._lock = threading.Event(), threading.Lock()
        # transitions taken, by the state they led to
        self._counts: Counter[str] = Counter()
        self.news: list[str] = []  # for who watches the run; taken by `take_news`

    def serves(self, replica: int) -> bool:
        """True where it may be asked for tokens."""
        return self.health.state(replica) in SERVING

    def require_serving(self) -> None:
        """Raises NoEngineError where no replica may be asked for tokens."""
        self.health.require(SERVING)

    def call(
        self,
        method: str,
        *args: Any,
        among: Collection[int] | None = None,
        states: Collection[Health] = SYNCED,
        beside: Sequence[Handle] = (),
    ) -> dict[int, Any]:
        """A call of every replica in one of the states, or of those `among` them; their results.
        Waits for all of them. One that is lost meanwhile is left out.

        Args:
            beside: calls of other workers that these need, whose errors are seen at once.

        Raises:
            NoEngineError: none has a result.
            UserError: another error, the first of one that is not lost.
        """
        asked = [
            number for number in self.health.require(states) if among is None or number in among
        ]
        handles: dict[int, Handle] = {}
        results: dict[int, Any] = {}
        errors: list[Exception] = []
        for number in asked:
            with self._seen(number, errors):
                handles[number] = self.workers.start_on(number, method, *args)
        if beside:
            with contextlib.suppress(*LOST):  # whose error it is, is found next
                self.workers.wait([*handles.values(), *beside])
            self.workers.wait(beside)
        for number, handle in handles.items():
            with self._seen(number, errors):
                (results[number],) = self.workers.wait([handle])
        if errors:
            raise errors[0]
        if not results:
            self.health.require(())
        return results

    @contextlib.contextmanager
    def _seen(self, replica: int, errors: list[Exception]) -> Iterator[None]:
        """Takes in what a call of a replica raises: it is lost, or the error is one more of
        these."""
        try:
            yield
        except LOST as error:
            self.lose(replica, error.what)
        except Exception as error:
            errors.append(error)

    def find_lost(self, among: Collection[int]) -> bool:
        """Asks replicas whether they are there; whether one of them is not any more."""
        before = self.losses
        with contextlib.suppress(UserError):  # what else is wrong with them is not asked
            self.call("check", among=among)
        return self.losses > before

    def lose(self, replica: int, why: str) -> None:
        """Gives a replica up, with all that it had. Begins it again where that is allowed now."""
        with self._lock:
            if self.health.state(replica) in (Health.DEAD, Health.STARTING):
                return  # known already
            self.losses += 1
            self.health.lost(replica, why, time.monotonic())
            self._begin_due()

    def look(self) -> None:
        """Takes in those that have come up since, and begins again those that may be."""
        with self._lock:
            for replica in [replica for replica, coming in self._coming.items() if coming.done()]:
                coming = self._coming.pop(replica)
                if error := coming.exception():
                    said = (
                        error.what
                        if isinstance(error, UserError)
                        else f"{type(error).__name__}: {error}"
                    )
                    self.health.lost(replica, f"it did not come up: {said}", time.monotonic())
                else:
                    self.infos[replica] = coming.result()
                    self.health.came_up(replica)
            self._begin_due()

    def _begin_due(self) -> None:
        now = time.monotonic()
        for replica in self.health.due(now):
            self.health.begun_again(replica, now)
            future: Future[ModelInfo] = Future()
            self._coming[replica] = future
            threading.Thread(
                target=self._bring_back, args=(replica, future), name="restart", daemon=True
            ).start()

    def _bring_back(self, replica: int, future: Future[ModelInfo]) -> None:
        """Ends what is left of a replica and brings it up anew. Waits for its server; ended by
        `close`."""
        pause_s = max(self._back_off_s, PATIENCE_S)
        try:
            self.workers.replace(replica)
            while True:
                try:
                    (info,) = self.workers.wait([self.workers.start_on(replica, "bring_up")])
                    break
                except UserError:
                    if not self._patient or self._closed.wait(pause_s):
                        raise
            future.set_result(info)
        except BaseException as error:
            future.set_exception(error)

    def take_news(self) -> list[str]:
        """Takes what there is to tell of the replicas since this was asked last, a line each."""
        self._take()
        told, self.news = self.news, []
        return told

    def metrics(self) -> dict[str, float]:
        """Counts the replicas that take requests, and those that came into each state since this
        was asked last."""
        self._take()
        counts, self._counts = self._counts, Counter()
        into = {f"engine/{state.value}": float(counts[state.value]) for state in Health}
        return {"engine/serving": float(len(self.health.among(SERVING))), **into}

    def _take(self) -> None:
        while self.health.transitions:
            transition = self.health.transitions.popleft()
            self._counts[transition.after.value] += 1
            if transition.why:
                self.news.append(str(transition))

    def close(self) -> None:
        """Ends all workers, those on their way up too. Closing twice is allowed."""
        self._closed.set()
        self.workers.close()
        wait(self._coming.values(), timeout=LEAVE_S)
